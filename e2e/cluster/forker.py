"""Starts containers, a few milliseconds each: a process of one thread that forks itself into new namespaces.

    python -S -m e2e.cluster.forker FD        FD: a socket to the runtime, our parent

The runtime has many threads and must not fork itself; starting an interpreter for each
container would cost ten times as much. A forked child is the container's pid 1 and, by
CLONE_PARENT, a child of the runtime, which waits for it as for any other.

A request carries four descriptors: the `Program` as JSON, stdout, stderr, and a pipe on
which an error is reported; that pipe closes without a word when the program has started.
The answer is the pid.
"""

import json
import os
import signal
import socket
import struct
import sys
from dataclasses import asdict, dataclass

from e2e.cluster import rootfs, syscalls

OWN_NAMESPACES = syscalls.CLONE_NEWNS | syscalls.CLONE_NEWUTS | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWPID
START_FAILED = 128  # the exit code other runtimes give


@dataclass(frozen=True)
class Program:
    """A command, its network and its file system: `argv` takes on the identity, then runs `name`, which must exist."""

    argv: list[str]
    name: str
    search: str  # the program's PATH
    network: str  # path of the pod's network namespace; empty for the node's own
    root: rootfs.RootFileSystem

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: str) -> "Program":
        data = json.loads(text)
        root = data.pop("root")
        volumes = [rootfs.Volume(**volume) for volume in root.pop("volumes")]
        return cls(root=rootfs.RootFileSystem(volumes=volumes, **root), **data)


def main(requests: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        message, fds, _, _ = socket.recv_fds(requests, 1, 4)
        if not message:
            return  # the runtime is gone
        for fd in fds:
            os.set_inheritable(fd, False)  # or the report pipe stays open in the program; recv_fds passes no flags on
        pid = syscalls.fork_into(OWN_NAMESPACES)
        if pid == 0:
            become(*fds)
        for fd in fds:
            os.close(fd)
        requests.send(struct.pack("i", pid))


def become(spec: int, stdout: int, stderr: int, report: int) -> None:
    """Turn this process into the container's program; report what prevents it."""
    try:
        os.setsid()
        with open(spec) as file:
            program = Program.from_json(file.read())
        if program.network:
            syscalls.enter_namespace(program.network, syscalls.CLONE_NEWNET)
        socket.sethostname(program.root.hostname)
        rootfs.build(program.root)
        rootfs.find_program(program.name, program.search)
        for fd, number in ((os.open("/dev/null", os.O_RDONLY), 0), (stdout, 1), (stderr, 2)):
            os.dup2(fd, number)
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):  # what this interpreter ignores
            signal.signal(ignored, signal.SIG_DFL)
        os.execvp(program.argv[0], program.argv)
    except BaseException as error:  # noqa: BLE001  whatever it is: this process must not go on as a second forker
        os.write(report, str(error).encode()[:4000])
    finally:
        os._exit(START_FAILED)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
