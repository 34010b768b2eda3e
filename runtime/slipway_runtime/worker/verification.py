"""Verification of draft tokens (speculative decoding): a draft token is accepted if the row samples the same token.

A sample is a function of the logits, the seed and the position. A row with K draft tokens samples K + 1 times, each
with the key of its position, as if all drafts before it were accepted. As long as a sample equals the draft, it is the
token of decode without drafts, and the next sample follows the right tokens. The first sample that differs is kept too,
and ends the row's step. So the output is the same with and without drafts, token for token, sampled or greedy; the
distribution is the same because the tokens are.
"""

from collections.abc import Sequence
from itertools import islice

from slipway_runtime.messages import SchedulerOutput, TokenLogprobs


def kept_tokens(plan: SchedulerOutput, sampled: list[int]) -> tuple[tuple[int, ...], ...]:
    """Sampled tokens that each row of the plan keeps. sampled: all samples of the plan, in order."""
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
    """Logprobs of each row's kept tokens. logprobs: of all samples, in order; empty, as the result: none requested."""
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
