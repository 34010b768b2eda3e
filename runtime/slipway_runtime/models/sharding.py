"""Tensor-parallel sharding of a decoder: heads and inner features are split over the ranks, the vocabulary is not.

| matrices                 | cut by  | a rank has                                                 | then           |
|--------------------------|---------|------------------------------------------------------------|----------------|
| q, k, v, gate, up        | outputs | whole heads: query heads with their key-value heads        |                |
| o, down                  | inputs  | the columns of its own features: a summand of y            | all-reduce     |
| embedding, norms, lm_head| –       | all of it                                                  |                |

Experts are divided like gate, up and down: each rank has a part of the inner features of all of them.

So a layer has two all-reduces (Shoeybi et al. 2019, Megatron-LM), and the KV cache of a rank holds the rank's heads.

A rank quantizes its own part. A matrix cut by outputs has the codes and scales of the whole matrix, row for row. A
matrix cut by inputs has a scale for its part of a row, and rows of x are quantized by parts, too: the codes differ from
those of the whole matrix, but come from smaller ranges, so the error is no larger.
"""

from dataclasses import dataclass, replace

from slipway_runtime.layers.linear import Reduce
from slipway_runtime.models.config import ModelConfig, ModelRefusedError


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's share of everything that is split over the ranks."""

    rank: int = 0
    size: int = 1  # ranks, rank 0 included
    reduce: Reduce | None = None  # all-reduce over the ranks; None: a single rank

    def of(self, count: int) -> slice:
        """This rank's slice of `count` heads, features or rows."""
        own = count // self.size
        return slice(self.rank * own, (self.rank + 1) * own)


WHOLE = Share()


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
