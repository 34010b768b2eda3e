"""Reads the limits of this process's container from its control groups, version 1 and version 2.

A limit of any group above the process binds it too, so the smallest of all levels counts:

    version 2   /sys/fs/cgroup/[a/b/]          memory.max, memory.current                            cpu.max
    version 1   /sys/fs/cgroup/memory/[a/b/]   memory.limit_in_bytes, memory.usage_in_bytes
                /sys/fs/cgroup/cpu/[a/b/]      cpu.cfs_quota_us, cpu.cfs_period_us

`a/b` is the group that /proc/self/cgroup names. In most containers it is not below the mounted folder, which is then
the container's own group.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_MOUNT: Final = Path("/sys/fs/cgroup")
_MEMBERSHIP: Final = Path("/proc/self/cgroup")
_UNLIMITED: Final = 1 << 60  # bytes; version 1 writes "no limit" as the largest multiple of a page below 2^63
_CPU_FOLDERS: Final = ("cpu", "cpu,cpuacct")


@dataclass(frozen=True, slots=True)
class ContainerLimits:
    """Bytes that may still be allocated, and processors that may be used; None without a limit."""

    memory_left: int | None = None
    processors: float | None = None


def read_limits(mount: Path = _MOUNT, membership: Path = _MEMBERSHIP) -> ContainerLimits:
    """The smallest limits of all groups that this process is in. A file that cannot be read limits nothing."""
    groups = _groups(membership)
    memory = [
        _memory_left(folder / "memory.max", folder / "memory.current") for folder in _levels(mount, groups.get("", ""))
    ]
    memory += [
        _memory_left(folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes")
        for folder in _levels(mount / "memory", groups.get("memory", ""))
    ]
    processors = [_quota(_words(folder / "cpu.max")) for folder in _levels(mount, groups.get("", ""))]
    processors += [
        _quota(_words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us"))
        for name in _CPU_FOLDERS
        for folder in _levels(mount / name, groups.get("cpu", ""))
    ]
    return ContainerLimits(
        memory_left=min((one for one in memory if one is not None), default=None),
        processors=min((one for one in processors if one is not None), default=None),
    )


def _groups(membership: Path) -> dict[str, str]:
    """The group of each controller of version 1, and that of version 2 under the empty name."""
    groups: dict[str, str] = {}
    for line in _text(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        groups |= dict.fromkeys(controllers.split(","), group.strip("/"))
    return groups


def _levels(mount: Path, group: str) -> Iterator[Path]:
    """The mounted folder, and each folder on the way to the group as far as they exist."""
    folder = mount
    yield folder
    for part in filter(None, group.split("/")):
        folder /= part
        if part == ".." or not folder.is_dir():
            return
        yield folder


def _memory_left(limit: Path, used: Path) -> int | None:
    try:
        most, now = int(_text(limit)), int(_text(used))
    except ValueError:  # `max`, or not there
        return None
    return max(0, most - now) if most < _UNLIMITED else None


def _quota(words: list[str]) -> float | None:
    """Processors, from the microseconds that may be used in a period and the period's own."""
    try:
        quota, period = (int(word) for word in words)
    except ValueError:  # `max`, or not there
        return None
    return quota / period if quota > 0 and period > 0 else None  # version 1 writes "no limit" as -1


def _words(file: Path) -> list[str]:
    return _text(file).split()


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
