"""Division of a step's prefill budget between long and short prompts, so that short ones do not wait for long ones.

A prompt is long while it has more tokens left to compute than half of `max_num_batched_tokens`; cached tokens do not
count. The long prompt that started first has a reserve: half of what the decodes of a step leave. The rest is for
prompts that are short, by rank, and for waiting ones; what they leave goes to the long ones too, so a step is full
whenever there is work. A waiting prompt whose priority class, aging included, is below that of the long prompt gets
only what that one leaves.

Bounds, in steps, where each step has `R` tokens for prompts (so long as no sequence is preempted or paused). `R` is 2
or more with a second prompt beside a long one, because the budget of a step has a token for each row:

- The long prompt that started first computes its `N` tokens in at most N / (R // 2) steps: twice the steps it takes
  alone, however many short prompts come. The next one has the reserve then, so each long prompt is computed.
- A short prompt does not wait for the rest of a long one. While its class is served, it waits for the short prompts
  before it, at R / 2 tokens a step; and for each long prompt before it twice: for one step in which that one is
  admitted, and for its last tokens, when it is short too.

Sarathi-Serve (Agrawal et al., 2024) bounds what prompts cost decodes by the budget; this bounds what they cost each
other. vLLM has limits for it (`long_prefill_token_threshold`, `max_long_partial_prefills`), which leave tokens of a
step unused unless they are tuned.
"""

from collections.abc import Iterable
from typing import NamedTuple

from slipway_runtime.scheduling.sequence import Sequence


class PrefillShare(NamedTuple):
    """The running sequences with a prompt to compute, and the tokens that are reserved for the first long one."""

    short: list[Sequence]  # by rank
    long: list[Sequence]  # by rank
    first: Sequence | None  # the long one that started first
    reserved: int


def divide_prefill(running: Iterable[Sequence], budget: int, max_num_batched_tokens: int) -> PrefillShare:
    """Divide the budget that the decodes of a step leave. `running`: by rank."""
    short: list[Sequence] = []
    long: list[Sequence] = []
    for sequence in running:
        ahead = sequence.num_ahead
        if ahead > 1:
            (long if 2 * ahead > max_num_batched_tokens else short).append(sequence)
    if not long:
        return PrefillShare(short, long, None, 0)
    # Not the first by rank: a stream of long prompts of higher priority would stop one that holds its blocks already.
    return PrefillShare(short, long, min(long, key=_start), budget // 2)


def _start(sequence: Sequence) -> tuple[float, int]:
    assert sequence.scheduled_at is not None, "it runs"
    return sequence.scheduled_at, sequence.serial
