"""Checks whether this machine can run a real node: one sentence for each missing prerequisite.

python -m e2e.containerd.preflight
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.paths import SYSTEM_PATH
from e2e.containerd import cgroups, tools

CAPABILITIES = {12: "CAP_NET_ADMIN", 21: "CAP_SYS_ADMIN", 27: "CAP_MKNOD"}
COMMANDS = ("ip", "mount", "nsenter", "unshare")


@dataclass(frozen=True)
class Machine:
    """The facts that decide; a test makes its own."""

    system: str
    user: int
    capabilities: int  # the effective set, one bit each
    all_users: bool  # whether every user id exists here: not in a user namespace
    file_systems: str  # /proc/filesystems
    without_controllers: tuple[str, ...]  # cgroup controllers that the kubelet needs and a node cannot have
    commands: tuple[str, ...]  # of COMMANDS, those that are missing
    programs: tuple[str, ...]  # of a node's programs, those that are missing
    packages: bool  # whether the missing ones can be fetched by apt-get
    refused: str = ""  # what the kernel refused when it was tried


def this_machine() -> Machine:
    """The facts of the machine this runs on."""
    if platform.system() != "Linux":
        return Machine(platform.system(), os.geteuid(), 0, False, "", (), (), (), False)
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    ids = Path("/proc/self/uid_map").read_text().split()
    hierarchies = cgroups.of_this_process()
    return Machine(
        system=platform.system(),
        user=os.geteuid(),
        capabilities=int(status["CapEff"], 16),
        all_users=ids == ["0", "0", "4294967295"],
        file_systems=Path("/proc/filesystems").read_text(),
        without_controllers=tuple(cgroups.lacking(hierarchies)) if hierarchies else cgroups.NEEDED,
        commands=tuple(tools.missing(COMMANDS)),
        programs=tuple(tools.missing(list(tools.NODE))),
        packages=all(shutil.which(command, path=SYSTEM_PATH) for command in ("apt-get", "dpkg")),
        refused=_refused(hierarchies) if not os.geteuid() and hierarchies and not tools.missing(COMMANDS) else "",
    )


def _refused(hierarchies: tuple[cgroups.Hierarchy, ...]) -> str:
    """What the kernel refuses although the capabilities are there, as in many containers; empty: nothing."""
    try:
        cgroups.remove(cgroups.create(hierarchies, f"slipway-trial-{os.getpid()}").roots)
    except OSError as error:
        return f"a cgroup ({error})"
    with tempfile.TemporaryDirectory() as folder:
        layers = f"lowerdir={folder}/low,upperdir={folder}/up,workdir={folder}/work"
        trial = (
            f"mount -t tmpfs tmpfs {folder} && mkdir {folder}/low {folder}/up {folder}/work {folder}/all"
            f" && mount -t overlay overlay -o {layers} {folder}/all"
        )
        # The mounts end with their namespace.
        ended = subprocess.run(
            ["unshare", "--mount", "--net", "sh", "-c", trial], capture_output=True, text=True, check=False
        )
    return f"an overlay in a mount namespace ({ended.stderr.strip()})" if ended.returncode else ""


def missing(machine: Machine) -> list[str]:
    """One sentence for each thing that is missing."""
    if machine.system != "Linux":
        return [f"A real node needs Linux, and this is {machine.system}: use a virtual machine."]
    if machine.user or not machine.all_users:
        return ["A real node needs the host's root: run this with sudo or as root, outside user namespaces."]
    found = []
    lacking = [name for bit, name in CAPABILITIES.items() if not machine.capabilities >> bit & 1]
    if lacking:
        found.append(f"A real node needs {', '.join(lacking)}: run this in a virtual machine.")
    if "\toverlay\n" not in machine.file_systems:
        found.append("The kernel has no overlay file system: run modprobe overlay.")
    if machine.without_controllers:
        names = ", ".join(machine.without_controllers)
        found.append(f"The cgroup controllers {names} are not available: enable them in the root cgroup.")
    if machine.commands:
        found.append(f"The commands {', '.join(machine.commands)} are missing: install iproute2 and util-linux.")
    if machine.refused:
        found.append(f"The kernel refuses {machine.refused}: run this in a virtual machine.")
    if machine.programs and not machine.packages:
        found.append(f"The programs {', '.join(machine.programs)} are missing: install them.")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(missing(this_machine())) or 0)
