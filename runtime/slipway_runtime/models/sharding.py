"""Which part of a decoder each of several ranks has: heads and inner features are divided, the vocabulary is not.

| matrices                 | cut by  | a rank has                                                 | then           |
|--------------------------|---------|------------------------------------------------------------|----------------|
| q, k, v, gate, up        | outputs | whole heads, query heads with theirs of keys and values    |                |
| o, down                  | inputs  | the columns for what it has computed: a summand of y       | summed up      |
| embedding, norms, lm_head| –       | all of it                                                  |                |

Experts are divided like gate, up and down: each rank has a part of the inner features of all of them.

So a layer sums twice (Shoeybi et al. 2019, Megatron-LM), and the KV cache of a rank holds its own heads.

A rank rounds what it has. A matrix that is cut by outputs has the codes and scales of the whole one, row for row. One
that is cut by inputs has a scale for its part of a row, and rows of x are rounded by parts, too: other codes than the
whole one's, from smaller ranges, so the error is no larger.
"""

from dataclasses import dataclass, replace

from slipway_runtime.layers.linear import Reduce
from slipway_runtime.models.config import ModelConfig, ModelRefusedError


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank has of whatever is divided."""

    rank: int = 0
    size: int = 1  # ranks, rank 0 included
    reduce: Reduce | None = None  # None: there is nobody else

    def of(self, count: int) -> slice:
        """Its part of `count` equal things in a row."""
        own = count // self.size
        return slice(self.rank * own, (self.rank + 1) * own)


WHOLE = Share()


def part_of(config: ModelConfig, size: int) -> ModelConfig:
    """The shape that each of `size` ranks computes; raises ModelRefusedError where it cannot be divided so."""
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
