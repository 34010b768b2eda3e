"""How attention is cut into tiles on a kind of GPU: read once, never searched for while serving.

`tiles.json`: compute capability → kernel → shape → the launch's BLOCK_N, BLOCK_M, num_warps, num_stages. What it does
not name, a kernel decides by itself. The entries are chosen by what they compile to (docs/gpu-ledger.md), until
`bench.gpu` has timed them. A shape is what the model fixes, never the size of a batch: a token is computed the same
way in any. Heads are padded to a power of two, and the shape counts the padded size.
"""

import json
from functools import cache
from pathlib import Path

import torch

TABLE = Path(__file__).with_name("tiles.json")
KNOWN = frozenset({"BLOCK_M", "BLOCK_N", "num_warps", "num_stages"})

Table = dict[str, dict[str, dict[str, dict[str, int]]]]


def read_table(path: Path = TABLE) -> Table:
    """Raises ValueError where an entry holds what no kernel takes."""
    table: Table = json.loads(path.read_text())
    for capability, kernels in table.items():
        for kernel, shapes in kernels.items():
            for shape, launch in shapes.items():
                if unknown := launch.keys() - KNOWN:
                    raise ValueError(f"{path.name}: {capability} {kernel} {shape} has {', '.join(sorted(unknown))}")
    return table


_TABLE = read_table()


def tuned(kernel: str, *, head_dim: int, itemsize: int, device: torch.device) -> dict[str, int]:
    """The launch options for heads of this padded size and keys of so many bytes; empty: the kernel's own."""
    if device.type != "cuda":
        return {}
    return lookup(_capability(device), kernel, head_dim=head_dim, itemsize=itemsize)


def lookup(capability: str, kernel: str, *, head_dim: int, itemsize: int) -> dict[str, int]:
    """The table's entry for a compute capability, such as "sm90"; empty: it has none."""
    return dict(_TABLE.get(capability, {}).get(kernel, {}).get(shape_of(head_dim, itemsize), {}))


def shape_of(head_dim: int, itemsize: int) -> str:
    """The key of a shape."""
    return f"d{head_dim}-{8 * itemsize}bit"


@cache
def _capability(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"
