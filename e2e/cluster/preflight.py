"""Checks whether this machine can run a local cluster: one sentence for each missing prerequisite.

Runs before anything is installed, so it needs nothing but Python's own library:

    python3 e2e/cluster/preflight.py
"""

from __future__ import annotations  # an older Python must be able to read this file

import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass

PYTHON = (3, 11)
COMMANDS = {
    "nsenter": "it enters the cluster's namespaces; install util-linux",
    "unshare": "it is how you look into such namespaces by hand; install util-linux",
    "setpriv": "it gives containers their user; install util-linux (Debian: setpriv)",
    "ip": "it connects nodes and pods; install iproute2",
    "git": "it is how this project is fetched and released; install git",
    "make": "it runs the project's verbs; install make",
}


@dataclass(frozen=True)
class Machine:
    """The facts that decide; a test makes its own."""

    system: str
    user: int
    python: tuple[int, int]
    max_user_namespaces: int
    closed: tuple[str, ...]  # folders that pods need and other users may not read
    find: Callable[[str], str | None]  # where a command is


def this_machine() -> Machine:
    """The facts of the machine this runs on."""
    checkout = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    needed = [checkout, os.path.join(checkout, "api"), sys.prefix, sys.base_prefix]
    closed = tuple(folder for folder in needed if os.stat(folder).st_mode & 0o005 != 0o005)
    return Machine(platform.system(), os.geteuid(), sys.version_info[:2], _max_user_namespaces(), closed, shutil.which)


def missing(machine: Machine) -> list[str]:
    """One sentence for each thing that is missing; Go is not among them, since it can be installed by pip."""
    if machine.system != "Linux":
        return [f"The local cluster needs Linux, and this is {machine.system}: use a virtual machine."]
    found = []
    if machine.python < PYTHON:
        have, need = (".".join(map(str, version)) for version in (machine.python, PYTHON))
        found.append(f"The local cluster needs Python {need} or newer, and this is {have}.")
    if machine.user:
        found.append("The local cluster needs root, once, to map a range of user ids: run this with sudo or as root.")
    if machine.max_user_namespaces == 0:
        found.append("User namespaces are switched off here: set the sysctl user.max_user_namespaces to 10000.")
    found += [
        f"Pods run as another user, who may not read {folder}: run chmod -R o+rX {folder}" for folder in machine.closed
    ]
    for command, reason in COMMANDS.items():
        if not machine.find(command):
            found.append(f"The command {command} is missing: {reason}.")
    return found


def require() -> None:
    """End the program with those sentences when something is missing."""
    if sentences := missing(this_machine()):
        raise SystemExit("\n".join(sentences))


def _max_user_namespaces() -> int:
    try:
        with open("/proc/sys/user/max_user_namespaces") as file:
            return int(file.read())
    except OSError:
        return 0


if __name__ == "__main__":
    require()
