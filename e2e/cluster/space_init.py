"""The init process of a space: creates the namespaces, and keeps them until the process that started it ends.

    python -S -m e2e.cluster.space_init SPEC        SPEC: {"fd", "users", "covers", "keeps", "setup", "cgroups"} as JSON

`namespaces.Space` starts it and says what the fields mean. It imports little: it is
started before anything else is, and stays.
"""

import json
import os
import signal
import socket
import subprocess
import sys

from e2e.cluster import syscalls

FIRST_ID, IDS = 100000, 65536  # the host ids that the cluster's 0 to 65535 are


def main(fd: int, users: bool, covers: dict[str, int], keeps: list[str], setup: str, cgroups: list[list[str]]) -> None:
    lifeline = socket.socket(fileno=fd)
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    for path, mode in covers.items():
        _cover(path, mode, keeps, FIRST_ID if users else 0)
    namespaces = syscalls.CLONE_NEWUTS | syscalls.CLONE_NEWNET | syscalls.CLONE_NEWPID
    if users:
        # The covers come first: only host root may look below a closed home folder.
        syscalls.unshare(namespaces | syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
        lifeline.send(b"u")
        lifeline.recv(1)  # the maker has written the id maps
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        os.setgroups([])
    elif cgroups:
        roots, processes = cgroups
        _join(roots)  # the cgroup namespace shows these as its roots
        syscalls.unshare(namespaces | syscalls.CLONE_NEWCGROUP | syscalls.CLONE_NEWIPC)
        _join(processes)
    else:
        syscalls.unshare(namespaces)
    init = os.fork()
    if init:
        os.waitpid(init, 0)
        return
    syscalls.mount("proc", "/proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
    subprocess.run(["sh", "-ec", setup], check=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans are reaped by the kernel
    lifeline.send(b"i")
    lifeline.recv(1)  # no byte is ever sent: this returns when the parent process has ended


def _join(cgroups: list[str]) -> None:
    for folder in cgroups:
        with open(f"{folder}/cgroup.procs", "w") as file:
            file.write("0")  # the writer


def _cover(path: str, mode: int, keeps: list[str], owner: int) -> None:
    """Mount an empty tmpfs on `path` and put the `keeps` below it back where they were."""
    kept = [(keep, os.open(keep, os.O_PATH)) for keep in keeps if keep.startswith(path + "/")]
    syscalls.mount("tmpfs", path, "tmpfs", 0, f"mode={mode:o},uid={owner},gid={owner}")
    for keep, fd in kept:
        os.makedirs(keep)
        syscalls.bind(f"/proc/self/fd/{fd}", keep)
        os.close(fd)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
