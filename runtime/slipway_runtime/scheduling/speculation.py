"""Draft tokens: what a row would sample next, so that one step can confirm several tokens. Pure.

A draft token costs a position of the next step and is accepted or rejected; the output is the same either way. So this
decides how many draft tokens to make, within the token budget that a step has left, and which source makes them:

- Prompt lookup comes first. A row starts with `START` draft tokens. After a step that accepted all of them it may make
  twice as many, up to the limit; else one more than were accepted.
- A draft model (draft_model.py) makes those of rows in which prompt lookup finds nothing; draft_pace.py decides how
  many.
- Each source stops when too few of its draft tokens are accepted, and is tried again later (draft_activity.py). When
  all of them have stopped, `active` is False, and steps overlap again.
"""

from array import array
from collections.abc import Sequence as SequenceOf
from typing import Final, Protocol

from slipway_runtime.messages import DraftModelStats
from slipway_runtime.scheduling.block_pool import BlockPool
from slipway_runtime.scheduling.draft_activity import DraftActivity
from slipway_runtime.scheduling.draft_model import DraftModel
from slipway_runtime.scheduling.draft_pace import draft_length, pace_after_tokens, pace_after_verification
from slipway_runtime.scheduling.scheduler_output import SchedulerOutputBuilder
from slipway_runtime.scheduling.sequence import Sequence

START = 3
SHORTEST_BEFORE_A_MODEL: Final = 3  # a match of two tokens is often chance, and a draft model knows better


class Drafter(Protocol):
    """Makes draft tokens from the tokens of a sequence."""

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

    def __init__(self, most: int, drafter: Drafter | None = None, model: DraftModel | None = None) -> None:
        """model: drafts for rows in which the drafter finds nothing; None: they get no draft tokens."""
        assert most >= 1
        self.drafts = 0
        self.accepted_by_position = [0] * most
        self.lookup = DraftActivity()
        self.of_model = DraftActivity()
        self.model = model
        self._most = most
        self._drafter = drafter or PromptLookup(shortest=2 if model is None else SHORTEST_BEFORE_A_MODEL)

    @property
    def active(self) -> bool:
        """Whether any source drafts now; if not, steps overlap."""
        return self.lookup.active or (self.model is not None and self.of_model.active)

    @property
    def draft_tokens(self) -> int:
        """The draft tokens of all sources."""
        return self.lookup.draft_tokens + self.of_model.draft_tokens

    @property
    def accepted_tokens(self) -> int:
        """The accepted draft tokens of all sources."""
        return self.lookup.accepted_tokens + self.of_model.accepted_tokens

    def add_drafts(self, budget: int, plan: SchedulerOutputBuilder, pool: BlockPool, reserve: int) -> None:
        """Add draft tokens to decode rows of the plan, within the budget and with blocks beyond the reserve only."""
        without: list[tuple[int, Sequence]] = []
        for index, row in enumerate(plan.rows):
            sequence = row.sequence
            if row.num_new > 1 or not row.samples or sequence.num_pending > 1:
                continue
            drafts = self.draft(sequence, min(budget, _room(sequence, pool, max(pool.available - reserve, 0))))
            if drafts:
                budget -= _add(plan, index, drafts, pool)
                sequence.drafted_by_model = False
            else:
                without.append((index, sequence))
        if self.model is not None and self.of_model.active and without:
            self._add_drafts_of_model(self.model, without, budget, plan, pool, reserve)

    def _add_drafts_of_model(
        self,
        model: DraftModel,
        rows: list[tuple[int, Sequence]],
        budget: int,
        plan: SchedulerOutputBuilder,
        pool: BlockPool,
        reserve: int,
    ) -> None:
        """Add draft tokens of the model to rows that have none. It drafts for all of them in the same passes."""
        model.pool.now = pool.now
        spare = max(pool.available - reserve, 0)
        lengths: list[tuple[Sequence, int]] = []
        for _, sequence in rows:
            length = min(draft_length(sequence.pace, self._most), budget, _room(sequence, pool, spare))
            length = max(length, 0)
            spare -= _missing(sequence, length, pool)
            budget -= length
            lengths.append((sequence, length))
        proposed = model.propose(lengths)
        if proposed is None:
            self.of_model.stop()
            return
        for (index, sequence), drafts in zip(rows, proposed, strict=True):
            if drafts:
                _add(plan, index, drafts, pool)
                sequence.drafted_by_model = True

    def draft(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Draft tokens of prompt lookup for a row, at most as many as the step has room for."""
        wanted = min(sequence.draft_length or min(START, self._most), most)
        return self._drafter.propose(sequence, wanted) if wanted > 0 and self.lookup.active else ()

    def record_accepted(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Record how many draft tokens of a row were accepted."""
        by_model = drafted > 0 and sequence.drafted_by_model
        if self.model is not None:
            sequence.pace = pace_after_tokens(sequence.pace, accepted + 1)
        if by_model:
            self.of_model.record(drafted, accepted)
            sequence.pace = pace_after_verification(sequence.pace, drafted, accepted)
        else:
            self.lookup.record(drafted, accepted)
            if not drafted:
                self.of_model.record(0, 0)
        if drafted == 0:
            return
        if not by_model:
            sequence.draft_length = min(self._most, 2 * drafted if accepted == drafted else accepted + 1)
        self.drafts += 1
        for position in range(accepted):
            self.accepted_by_position[position] += 1

    def update_activity(self, tokens: int) -> None:
        """Decide, after a step that generated so many tokens, which sources go on, stop or start again."""
        self.lookup.update(tokens)
        if self.model is not None:
            self.of_model.update(tokens)

    def release(self, sequence: Sequence) -> None:
        """Release what the draft model holds for a sequence, which has lost its row."""
        if self.model is not None:
            self.model.release(sequence)

    def forget_prefixes(self) -> None:
        """Clear the prefix cache of the draft model."""
        if self.model is not None:
            self.model.pool.forget_all()

    def stats_of_model(self) -> DraftModelStats | None:
        """The current statistics of the draft model; None: there is none."""
        if self.model is None:
            return None
        return DraftModelStats(
            draft_tokens=self.of_model.draft_tokens,
            accepted_tokens=self.of_model.accepted_tokens,
            passes=self.model.passes,
            computed_tokens=self.model.computed_tokens,
            blocks_total=self.model.pool.total,
            blocks_live=self.model.pool.live,
        )

    def check(self) -> None:
        """Raise AssertionError when blocks of the draft model are unaccounted for."""
        if self.model is not None:
            self.model.check()


def _room(sequence: Sequence, pool: BlockPool, spare: int) -> int:
    """Draft tokens that a row can take: with so many further blocks, and before its last possible token."""
    room = (len(sequence.blocks) + spare) * pool.block_size - sequence.num_planned
    return min(room, sequence.max_tokens - sequence.num_tokens - 1)


def _missing(sequence: Sequence, count: int, pool: BlockPool) -> int:
    return max(pool.blocks_for(sequence.num_planned + count) - len(sequence.blocks), 0)


def _add(plan: SchedulerOutputBuilder, index: int, drafts: tuple[int, ...], pool: BlockPool) -> int:
    """Add draft tokens to a row, with the blocks that it lacks for them; their number."""
    sequence = plan.rows[index].sequence
    missing = _missing(sequence, len(drafts), pool)
    if missing > 0:
        plan.append_blocks(sequence, pool.allocate(missing))
    plan.add_drafts(index, drafts)
    return len(drafts)
