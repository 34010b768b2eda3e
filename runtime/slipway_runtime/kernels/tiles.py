"""Tile sizes (launch options) of the attention kernels by GPU type, read once from `tiles.json`; no autotuning.

`tiles.json`: compute capability → kernel → shape → BLOCK_N, BLOCK_M, num_warps, num_stages of the launch. The kernel
chooses options that are missing. The entries of sm90 were the fastest on an H100, but for `ordered`; the others are
chosen by the compiled code (docs/gpu-ledger.md). A shape depends on the model only, never on the batch size, so a token
is computed the same way in any batch. Heads are padded to a power of two, and the shape has the padded size.

A GPU without an entry of its own has that of the nearest older one with no more shared memory a block: a B300 (10.3)
the B200's (10.0), an L4 (8.9) the A10's (8.6), but an RTX 6000 (12.0) not that of the B200, which would not fit.
"""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch

TABLE = Path(__file__).with_name("tiles.json")
KNOWN = frozenset({"BLOCK_M", "BLOCK_N", "num_warps", "num_stages"})
# Bytes of shared memory that a block may have, by compute capability (the CUDA guide's tables); all others have the
# least that any GPU since 8.0 has.
SHARED_BYTES = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10, 110: 227 << 10}
LEAST_SHARED_BYTES = 99 << 10

Table = dict[str, dict[str, dict[str, dict[str, int]]]]


def read_table(path: Path = TABLE) -> Table:
    """Read `tiles.json`. Raises ValueError for an entry that no kernel accepts."""
    table: Table = json.loads(path.read_text())
    for capability, kernels in table.items():
        for kernel, shapes in kernels.items():
            for shape, launch in shapes.items():
                if unknown := launch.keys() - KNOWN:
                    raise ValueError(f"{path.name}: {capability} {kernel} {shape} has {', '.join(sorted(unknown))}")
    return table


_TABLE = read_table()


def tuned(kernel: str, *, head_dim: int, itemsize: int, device: torch.device) -> dict[str, int]:
    """Launch options for heads of this padded size and keys of `itemsize` bytes; empty: the kernel's defaults."""
    if device.type != "cuda":
        return {}
    return lookup(_capability(device), kernel, head_dim=head_dim, itemsize=itemsize)


def lookup(capability: str, kernel: str, *, head_dim: int, itemsize: int) -> dict[str, int]:
    """The entry of `tiles.json` for a compute capability, such as "sm90"; empty: no entry is for it."""
    return dict(_TABLE.get(nearest(capability, _TABLE), {}).get(kernel, {}).get(shape_of(head_dim, itemsize), {}))


def nearest(capability: str, known: Iterable[str]) -> str:
    """The newest of the known compute capabilities that is no newer and has no more shared memory; "": none is."""
    number = _number(capability)
    fitting = [one for one in known if _number(one) <= number and shared_bytes(_number(one)) <= shared_bytes(number)]
    return max(fitting, key=_number, default="")


def shared_bytes(number: int) -> int:
    """Shared memory that a block may have on GPUs of a compute capability, times ten."""
    return SHARED_BYTES.get(number, LEAST_SHARED_BYTES)


def _number(capability: str) -> int:
    return int(capability.removeprefix("sm"))


def shape_of(head_dim: int, itemsize: int) -> str:
    """The key of a shape."""
    return f"d{head_dim}-{8 * itemsize}bit"


@cache
def _capability(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"
