"""What keeping something in memory is worth: chance of reuse x milliseconds saved / bytes. Pure arithmetic.

Adapters and prefixes compete for the same bytes, so they are measured with one unit. Worked numbers, with the default
costs, nobody waiting, and blocks of 16 tokens and 64 KiB: a prefix block used again a moment ago is worth
1.0 x 16 ms / 64 KiB = 0.25 ms per KiB; after a half-life of silence 0.125; just computed for the first time 0.125. An
adapter of 4 MiB that saves 60 ms of loading, and is as popular, is worth 0.015 ms per KiB: it goes first, and what was
computed with it goes along.

A millisecond of prefill delays everybody behind it as well, one of loading only who waits for the adapter: steps go on
beside it. With three waiting on average, prefill counts 1 + 3 = 4 times.
"""

from dataclasses import dataclass

ONCE = 0.5  # a use, until a second one shows that the prefix comes again


@dataclass(frozen=True)
class Costs:
    """What it costs to bring something back, as measured at start or guessed."""

    prefill_ms_per_token: float = 1.0
    load_ms: float = 20.0  # of any adapter: opening, checking
    load_ms_per_mib: float = 10.0
    half_life_seconds: float = 60.0  # after so long without a use, the next one is half as likely


def decay(seconds: float, half_life_seconds: float) -> float:
    """How much of a popularity is left after so long."""
    return float(0.5 ** (max(seconds, 0.0) / half_life_seconds))


def worth_of_block(popularity: float, waiting: float, *, block_size: int, block_bytes: int, costs: Costs) -> float:
    """Milliseconds per byte of a cached prefix block with so many uses, while so many requests wait."""
    return popularity * _prefill_ms(waiting, block_size, costs) / block_bytes


def worth_of_adapter(
    popularity: float,
    num_bytes: int,
    waiting: float = 0.0,
    *,
    prefix_blocks: int = 0,
    prefix_popularity: float = 0.0,
    block_size: int,
    block_bytes: int,
    costs: Costs,
) -> float:
    """Milliseconds per byte of an adapter and of the prefixes that cannot be used without it.

    `popularity` counts its uses, each fading with the half-life: in proportion to how soon it is needed again.
    `prefix_popularity`: the same of all of those blocks together.
    """
    load = popularity * (costs.load_ms + costs.load_ms_per_mib * num_bytes / 2**20)
    prefill = prefix_popularity * _prefill_ms(waiting, block_size, costs)
    return (load + prefill) / max(num_bytes + prefix_blocks * block_bytes, 1)


def _prefill_ms(waiting: float, block_size: int, costs: Costs) -> float:
    return block_size * costs.prefill_ms_per_token * (1.0 + waiting)
