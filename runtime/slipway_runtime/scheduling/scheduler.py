"""Scheduler: which tokens each step computes, under a token budget. Deterministic: the same calls give the same plans.

    plan = scheduler.schedule(now)          # how many tokens of each sequence, within the budget
    result = worker.execute(plan)
    outputs = scheduler.update(result, now)  # the sampled tokens, and which answers ended

One rule: `num_computed` catches up with `num_tokens`. Chunked prefill, prefix hits, preemption and resuming all follow.

- Running sequences are planned first: decodes (one token behind) before sequences with a prompt to finish, so that a
  long prompt costs the decodes at most one step of `max_num_batched_tokens`.
- While a long prompt is computed, half of the budget for prompts is for short ones, running or waiting
  (prefill_share.py).
- A waiting sequence is admitted in the order of waiting.py, when the blocks for all of its tokens are available beside
  a reserve: a watermark, and one block for each running sequence. Its blocks are allocated at once. A sequence that
  waits for a slot for its adapter is skipped; one that waits for blocks is not overtaken.
- When a running sequence needs a block and none is left, the newest of the lowest priority is preempted: it gives up
  its blocks and waits again, before newer ones. After `MAX_PREEMPTIONS` times it is admitted only with blocks for its
  full length, and then is not chosen for preemption: no sequence is preempted without end.
- The rest of the budget verifies draft tokens (speculation.py); no sequence is preempted for a draft token.
- A paused sequence is not planned. It keeps its row and its blocks until another sequence needs them.

Overlap: while one plan is executed, the next may be made (`can_overlap`). The worker executes plans in their order and
knows a token as soon as it is sampled, so a row can be planned before its last token is known here. Decisions that
need results (stops, prefixes, charges) are made in `update`, which drops tokens sampled after a stop. The blocks of an
ended sequence are released after the last plan that holds them, those of a preempted one at once: the sequence that
gets them writes in a later plan. Without overlap, schedule and update by turns, the outputs are the same.

Cost: one small tuple per row and step, and one append per token.
"""

import math
from collections import deque
from collections.abc import Mapping

from slipway_runtime.messages import (
    AdapterStatus,
    EngineStats,
    FinishReason,
    Output,
    Request,
    SchedulerOutput,
    StepResult,
    TextBlockChanges,
    TokenLogprobs,
)
from slipway_runtime.scheduling.block_pool import BlockPool, KvEvent, KvEventLog
from slipway_runtime.scheduling.draft_model import DraftModel
from slipway_runtime.scheduling.fairness import Shares
from slipway_runtime.scheduling.host_tier import HostTier
from slipway_runtime.scheduling.prefill_share import divide_prefill
from slipway_runtime.scheduling.prefix_cache import (
    MAX_PREEMPTIONS,
    AdmissionResult,
    admit,
    attach_text_blocks,
    publish_computed,
)
from slipway_runtime.scheduling.request_table import RequestTable
from slipway_runtime.scheduling.residency import Residency
from slipway_runtime.scheduling.scheduler_output import InFlightBatch, Scheduled, SchedulerOutputBuilder
from slipway_runtime.scheduling.sequence import Sequence, State, accept, with_drafts, with_embedding
from slipway_runtime.scheduling.speculation import Drafter, Speculation
from slipway_runtime.scheduling.text_blocks import TextBlockIndex

INVALID_LOGITS = (
    "the model's output is not finite (NaN or infinity): the checkpoint is damaged, or its numbers exceed the range of "
    "the dtype; load it with dtype bfloat16 or float32"
)
MAX_IN_FLIGHT = 2


