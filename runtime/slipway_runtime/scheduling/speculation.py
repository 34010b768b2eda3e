"""Draft tokens: what a row would sample next, so that one step can confirm several tokens. Pure.

A draft token costs a position of the next step and is accepted or rejected; the output is the same either way. So this
decides how many draft tokens to make, within the token budget that a step has left:

- A row starts with `START` draft tokens. After a step that accepted all of them it may make twice as many, up to the
  limit; else one more than were accepted.
- When fewer than `MIN_ACCEPTED_SHARE` of the draft tokens of all rows are accepted, or none are made in many steps,
  drafting stops: `active` is False, and steps overlap again. After `REST_TOKENS` tokens it is tried again; each failure
  in a row doubles the rest, up to `LONGEST_REST_TOKENS`.
"""

from array import array
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from slipway_runtime.scheduling.block_pool import BlockPool
from slipway_runtime.scheduling.scheduler_output import SchedulerOutputBuilder
from slipway_runtime.scheduling.sequence import Sequence

START = 3
MIN_ACCEPTED_SHARE = 0.4  # share of accepted draft tokens
ENOUGH_DRAFT_TOKENS = 100  # before judging
ENOUGH_STEPS = 256  # of rows, before judging that there is too little to draft from
MIN_ACCEPTED_PER_ROW = 0.05  # accepted draft tokens a row and step
REST_TOKENS = 2_000
LONGEST_REST_TOKENS = 64_000


class Drafter(Protocol):
    """Makes draft tokens from the tokens of a sequence. A draft model would run in the worker, behind this protocol."""

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """At most so many tokens that may follow the sequence; empty: no draft."""


class PromptLookup:
    """Prompt lookup: drafts the tokens that followed an earlier occurrence of the last `longest` … `shortest` tokens.

    The longest match counts, at its most recent place. The search is bounded: the last `window` tokens, byte by byte in
    C. A repetition that reaches the end is continued: after "a b a b" come "a b a b".
    """

    def __init__(self, longest: int = 4, shortest: int = 2, window: int = 8192) -> None:
        assert 1 <= shortest <= longest
        self._lengths = range(longest, shortest - 1, -1)
        self._window = window

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Draft tokens for a sequence all of whose tokens are known."""
        tokens, history = sequence.token_ids, sequence.history
        known = len(history) // 4
        if known < len(tokens):
            history += array("I", tokens[known:]).tobytes()
        start = max(len(tokens) - self._window, 0) * 4
        for length in self._lengths:
            if length < len(tokens):
                at = _last_place(history, history[-4 * length :], start, len(history) - 4)
                if at is not None:
                    return _continue(tokens, at + length, most)
        return ()


def _last_place(history: bytearray, pattern: bytearray, start: int, end: int) -> int | None:
    """The last token of history[start:end] where the pattern begins; matches that begin inside a token are skipped."""
    while (at := history.rfind(pattern, start, end)) >= 0:
        if at % 4 == 0:
            return at // 4
        end = at + len(pattern) - 1
    return None


def _continue(tokens: SequenceOf[int], at: int, count: int) -> tuple[int, ...]:
    """`count` tokens from index `at` on; after the last token, from `at` again."""
    period = len(tokens) - at
    return tuple([tokens[at + offset % period] for offset in range(count)])


class Speculation:
    """Decides how many draft tokens to make, and counts those accepted."""

    def __init__(self, most: int, drafter: Drafter | None = None) -> None:
        assert most >= 1
        self.active = True
        self.drafts = 0
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.accepted_by_position = [0] * most
        self._most = most
        self._drafter = drafter or PromptLookup()
        self._recent_rows = 0
        self._recent_draft_tokens = 0
        self._recent_accepted = 0
        self._rest = REST_TOKENS
        self._rested = 0

    def add_drafts(self, budget: int, plan: SchedulerOutputBuilder, pool: BlockPool, reserve: int) -> None:
        """Add draft tokens to decode rows of the plan, within the budget and with blocks beyond the reserve only."""
        for index, row in enumerate(plan.rows):
            sequence = row.sequence
            if row.num_new > 1 or not row.samples or sequence.num_pending > 1:
                continue
            spare = max(pool.available - reserve, 0)
            room = (len(sequence.blocks) + spare) * pool.block_size - sequence.num_planned
            drafts = self.draft(sequence, min(budget, room, sequence.max_tokens - sequence.num_tokens - 1))
            if drafts:
                missing = pool.blocks_for(sequence.num_planned + len(drafts)) - len(sequence.blocks)
                if missing > 0:
                    plan.append_blocks(sequence, pool.allocate(missing))
                plan.add_drafts(index, drafts)
                budget -= len(drafts)

    def draft(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Draft tokens for a row, at most as many as the step has room for."""
        wanted = min(sequence.draft_length or min(START, self._most), most)
        return self._drafter.propose(sequence, wanted) if wanted > 0 else ()

    def record_accepted(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Record how many draft tokens of a row were accepted."""
        self._recent_rows += 1
        if drafted == 0:
            return
        sequence.draft_length = min(self._most, 2 * drafted if accepted == drafted else accepted + 1)
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        for position in range(accepted):
            self.accepted_by_position[position] += 1
        self._recent_draft_tokens += drafted
        self._recent_accepted += accepted

    def update_activity(self, tokens: int) -> None:
        """Decide, after a step that generated so many tokens, whether drafting goes on, stops or starts again."""
        if not self.active:
            self._rested += tokens
            if self._rested >= self._rest:
                self._rest = min(2 * self._rest, LONGEST_REST_TOKENS)
                self.active = True
                self._start_over()
            return
        acceptance_is_low = (
            self._recent_draft_tokens >= ENOUGH_DRAFT_TOKENS
            and self._recent_accepted < MIN_ACCEPTED_SHARE * self._recent_draft_tokens
        )
        idle = self._recent_rows >= ENOUGH_STEPS and self._recent_accepted < MIN_ACCEPTED_PER_ROW * self._recent_rows
        if acceptance_is_low or idle:
            self.active = False
            self._start_over()
        elif self._recent_rows >= 2 * ENOUGH_STEPS:  # drafting pays: halve the counts, and reset the rest
            self._recent_rows //= 2
            self._recent_draft_tokens //= 2
            self._recent_accepted //= 2
            self._rest = REST_TOKENS

    def _start_over(self) -> None:
        self._rested = self._recent_rows = self._recent_draft_tokens = self._recent_accepted = 0
