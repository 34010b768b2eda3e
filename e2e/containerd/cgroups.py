"""The cgroups of a node: children of the launcher's own, made before its namespaces and removed after them.

On cgroup v1 there is one in each hierarchy. On cgroup v2 there is one below the root of the mount, because only the
root may have both processes and children with controllers; the node's processes are in a child of it, so that the
kubelet may have children of its own there. No whole node has run on version 2 yet.
"""

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.namespaces import Cgroups

PREFIX = "slipway-node-"
NEEDED = ("cpu", "cpuset", "memory", "pids")  # by the kubelet
LEAF = "parts"  # on cgroup v2: where the node's own processes are


@dataclass(frozen=True)
class Hierarchy:
    """A mounted hierarchy, and the cgroup of it in which this process is."""

    mount: str  # its mount point
    options: str  # the options of its mount: controllers separated by commas, or `none,name=systemd`
    own: str  # path below the mount point

    @property
    def unified(self) -> bool:
        """Whether it is cgroup v2."""
        return not self.options

    def child(self, name: str) -> str:
        """The folder of a child of our own cgroup; on version 2, of the root."""
        own = "" if self.unified else self.own.strip("/")
        return "/".join(filter(None, (self.mount, own, name)))


def find(mountinfo: str, membership: str) -> tuple[Hierarchy, ...]:
    """The hierarchies that a node uses, from /proc/self/mountinfo and /proc/self/cgroup.

    A unified hierarchy beside those of version 1 has no controllers: it is left out.
    """
    own = {}
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        own[frozenset(controllers.split(","))] = path
    first, second = [], []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        root, mount = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2":
            second.append(Hierarchy(mount, "", _below(root, own.get(frozenset({""}), "/"))))
        elif kind == "cgroup":
            controllers, path = next(pair for pair in own.items() if pair[0] <= set(options.split(",")))
            named = ",".join(sorted(controllers))
            first.append(Hierarchy(mount, f"none,{named}" if "name=" in named else named, _below(root, path)))
    return tuple(first or second[:1])


def _below(root: str, path: str) -> str:
    """The path of a cgroup below the root that is mounted."""
    return path.removeprefix(root) if root != "/" else path


def of_this_process() -> tuple[Hierarchy, ...]:
    """The hierarchies that this machine has mounted."""
    return find(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())


def lacking(hierarchies: tuple[Hierarchy, ...]) -> list[str]:
    """The controllers that a node needs and cannot have here."""
    if hierarchies and hierarchies[0].unified:
        has = Path(hierarchies[0].mount, "cgroup.subtree_control").read_text().split()
    else:
        has = [word for hierarchy in hierarchies for word in hierarchy.options.split(",")]
    return [name for name in NEEDED if name not in has]


def create(hierarchies: tuple[Hierarchy, ...], name: str) -> Cgroups:
    """Make a cgroup called `name` in each hierarchy."""
    folders = tuple(hierarchy.child(name) for hierarchy in hierarchies)
    for hierarchy, folder in zip(hierarchies, folders, strict=True):
        os.mkdir(folder)
        if "cpuset" in hierarchy.options.split(","):
            for file in ("cpuset.cpus", "cpuset.mems"):  # empty in a new one: nothing may run there
                Path(folder, file).write_text(Path(folder).parent.joinpath(file).read_text())
            Path(folder, "cgroup.clone_children").write_text("1")
    if hierarchies[0].unified:
        os.mkdir(f"{folders[0]}/{LEAF}")
        return Cgroups(folders, (f"{folders[0]}/{LEAF}",))
    return Cgroups(folders, folders)


def remove(folders: tuple[str, ...], patience: float = 10) -> None:
    """Remove cgroups and all below them; their processes have ended, or are about to."""
    deadline = time.monotonic() + patience
    for folder in folders:
        while os.path.exists(folder):
            for below, _, _ in os.walk(folder, topdown=False):
                with contextlib.suppress(OSError):  # busy, or gone
                    os.rmdir(below)
            if os.path.exists(folder):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the cgroup {folder} still has processes: {_processes(folder)}")
                time.sleep(0.05)


def remove_old(hierarchies: tuple[Hierarchy, ...]) -> None:
    """Remove what launchers that were killed have left: the name of a node's cgroup contains its launcher's pid."""
    for hierarchy in hierarchies:
        for folder in Path(hierarchy.child("")).glob(f"{PREFIX}*"):
            launcher = folder.name.removeprefix(PREFIX).partition("-")[0]
            if not os.path.exists(f"/proc/{launcher}"):
                with contextlib.suppress(RuntimeError):  # it is not ours to end what still runs there
                    remove((str(folder),), patience=1)


def _processes(folder: str) -> list[str]:
    return [pid for below, _, _ in os.walk(folder) for pid in Path(below, "cgroup.procs").read_text().split()]
