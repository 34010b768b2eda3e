"""Builder of a scheduler output (a plan), and the record of a plan in flight until its results arrive."""

from typing import NamedTuple

from slipway_runtime.messages import AdapterLoad, HostMove, NewSequence, SchedulerOutput
from slipway_runtime.scheduling.sequence import Sequence


class Scheduled(NamedTuple):
    """One row of a plan."""

    sequence: Sequence
    row: int
    num_computed: int  # before the step
    num_new: int  # drafts included
    samples: bool
    drafts: tuple[int, ...]
    preemptions: int  # of the sequence when planned: after another one it no longer has the blocks written here


class InFlightBatch(NamedTuple):
    """A plan whose results are not known yet."""

    step: int
    rows: list[Scheduled]


class SchedulerOutputBuilder:
    """Collects the rows, blocks and copies of a plan."""

    def __init__(self) -> None:
        self.rows: list[Scheduled] = []
        self.new_rows: list[NewSequence] = []
        self.new_blocks: dict[Sequence, list[int]] = {}
        self.copies: list[tuple[int, int]] = []

    def append_blocks(self, sequence: Sequence, blocks: list[int]) -> None:
        """Append to the block table of a sequence, here and in the worker."""
        sequence.blocks += blocks
        self.new_blocks.setdefault(sequence, []).extend(blocks)

    def start_row(self, sequence: Sequence, slot: int) -> None:
        """Add a started sequence to the plan: tokens, sampling parameters and adapter slot for the worker's row."""
        self.new_rows.append(
            NewSequence(
                row=sequence.row,
                token_ids=tuple(sequence.token_ids),
                num_prompt_tokens=sequence.num_prompt_tokens,
                params=sequence.params,
                adapter_slot=slot,
                grammar=sequence.request.grammar is not None,
                request_id=sequence.request.id,
                index=sequence.index,
            )
        )

    def compute(self, sequence: Sequence, count: int, *, ahead: int) -> None:
        """Plan the next `count` of a sequence's `ahead` tokens; with all of them, the row samples."""
        samples = count == ahead
        planned = sequence.num_planned
        self.rows.append(Scheduled(sequence, sequence.row, planned, count, samples, (), sequence.preemptions))
        sequence.num_planned = planned + count
        sequence.num_pending += samples

    def add_drafts(self, index: int, drafts: tuple[int, ...]) -> None:
        """Add draft tokens to a row of the plan, which verifies them."""
        row = self.rows[index]
        row.sequence.num_planned += len(drafts)
        self.rows[index] = row._replace(num_new=row.num_new + len(drafts), drafts=drafts)

    def build(
        self, step: int, loads: tuple[AdapterLoad, ...], moves: tuple[HostMove, ...]
    ) -> tuple[SchedulerOutput, InFlightBatch]:
        """The plan for the worker, and its record until the results arrive."""
        rows = self.rows
        rows.sort(key=_is_chunk)  # rows of one token first
        for row in rows:
            row.sequence.in_flight += 1
        given = self.new_blocks
        plan = SchedulerOutput(
            step=step,
            new_rows=tuple(self.new_rows),
            adapter_loads=loads,
            host_moves=moves,
            copies=tuple(self.copies),
            rows=tuple([row.row for row in rows]),
            num_computed=tuple([row.num_computed for row in rows]),
            num_new=tuple([row.num_new for row in rows]),
            new_blocks=tuple([tuple(given[row.sequence]) if row.sequence in given else () for row in rows]),
            samples=tuple([row.samples for row in rows]),
            drafts=tuple([row.drafts for row in rows]) if any(row.drafts for row in rows) else (),
        )
        return plan, InFlightBatch(step, rows)


def _is_chunk(row: Scheduled) -> bool:
    return row.num_new != 1
