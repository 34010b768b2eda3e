"""Tensor-parallel sharding of a decoder: heads, inner features and the vocabulary are split over the ranks.

| matrices                 | cut by  | a rank has                                                 | then           |
|--------------------------|---------|------------------------------------------------------------|----------------|
| q, k, v, gate, up        | outputs | whole heads: query heads with their key-value heads        |                |
| o, down                  | inputs  | the columns of its own features: a summand of y            | all-reduce     |
| embedding                | tokens  | the vectors of its own tokens; those of others are zeros   | all-reduce     |
| lm_head                  | outputs | the logits of its own tokens                               | all-gather     |
| norms                    | –       | all of them                                                |                |
| norms over all heads     | heads   | the weights of its own heads; it sums squares              | all-reduce     |

With more ranks than key-value heads (8 ranks, 4 heads), `ranks / heads` neighbouring ranks have a copy of one k and v
head, in their weights, adapters and KV cache, each for its own query heads. Inner features need not be divisible by the
ranks: `features_of_rank` cuts them between groups of quantized columns, and rank 0 has the most.

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

from slipway_api.memory import features_of_rank
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

    def of_features(self, count: int) -> slice:
        """This rank's slice of `count` inner features of an MLP, which need not be divisible."""
        return features_of_rank(count, self.rank, self.size)

    def of_heads(self, heads: int, width: int = 1) -> slice:
        """This rank's slice of the rows of `heads` heads, `width` rows each; fewer heads than ranks: a shared head."""
        own = max(1, heads // self.size)
        first = self.rank * heads // self.size
        return slice(first * width, (first + own) * width)

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

    def __call__(self, weight: Weight, own: slice) -> Weight:
        """The rank's columns `own` of a matrix (out, in)."""
        if self._share.size == 1:
            return weight
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


def part_of(config: ModelConfig, size: int, rank: int = 0) -> ModelConfig:
    """The config of the part that a rank of `size` computes; that of rank 0 is the largest.

    Raises ModelRefusedError if the model cannot be split so.
    """
    if why_not := _refusal(config, size):
        raise ModelRefusedError(f"tensor_parallel_size is {size}: {why_not}")
    share, experts = Shard(rank, size), config.experts

    def inner(count: int) -> int:
        own = share.of_features(count)
        return int(own.stop - own.start)

    return replace(
        config,
        num_q_heads=config.num_q_heads // size,
        num_kv_heads=max(1, config.num_kv_heads // size),
        intermediate_size=inner(config.intermediate_size),
        experts=None
        if experts is None
        else replace(
            experts, intermediate_size=inner(experts.intermediate_size), shared_size=inner(experts.shared_size)
        ),
    )


def _refusal(config: ModelConfig, size: int) -> str:
    """Why the model cannot be split over `size` ranks, with the numbers that are possible; "": it can."""
    heads, kv_heads = config.num_q_heads, config.num_kv_heads
    if not _splits_heads(heads, kv_heads, size):
        possible = ", ".join(str(ranks) for ranks in range(2, 17) if _splits_heads(heads, kv_heads, ranks))
        return (
            f"a rank needs the same number of the {heads} query heads, and whole heads or a copy of one of the "
            f"{kv_heads} key-value heads; " + (f"use {possible} or 1" if possible else "use 1")
        )
    features = [config.intermediate_size, *([] if config.experts is None else [config.experts.intermediate_size])]
    if config.experts is not None and config.experts.shared_size:
        features.append(config.experts.shared_size)
    if min(features) < size:
        return f"the model has {min(features)} inner features, fewer than ranks; use at most {min(features)}"
    return ""


def _splits_heads(heads: int, kv_heads: int, ranks: int) -> bool:
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)
