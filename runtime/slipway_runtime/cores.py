"""The number of compute threads: limited by the container's CPU quota and by the physical cores."""

import os
from pathlib import Path

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_CPUINFO = Path("/proc/cpuinfo")
SPARE_FROM = 4  # threads; from this number on, one is left to HTTP and scheduling


def compute_threads(cpu_max: Path = _CPU_MAX, cpuinfo: Path = _CPUINFO, allowed: frozenset[int] | None = None) -> int:
    """The cgroup's CPU quota, rounded down, or the number of physical cores if that is smaller; at least 1.

    More threads wait for each other at every barrier, for a tick of the kernel's scheduler each time. `allowed`: the
    processors that this process may run on; None: ask the kernel.
    """
    processors = os.sched_getaffinity(0) if allowed is None else allowed
    threads = _physical_cores(cpuinfo.read_text() if cpuinfo.exists() else "", frozenset(processors))
    if cpu_max.exists():
        quota, period = cpu_max.read_text().split()
        if quota != "max":
            threads = min(threads, int(quota) // int(period))
    return max(1, threads - 1 if threads >= SPARE_FROM else threads)


def _physical_cores(cpuinfo: str, processors: frozenset[int]) -> int:
    """Physical cores of these processors: two hyperthreads share a core. Without core numbers each processor is one."""
    cores = set()
    for block in cpuinfo.split("\n\n"):
        fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in block.splitlines())}
        if "processor" in fields and int(fields["processor"]) in processors:
            cores.add((fields.get("physical id", "0"), fields.get("core id", fields["processor"])))
    return len(cores) or len(processors)
