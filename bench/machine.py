"""Describes the machine of a run and its load, because figures of two machines cannot be compared."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """The class of machine and its load at one moment."""

    processor: str
    cores: int
    memory_gib: float
    load_1m: float

    def __str__(self) -> str:
        return (
            f"{self.processor}, {self.cores} cores, {self.memory_gib:.0f} GiB, "
            f"Python {platform.python_version()}; load average before: {self.load_1m:.2f}"
        )


def this_machine() -> Machine:
    """This machine, with its present load."""
    return Machine(
        processor=_field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=int((_field("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) / 2**20,
        load_1m=os.getloadavg()[0],
    )


def _field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
