"""Tensor-parallel sharding of a decoder: heads, inner features and the vocabulary are split over the ranks.

| matrices                 | cut by  | a rank has                                                 | then           |
|--------------------------|---------|------------------------------------------------------------|----------------|
| q, k, v, gate, up        | outputs | whole heads: query heads with their key-value heads        |                |
| o, down                  | inputs  | the columns of its own features: a summand of y            | all-reduce     |
| embedding                | tokens  | the vectors of its own tokens; those of others are zeros   | all-reduce     |
| lm_head                  | outputs | the logits of its own tokens                               | all-gather     |
| norms                    | –       | all of them                                                |                |

Experts are divided like gate, up and down: each rank has a part of the inner features of all of them. Of an adapter
(B A x, added to y) a rank has the rows of B or the columns of A that belong to its part of the matrix.

So a layer has two all-reduces (Shoeybi et al. 2019, Megatron-LM), and the KV cache of a rank holds the rank's heads.

A rank quantizes its own part. A matrix cut by outputs has the codes and scales of the whole matrix, row for row. A
matrix cut by inputs has a scale for its part of a row, and rows of x are quantized by parts, too: the codes differ from
those of the whole matrix, but come from smaller ranges, so the error is no larger.

A matrix that is quantized in the checkpoint keeps its codes and scales, cut by outputs or by inputs. Where a cut by
inputs would leave groups of too few columns, or the groups are in the order of activations, the rank has numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from slipway_runtime.layers.linear import Reduce
from slipway_runtime.layers.matmul_quantized import GpuInt4, GroupedFp8, Int4
from slipway_runtime.layers.quantized_weight import QuantizedWeight, Weight, dequantized
from slipway_runtime.models.config import ModelConfig, ModelRefusedError

Gather = Callable[[Tensor], Tensor]  # all-gather: (R, n) of each rank -> (R, size * n), in the order of ranks


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's share of everything that is split over the ranks."""

    rank: int = 0
    size: int = 1  # ranks, rank 0 included
    reduce: Reduce | None = None  # all-reduce over the ranks; None: a single rank
    gather: Gather | None = None  # all-gather over the ranks; None: a single rank

    def of(self, count: int) -> slice:
        """This rank's slice of `count` heads, features or rows."""
        own = count // self.size
        return slice(self.rank * own, (self.rank + 1) * own)

    def of_vocabulary(self, count: int) -> slice:
        """This rank's slice of `count` tokens, which need not be divisible: the last ranks may have fewer."""
        own = -(-count // self.size)
        return slice(min(self.rank * own, count), min((self.rank + 1) * own, count))

    def all_logits(self, own: Tensor, count: int) -> Tensor:
        """The logits of all `count` tokens, from each rank's own. (R, n) -> (R, count)."""
        if self.gather is None:
            return own
        missing = -(-count // self.size) - own.shape[1]  # all ranks send equally many
        return self.gather(F.pad(own, (0, missing)) if missing else own)[:, :count]


WHOLE = Shard()


class InputCut:
    """Cuts matrices by inputs for a rank, and counts those whose codes cannot be cut. Threads may share it."""

    def __init__(self, share: Shard) -> None:
        self._share = share
        self._numbers: list[int] = []  # bytes of each matrix that would be codes on a device that has all of it

    def __call__(self, weight: Weight) -> Weight:
        """The rank's columns of a matrix (out, in)."""
        if self._share.size == 1:
            return weight
        own = self._share.of(weight.shape[1])
        part = weight.columns(own) if isinstance(weight, QuantizedWeight) else None
        if part is not None:
            return part
        numbers = dequantized(weight)[:, own].contiguous()
        if isinstance(weight, QuantizedWeight) and any(kind.fits(weight) for kind in (Int4, GpuInt4, GroupedFp8)):
            self._numbers.append(numbers.nbytes)
        return numbers

    @property
    def lost_codes(self) -> str:
        """A sentence about the matrices that are numbers; "": there are none."""
        if not self._numbers:
            return ""
        return (
            f"tensor_parallel_size is {self._share.size}, which cuts {len(self._numbers)} matrices within their groups "
            f"of inputs: they are kept as numbers, {sum(self._numbers) / (1 << 20):.1f} MiB on each rank; use fewer "
            "ranks, or a checkpoint with smaller groups that are not in the order of activations"
        )


def part_of(config: ModelConfig, size: int) -> ModelConfig:
    """The config of the part that each of `size` ranks computes; raises ModelRefusedError if it cannot be split so."""
    experts = config.experts
    divided = [(config.num_kv_heads, "key-value heads"), (config.intermediate_size, "inner features")]
    if experts is not None:
        divided.append((experts.intermediate_size, "inner features of an expert"))
    for count, things in divided:
        if count % size:
            raise ModelRefusedError(f"tensor_parallel_size is {size}: the {count} {things} cannot be divided by it")
    return replace(
        config,
        num_q_heads=config.num_q_heads // size,
        num_kv_heads=config.num_kv_heads // size,
        intermediate_size=config.intermediate_size // size,
        experts=None if experts is None else replace(experts, intermediate_size=experts.intermediate_size // size),
    )
