"""The draft model's rows: which KV it has of each sequence, in blocks of its own, and the passes that draft. Pure.

    drafts = model.propose([(sequence, 4), …])     # each sequence knows all of its tokens; no plan is in flight
    model.release(sequence)                        # it has ended or was preempted

A row follows its sequence. The KV of draft tokens that were rejected is computed again, and so is what was lost; so
nothing that happens to a sequence can make its drafts stale. Drafts never change a text, only the number of steps.

One call makes as many passes as the longest draft has tokens. The first one computes what the sequences have gained
since the last call, at most `max_num_batched_tokens` tokens: a sequence that is further behind gets no draft tokens in
this step. A pass needs no token of the pass before it on the host: the device has it.

Draft tokens are sampled as the sequence samples, with its seed and the position: where both models agree about the
probabilities, they sample the same token.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from slipway_runtime.messages import NewSequence, SchedulerOutput, StepResult
from slipway_runtime.scheduling.block_pool import BlockPool
from slipway_runtime.scheduling.sequence import Sequence


class KnownTokens(NamedTuple):
    """Tokens of a row from a position on, which replace what was drafted there."""

    row: int
    position: int
    token_ids: tuple[int, ...]


class DraftExecutor(Protocol):
    """Executes the passes of a draft model."""

    def __call__(self, passes: SequenceOf[SchedulerOutput], known: SequenceOf[KnownTokens]) -> list[StepResult] | None:
        """Write the known tokens into their rows, then compute the passes. None: the device ran out of memory."""


@dataclass(slots=True)
class _Row:
    """What the draft model has of a sequence."""

    row: int
    blocks: list[int] = field(default_factory=list)
    num_known: int = 0  # its first tokens, known when they were computed
    drafted: tuple[int, ...] = ()  # draft tokens computed after them; right as far as the sequence has the same
    num_published: int = 0  # full blocks that others can find
    started: bool = False  # whether the executor has the row
    new_blocks: list[int] = field(default_factory=list)  # that the executor does not have yet


class _Draft(NamedTuple):
    """A row of the first pass."""

    row: _Row
    sequence: Sequence
    num_computed: int
    num_new: int
    length: int  # draft tokens to make; 0: it only catches up


class DraftModel:
    """Proposes draft tokens for sequences, with a KV cache in a pool of its own."""

    def __init__(
        self, execute: DraftExecutor, pool: BlockPool, *, max_num_batched_tokens: int, max_model_len: int
    ) -> None:
        """max_model_len: the draft model's own; a longer sequence gets no draft tokens."""
        self.pool = pool
        self.passes = 0
        self.computed_tokens = 0
        self._execute = execute
        self._budget = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._rows: dict[Sequence, _Row] = {}
        self._steps = 0

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[tuple[int, ...]] | None:
        """At most so many draft tokens for each sequence. None: out of memory; the KV of all sequences is lost."""
        drafts = self._first_pass(wanted)
        if not drafts:
            return [()] * len(wanted)
        known = [
            KnownTokens(draft.row.row, draft.num_computed, tuple(draft.sequence.token_ids[draft.num_computed :]))
            for draft in drafts
            if draft.row.started
        ]
        longest = max(draft.length for draft in drafts)
        passes = [self._plan_first(drafts)]
        passes += [self._plan_next([d for d in drafts if d.length > place], place) for place in range(1, longest)]
        results = self._execute(passes, known)
        self.passes += len(passes)
        self.computed_tokens += sum(sum(plan.num_new) for plan in passes)
        if results is None:
            for sequence in list(self._rows):
                self.release(sequence)
            self.pool.forget_all()
            return None
        return self._read(wanted, drafts, passes, results)

    def release(self, sequence: Sequence) -> None:
        """Release the row and the blocks of a sequence; one without a row is ignored."""
        row = self._rows.pop(sequence, None)
        if row is not None:
            self.pool.release(row.blocks)

    def check(self) -> None:
        """Raise AssertionError when blocks are unaccounted for."""
        self.pool.check()
        held = {block for row in self._rows.values() for block in row.blocks}
        assert len(held) == self.pool.live, "every live block of the draft model belongs to a row"
        for sequence, row in self._rows.items():
            assert row.row == sequence.row, "a row of the draft model belongs to a sequence with that row"

    # --- the first pass

    def _first_pass(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[_Draft]:
        """Choose the rows of the first pass, and get the blocks that all passes need."""
        budget = self._budget
        drafts = []
        for sequence, length in wanted:
            if length < 1 or budget < 1:
                continue
            if sequence.num_tokens + length > self._max_model_len:
                self.release(sequence)
                continue
            row = self._rows.get(sequence)
            if row is None:
                row = self._rows[sequence] = self._start(sequence)
            computed = _num_valid(row, sequence)
            behind = sequence.num_tokens - computed
            count = min(behind, budget)
            length = length if count == behind else 0
            if not self._allocate(row, computed + count + max(length - 1, 0), wanted):
                if not row.started:  # it holds a cached prefix that others could evict
                    self.release(sequence)
                continue
            budget -= count
            drafts.append(_Draft(row, sequence, computed, count, length))
        drafts.sort(key=lambda draft: draft.num_new != 1)  # rows of one token first
        return drafts

    def _start(self, sequence: Sequence) -> _Row:
        """A row over the longest cached prefix of the sequence; its last token is computed in any case."""
        row = _Row(sequence.row)
        size = self.pool.block_size
        row.blocks = self.pool.match(sequence.block_keys((sequence.num_tokens - 1) // size, size))
        self.pool.hold(row.blocks)
        self.pool.count_use(row.blocks)
        row.new_blocks = row.blocks.copy()
        row.num_published = len(row.blocks)
        row.num_known = row.num_published * size
        return row

    def _allocate(self, row: _Row, num_tokens: int, wanted: SequenceOf[tuple[Sequence, int]]) -> bool:
        """Allocate the blocks that a row lacks for so many tokens; without room, those of resting rows are released."""
        missing = self.pool.blocks_for(num_tokens) - len(row.blocks)
        if missing > self.pool.available:
            drafting = {sequence for sequence, length in wanted if length > 0}
            for sequence in [one for one in self._rows if one not in drafting]:
                self.release(sequence)
        if missing > self.pool.available:
            return False
        if missing > 0:
            blocks = self.pool.allocate(missing)
            row.blocks += blocks
            row.new_blocks += blocks
        return True

    # --- plans and results

    def _plan_first(self, drafts: list[_Draft]) -> SchedulerOutput:
        plan = self._plan(
            drafts,
            num_computed=tuple([draft.num_computed for draft in drafts]),
            num_new=tuple([draft.num_new for draft in drafts]),
            new_blocks=tuple([tuple(draft.row.new_blocks) for draft in drafts]),
            new_rows=tuple([_new_row(draft.sequence) for draft in drafts if not draft.row.started]),
        )
        for draft in drafts:
            draft.row.started = True
            draft.row.new_blocks.clear()
        return plan

    def _plan_next(self, drafts: list[_Draft], place: int) -> SchedulerOutput:
        """The pass that computes the draft token before `place` and samples the one there."""
        return self._plan(
            drafts,
            num_computed=tuple([draft.sequence.num_tokens + place - 1 for draft in drafts]),
            num_new=(1,) * len(drafts),
            new_blocks=((),) * len(drafts),
        )

    def _plan(
        self,
        drafts: list[_Draft],
        *,
        num_computed: tuple[int, ...],
        num_new: tuple[int, ...],
        new_blocks: tuple[tuple[int, ...], ...],
        new_rows: tuple[NewSequence, ...] = (),
    ) -> SchedulerOutput:
        self._steps += 1
        return SchedulerOutput(
            step=self._steps,
            new_rows=new_rows,
            rows=tuple([draft.row.row for draft in drafts]),
            num_computed=num_computed,
            num_new=num_new,
            new_blocks=new_blocks,
            samples=tuple([draft.length > 0 for draft in drafts]),
        )

    def _read(
        self,
        wanted: SequenceOf[tuple[Sequence, int]],
        drafts: list[_Draft],
        passes: list[SchedulerOutput],
        results: list[StepResult],
    ) -> list[tuple[int, ...]]:
        """The draft tokens of each sequence, in the order in which they were asked for."""
        sampled: dict[int, list[int]] = {}
        for plan, result in zip(passes, results, strict=True):
            for row, token_ids in zip(plan.rows, result.token_ids, strict=True):
                sampled.setdefault(row, []).extend(token_ids)
        for draft in drafts:
            draft.row.num_known = draft.num_computed + draft.num_new
            draft.row.drafted = tuple(sampled[draft.row.row][:-1])  # the last one is sampled, and not computed
            self._publish(draft.row, draft.sequence)
        own = {draft.sequence: tuple(sampled[draft.row.row]) for draft in drafts}
        return [own.get(sequence, ()) for sequence, _ in wanted]

    def _publish(self, row: _Row, sequence: Sequence) -> None:
        """Publish the full blocks of known tokens, for sequences with the same prefix."""
        size = self.pool.block_size
        full = row.num_known // size
        if full <= row.num_published or not self.pool.shares_prefixes:
            return
        keys = sequence.block_keys(full, size)
        for index in range(row.num_published, full):
            self.pool.publish(row.blocks[index], keys[index])
        row.num_published = full


def _num_valid(row: _Row, sequence: Sequence) -> int:
    """The first tokens of a sequence whose KV the draft model has: not that of draft tokens that were rejected."""
    following = sequence.token_ids[row.num_known : row.num_known + len(row.drafted)]
    accepted = 0
    while accepted < len(following) and following[accepted] == row.drafted[accepted]:
        accepted += 1
    return min(row.num_known + accepted, sequence.num_tokens - 1)  # the last token is computed, to sample after it


def _new_row(sequence: Sequence) -> NewSequence:
    """The row of a sequence for the executor. It samples as the sequence does, but for what needs more memory."""
    params = msgspec.structs.replace(
        sequence.params,
        logprobs=None,
        prompt_logprobs=None,
        repetition_penalty=1.0,  # penalties count in a table of rows × vocabulary
        presence_penalty=0.0,
        frequency_penalty=0.0,
    )
    return NewSequence(
        row=sequence.row,
        token_ids=tuple(sequence.token_ids),
        num_prompt_tokens=sequence.num_prompt_tokens,
        params=params,
    )
