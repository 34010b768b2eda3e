"""Which drafted tokens are kept: those that the row samples itself.

A sample is a function of the logits, the seed and the position. A row with K drafts samples K + 1 times, each time with
the key of that position, as if all drafts before it were right. As long as a sample equals the draft it is the token
that would have come without drafts, and the next sample was made after the right tokens. The first that differs is
right too, and ends the row's step. So the output with drafts is the output without, token for token, sampled or
greedy; the distribution is the same because the tokens are.
"""

from collections.abc import Sequence
from itertools import islice

from slipway_runtime.messages import SchedulerOutput, TokenLogprobs


def kept_tokens(plan: SchedulerOutput, sampled: list[int]) -> tuple[tuple[int, ...], ...]:
    """For each row of the plan the tokens it goes on with. sampled: all samples of the plan, in order."""
    following = iter(sampled)
    if not plan.drafts:
        return tuple([(next(following),) if samples else () for samples in plan.samples])
    return tuple(
        [
            _kept(drafts, list(islice(following, 1 + len(drafts)))) if samples else ()
            for samples, drafts in zip(plan.samples, plan.drafts, strict=True)
        ]
    )


def kept_logprobs(
    plan: SchedulerOutput, logprobs: Sequence[TokenLogprobs | None], token_ids: tuple[tuple[int, ...], ...]
) -> tuple[tuple[TokenLogprobs, ...], ...]:
    """Of all samples, in order, those of the tokens that were kept; empty when no row asked (there are none)."""
    if not logprobs:
        return ()
    result: list[tuple[TokenLogprobs, ...]] = []
    first = 0
    for index, kept in enumerate(token_ids):
        result.append(tuple([one for one in logprobs[first : first + len(kept)] if one is not None]))
        if plan.samples[index]:
            first += 1 + (len(plan.drafts[index]) if plan.drafts else 0)
    return tuple(result)


def _kept(drafts: tuple[int, ...], sampled: list[int]) -> tuple[int, ...]:
    right = 0
    while right < len(drafts) and sampled[right] == drafts[right]:
        right += 1
    return tuple(sampled[: right + 1])