class Scheduler:
    """Owns the waiting and the running sequences and, through the pool, every block.

    `model`: all else that changes the KV of equal tokens: name, quantization, number format. `speculation_max_tokens`:
    how many draft tokens a row may verify in a step; 0: none. `draft_model`: makes them where prompt lookup finds
    nothing. `residency`: the adapters; None: the base model alone. `tier`: host memory for evicted blocks; None: they
    are dropped.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        watermark: float = 0.01,
        model: str = "",
        tenant_weights: Mapping[str, float] | None = None,
        aging_seconds: float = 30.0,
        speculation_max_tokens: int = 0,
        drafter: Drafter | None = None,
        draft_model: DraftModel | None = None,
        residency: Residency | None = None,
        tier: HostTier | None = None,
        kv_events: bool = False,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {max_num_batched_tokens}, max_num_seqs is {max_num_seqs}: "
                "a step must hold a token of each running sequence"
            )
        self.pool = pool
        self.residency = residency
        self.tier = tier
        pool.below = tier
        pool.text_blocks = TextBlockIndex(lambda key: pool.holds(key) or (tier is not None and key in tier))
        if tier is not None:
            tier.track_text_blocks(pool.text_blocks)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        blocks = pool.total - (residency.most_blocks if residency is not None else 0)
        self.max_model_len = min(max_model_len, blocks * pool.block_size)
        self.speculation = Speculation(speculation_max_tokens, drafter, draft_model) if speculation_max_tokens else None
        if kv_events:
            pool.events = KvEventLog(pool.block_size)
            if tier is not None:
                tier.record_events()
        self._eos = eos_token_ids
        self._watermark_blocks = max(1, int(pool.total * watermark))
        self._table = RequestTable(
            pool,
            max_num_seqs=max_num_seqs,
            max_model_len=self.max_model_len,
            eos_token_ids=eos_token_ids,
            model=model,
            shares=Shares(tenant_weights),
            aging_seconds=aging_seconds,
            residency=residency,
            tier=tier,
            on_row_lost=None if self.speculation is None else self.speculation.release,
        )
        self._in_flight: deque[InFlightBatch] = deque()  # the oldest first
        self._steps = 0

    # --- requests

    def add(self, request: Request, now: float, *, refusal: str = "") -> None:
        """Put a request into the queue. With a refusal, or for an adapter that is not loaded, it ends with an error."""
        self._table.add(request, now, refusal=refusal)

    def abort(self, request_id: str, reason: FinishReason, now: float, index: int | None = None) -> None:
        """End a request, or one of its answers, in whatever state it is; unknown ids are ignored.

        STOP counts it as finished. Its blocks are free at once, or after the last plan in flight that writes them.
        """
        self._table.abort(request_id, reason, now, index)

    def close(self, request_id: str, index: int, reason: FinishReason, now: float) -> None:
        """End an answer without a final output: the caller sends that."""
        self._table.abort(request_id, reason, now, index, sends_output=False)

    def pause(self, request_id: str, on: bool, now: float) -> None:
        """Pause a request, so that it is not planned, or resume it; unknown ids are ignored."""
        self._table.pause(request_id, on, now)

    @property
    def has_work(self) -> bool:
        """Whether a step would compute tokens or return outputs; False where all sequences are paused."""
        return bool(self._table or self._in_flight)

    @property
    def is_stalled(self) -> bool:
        """Whether all sequences wait for adapters that are being read, or are paused: a step would do nothing."""
        table = self._table
        if self._in_flight or table.final_outputs or self.residency is None:
            return False
        if not len(table.waiting) or not all(sequence.paused for sequence in table.running):
            return False
        return not table.waiting.by_adapter[""] and self.residency.is_reading

    # --- one step

    @property
    def can_overlap(self) -> bool:
        """Whether `schedule` may be called now: fewer than two plans are in flight, something is left to plan, and no
        draft tokens depend on the samples in flight.

        Masks of grammars depend on them too, but are needed only after the forward pass: the engine makes them
        meanwhile.
        """
        if not self._in_flight:
            return True
        table = self._table
        drafting = self.speculation is not None and self.speculation.active
        if len(self._in_flight) == MAX_IN_FLIGHT or drafting:
            return False
        return len(table.waiting) > 0 or any(sequence.num_ahead for sequence in table.running)

    def schedule(self, now: float) -> SchedulerOutput:
        """Decide what the next step computes; see `can_overlap`. Each plan needs its `update`, an empty one too."""
        assert self.can_overlap, "the results of the last plan are needed first"
        self.pool.now = now
        self._table.expire(now)
        if self.tier is not None:
            self.tier.update_activity()
        self._steps += 1
        plan = SchedulerOutputBuilder()
        budget = self.max_num_batched_tokens
        preemptions = self._table.counters.preemptions
        for sequence in self._table.running.copy():
            if sequence.num_ahead == 1 and sequence.state is State.RUNNING:
                budget -= self._schedule_decode(sequence, plan, now)
        # Blocks freed by preemption are for running sequences.
        budget = self._schedule_prompts(budget, plan, now, admits=self._table.counters.preemptions == preemptions)
        if self.speculation is not None and self.speculation.active:
            self.speculation.add_drafts(budget, plan, self.pool, self._watermark_blocks + len(self._table.running))
        loads = self.residency.take_loads() if self.residency is not None else ()
        moves = self.tier.take_moves() if self.tier is not None else ()
        step, flight = plan.build(self._steps, loads, moves)
        self._in_flight.append(flight)
        return step

    def update(self, result: StepResult, now: float) -> list[Output]:
        """Apply the result of the oldest plan in flight; the outputs of its sequences, and waiting final outputs."""
        flight = self._in_flight.popleft()
        assert result.step == flight.step, "results come back in order"
        self.pool.now = now
        table = self._table
        generated = table.counters.generated_tokens
        outputs = []
        for index, (row, token_ids) in enumerate(zip(flight.rows, result.token_ids, strict=True)):
            sequence = row.sequence
            sequence.in_flight -= 1
            sequence.num_pending -= row.samples
            if sequence.state is State.ENDED:  # ended meanwhile: its sampled tokens are dropped
                if not sequence.in_flight:
                    table.retire(sequence)
                continue
            self._count_computed(row, token_ids, result.prompt_logprobs[index] if result.prompt_logprobs else ())
            if index in result.invalid:
                table.counters.invalid_logits += 1
                self.pool.unpublish(sequence.blocks)  # its KV may be what is not finite
                table.end(sequence, FinishReason.ERROR, now, INVALID_LOGITS)
                continue
            if row.samples:
                if sequence.first_token_at is None and sequence.index == 0:  # the answers of a request share its prompt
                    table.counters.prefilled_tokens += sequence.num_prompt_tokens
                logprobs = result.logprobs[index] if result.logprobs else ()
                output = accept(sequence, token_ids, logprobs, self._eos, now)
                if result.embeddings:
                    output = with_embedding(output, result.embeddings[index])
                if row.drafts:
                    output = with_drafts(output, len(row.drafts), len(token_ids) - 1)
                table.counters.generated_tokens += len(output.token_ids)
                sequence.share.charge(output=len(output.token_ids))
                outputs.append(output)
            if sequence.state is State.RUNNING:
                publish_computed(sequence, self.pool)
                if sequence.has_text_blocks:
                    attach_text_blocks(sequence, self.pool)
                if sequence.siblings and sequence.num_computed >= sequence.num_prompt_tokens:
                    table.release_followers(sequence, now)
            if sequence.finish_reason is not None:
                table.close(sequence, sequence.finish_reason, now)
        if self.speculation is not None:
            self.speculation.update_activity(table.counters.generated_tokens - generated)
        final_outputs, table.final_outputs = table.final_outputs, []
        return outputs + final_outputs

    def end_in_flight(self, reason: FinishReason, error: str, now: float) -> list[Output]:
        """End the sequences of the plans in flight, which could not be computed; the others go on."""
        self.pool.now = now
        table = self._table
        lost, self._in_flight = [row for flight in self._in_flight for row in flight.rows], deque()
        for row in lost:
            row.sequence.in_flight -= 1
            row.sequence.num_pending -= row.samples
        for sequence in dict.fromkeys(row.sequence for row in lost):
            if sequence.state is State.ENDED:
                table.retire(sequence)
            else:
                table.end(sequence, reason, now, error)
        final_outputs, table.final_outputs = table.final_outputs, []
        return final_outputs

    def stats(self, now: float) -> EngineStats:
        """The current statistics."""
        return self._table.stats(self.speculation, self._steps, now)

    def check(self, *, most_blocks: int | None = None) -> None:
        """Raise AssertionError when blocks, rows or requests are unaccounted for; `most_blocks`: see RequestTable."""
        if not self._in_flight:
            assert not self._table.ending, "ended sequences are left without a plan in flight"
        self._table.check(most_blocks=most_blocks)
        if self.speculation is not None:
            self.speculation.check()

    # --- running sequences

    def _schedule_decode(self, sequence: Sequence, plan: SchedulerOutputBuilder, now: float) -> int:
        if sequence.num_planned == len(sequence.blocks) * self.pool.block_size:
            if not self._make_room(sequence, plan, now):
                return 0
            plan.append_blocks(sequence, self.pool.allocate(1))
        plan.compute(sequence, 1, ahead=1)
        return 1

    def _make_room(self, sequence: Sequence, plan: SchedulerOutputBuilder, now: float) -> bool:
        """Make a block available, by preemption if needed; False when the sequence itself was preempted."""
        if self.residency is not None:
            self.residency.make_room(1)
        running = self._table.running
        while self.pool.available == 0:
            victim = next((s for s in reversed(running) if s.paused), None)
            victim = victim or next((s for s in reversed(running) if s.preemptions < MAX_PREEMPTIONS), sequence)
            # Preemption begins at the end of the order in which rows are planned: the victim is not in this plan yet.
            assert all(victim is not row.sequence for row in plan.rows)
            self._table.preempt(victim, now)
            if victim is sequence:
                return False
        return True

    # --- prompts, running and waiting

    def _schedule_prompts(self, budget: int, plan: SchedulerOutputBuilder, now: float, *, admits: bool) -> int:
        """Plan prompts: short ones beside the reserve of a long one, long ones, then what waits; the budget left."""
        waiting = self._table.waiting
        share = divide_prefill(self._table.running, budget, self.max_num_batched_tokens)
        least_rank = -math.inf if share.first is None else share.first.request.priority
        budget = _schedule_chunks(share.short, budget - share.reserved, plan)
        left = self._admit_waiting(budget, plan, now, least_rank) if admits else budget
        if admits and left == budget > 0 and any(waiting.in_turn(now, least_rank)):
            self._table.preempt_paused(now)
        if share.first is None:
            return left
        budget, reserved = left + share.reserved, share.reserved
        for sequence in share.long:
            reserved = 0 if sequence is share.first else reserved
            budget = _schedule_chunks([sequence], budget - reserved, plan) + reserved
        return self._admit_waiting(budget, plan, now) if admits else budget

    def _admit_waiting(
        self, budget: int, plan: SchedulerOutputBuilder, now: float, least_rank: float = -math.inf
    ) -> int:
        """Admit waiting sequences while budget, rows and blocks last; the budget that is left.

        least_rank: of their priority class, aging included.
        """
        table = self._table
        without_slot: set[str] = set()
        result = AdmissionResult.ADMITTED
        while result is AdmissionResult.ADMITTED and budget > 0 and table.free_rows and len(table.waiting):
            for sequence in table.waiting.in_turn(now, least_rank):
                if sequence.adapter in without_slot:
                    continue
                result = admit(sequence, table, plan, self._watermark_blocks, now)
                if result is AdmissionResult.ADMITTED:
                    budget -= _schedule_chunk(sequence, budget, plan)
                if result is not AdmissionResult.NO_SLOT:
                    break
                without_slot.add(sequence.adapter)
            else:
                break
        return budget

    # --- results

    def _count_computed(
        self, row: Scheduled, token_ids: tuple[int, ...], prompt_logprobs: tuple[TokenLogprobs, ...]
    ) -> None:
        """Advance `num_computed` by the tokens kept: the positions of rejected draft tokens are computed again."""
        sequence = row.sequence
        self._table.counters.computed_tokens += row.num_new
        accepted = max(len(token_ids) - 1, 0)
        if self.speculation is not None and row.samples and row.num_new == 1 + len(row.drafts):
            self.speculation.record_accepted(sequence, len(row.drafts), accepted)
        if row.preemptions == sequence.preemptions:
            rejected = len(row.drafts) - accepted if row.drafts else 0
            sequence.num_computed += row.num_new - rejected
            sequence.num_planned -= rejected
        if row.preemptions == sequence.preemptions or row.samples:
            sequence.prompt_logprobs.extend(prompt_logprobs)

    # --- prefixes and adapters

    def forget_prefixes(self) -> None:
        """Clear the prefix cache: a client asked for it, or the KV memory was given back."""
        self.pool.forget_all()
        if self.speculation is not None:
            self.speculation.forget_prefixes()

    def take_kv_events(self) -> tuple[KvEvent, ...]:
        """The KV events since the last call; none unless `kv_events` is on."""
        events = self.pool.events.take() if self.pool.events is not None else ()
        return events + self.tier.take_events() if self.tier is not None else events

    def take_text_blocks(self) -> TextBlockChanges | None:
        """Which text blocks of gateways became cached or were evicted since the last call; None: none."""
        return self.pool.text_blocks.take() if self.pool.text_blocks is not None else None

    def register_adapter(self, digest: str, now: float, *, pinned: bool = False) -> bool:
        """Register an adapter. True: read it, then call `note_adapter_loaded` or `note_adapter_failed`."""
        return self._adapters.register(digest, pinned=pinned)

    def note_adapter_loaded(self, digest: str, now: float, *, num_bytes: int, rank: int) -> None:
        """Note that an adapter was read. Without memory for it now, `take_dropped_adapters` names it at once."""
        self._adapters.note_loaded(digest, num_bytes=num_bytes, rank=rank)
        self._end_requests_of_failed_adapter(digest, now)

    def note_adapter_failed(self, digest: str, error: str, now: float) -> None:
        """Note that an adapter could not be read: requests that wait for it end with that error."""
        self._adapters.note_failed(digest, error)
        self._end_requests_of_failed_adapter(digest, now)

    def unload_adapter(self, digest: str, now: float) -> bool:
        """Refuse new requests for an adapter, and drop it when its last one has ended; False: not known."""
        return self._adapters.unload(digest)

    def adapters(self) -> tuple[AdapterStatus, ...]:
        """The statuses of all known adapters."""
        return self.residency.statuses() if self.residency is not None else ()

    @property
    def adapters_version(self) -> int:
        """A number that grows with each change of `adapters`."""
        return self.residency.version if self.residency is not None else 0

    def take_wanted_adapters(self) -> tuple[str, ...]:
        """The adapters to read now, for which memory is reserved; the caller notes for each how that ended."""
        return self.residency.take_wanted() if self.residency is not None else ()

    def take_dropped_adapters(self) -> tuple[str, ...]:
        """The adapters whose host copies may be dropped."""
        return self.residency.take_dropped() if self.residency is not None else ()

    @property
    def _adapters(self) -> Residency:
        assert self.residency is not None, "adapters are off"
        return self.residency

    def _end_requests_of_failed_adapter(self, digest: str, now: float) -> None:
        refusal = self._adapters.failure(digest)
        if refusal:
            self._table.end_waiting(digest, refusal, now)


def _schedule_chunks(sequences: list[Sequence], budget: int, plan: SchedulerOutputBuilder) -> int:
    """Plan prompts in their order while the budget lasts; the budget that is left."""
    for sequence in sequences:
        if budget > 0:
            budget -= _schedule_chunk(sequence, budget, plan)
    return budget


def _schedule_chunk(sequence: Sequence, budget: int, plan: SchedulerOutputBuilder) -> int:
    ahead = sequence.num_ahead
    count = min(ahead, budget)
    plan.compute(sequence, count, ahead=ahead)
    return count
