"""Which launches of the sample `make test` compiles: each kind on each target, and all kinds on sm_90.

The page docs/gpu-ledger.md has the whole sample, which `make kernels` compiles. A launch is left out here if another
one stands for it: the same kernel, dtypes, tile and warps for a matrix of other sizes; on targets other than sm_90, a
second type of quantized cache, and one of the two forms of `_extend` that read it.
"""

from collections.abc import Iterable
from typing import Protocol, TypeVar

# Constants that are sizes of a matrix: they change the number of steps of a loop, and addresses.
SIZES = frozenset({"IN", "OUT", "IN_SIZE", "OUT_SIZE", "PER_TOKEN"})
# The quantized cache that is compiled for a target, and whether `_extend` reads it for a split chunk or a whole prompt.
QUANTIZED = {80: ("*i8", False), 89: ("*fp8e4nv", True), 100: ("*fp8e4nv", False), 120: ("*i8", True)}
# The form of `_extend` that is compiled for a block size other than 16: of whole prompts for 8, of split chunks for 64.
PARTIAL_OF_BLOCKS = {8: False, 64: True}


class Kind(Protocol):
    """What a choice needs of `gpu_launches.Launch`."""

    kernel: str
    target: int
    signature: dict[str, str]
    constants: dict[str, object]
    options: dict[str, object]


L = TypeVar("L", bound=Kind)


def stand_ins(launches: Iterable[L]) -> list[L]:
    """The launches to compile, in their order."""
    chosen: dict[tuple[object, ...], L] = {}
    for launch in launches:
        if _is_stood_for(launch):
            continue
        constants = {name: value for name, value in launch.constants.items() if name not in SIZES}
        dtypes = [dtype for dtype in launch.signature.values() if dtype.startswith("*")]
        kind = launch.kernel, launch.target, str(dtypes), str(constants), launch.options["num_warps"]
        chosen.setdefault(kind, launch)
    return list(chosen.values())


def _is_stood_for(launch: Kind) -> bool:
    """Whether attention of another cache, form or block size stands for this one."""
    partial, block_size = launch.constants.get("PARTIAL"), launch.constants.get("BLOCK_SIZE")
    is_extend = launch.kernel == "_extend"
    if is_extend and block_size in PARTIAL_OF_BLOCKS:
        return partial != PARTIAL_OF_BLOCKS[block_size]
    if launch.target not in QUANTIZED or not launch.constants.get("QUANTIZED"):
        return False
    dtype, is_partial = QUANTIZED[launch.target]
    return dtype != launch.signature["cache"] or (is_extend and partial != is_partial)
