"""Checks that a process which has given its model back holds no more memory than at its first start.

The first engine process of a container that has no model yet measures the memory in use: of the GPUs, by any process,
and of itself. The figures are stored in a file of the pod. After DELETE /model a new engine process measures again. If
more is in use, something of the old model is left, and no service may be given the rest.
"""

import json
import os
from pathlib import Path
from typing import Final, NamedTuple

import structlog

log = structlog.get_logger()

STORED: Final = "boot-memory.json"  # in the run directory, which lives as long as the pod
TOLERANCE_BYTES: Final = 256 << 20  # contexts of the driver, and pages that an allocator keeps
TOLERANCE_SHARE: Final = 0.05


class BootMemory(NamedTuple):
    """Memory in use when an engine process has started, and has no model yet."""

    device_bytes: int  # of all visible GPUs; 0: there are none
    host_bytes: int  # resident, of the engine process


def encode(memory: BootMemory) -> bytes:
    """The figures as JSON."""
    return json.dumps(memory._asdict()).encode()


def decode(raw: bytes) -> BootMemory | None:
    """The figures that `encode` wrote; None where it did not."""
    try:
        found = json.loads(raw)
        return BootMemory(int(found["device_bytes"]), int(found["host_bytes"]))
    except (ValueError, KeyError, TypeError):
        return None


def find_excess(first: BootMemory, now: BootMemory) -> str:
    """What is in use beyond the first start, as a sentence; empty: nothing that matters.

    40.0 GiB of a GPU now, 0.5 GiB at first: an allocation of the old model was not freed.
    """
    for what, was, used in (
        ("GPU", first.device_bytes, now.device_bytes),
        ("host", first.host_bytes, now.host_bytes),
    ):
        if used > was * (1 + TOLERANCE_SHARE) + TOLERANCE_BYTES:
            return f"{used / 2**30:.1f} GiB of {what} memory are in use, {was / 2**30:.1f} GiB at the first start"
    return ""


def compare_with_first_start(run_directory: Path, now: BootMemory) -> str:
    """`find_excess` over the stored figures; without any, stores these.

    Where they cannot be stored, as on a laptop without a run directory, nothing is compared.
    """
    path = run_directory / STORED
    try:
        first = decode(path.read_bytes())
    except OSError:
        first = None
    if first is not None:
        return find_excess(first, now)
    beside = path.with_suffix(".new")
    try:
        beside.write_bytes(encode(now))
        os.replace(beside, path)
    except OSError as error:
        log.info("the memory of the first start is not stored", path=str(path), error=error.strerror)
    return ""
