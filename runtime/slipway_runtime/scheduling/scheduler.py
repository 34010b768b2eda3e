"""Which tokens are computed next. Deterministic: the same calls give the same plans.

    plan = scheduler.schedule(now)          # who computes how much, within the budget
    result = worker.execute(plan)
    outputs = scheduler.update(result, now)  # what that brought, and who is done

One rule: `num_computed` chases `num_tokens`. Prefill in chunks, prefix hits, preemption and resuming all follow.

- Running sequences go first. Those one token behind (they decode) come before those with a prompt to finish, so that
  a long prompt costs the others at most one step of `max_num_batched_tokens`.
- A waiting sequence is admitted in order of priority and arrival, when the blocks for all of its tokens are there and
  a reserve stays: a watermark, and one more block for each sequence that runs. Its blocks are taken at once.
- When a running sequence needs a block and none is left, the newest of the lowest priority gives up its blocks and
  waits again, before newer ones. After `MAX_PREEMPTIONS` times it comes back only with room for its full length, and
  then cannot be a victim: nobody is preempted without end.
"""

import heapq
from bisect import insort

from slipway_runtime.messages import EngineStats, FinishReason, NewRow, Output, Request, StepPlan, StepResult
from slipway_runtime.scheduling.block_pool import BlockPool, root_key
from slipway_runtime.scheduling.ledger import Ledger
from slipway_runtime.scheduling.sequence import NO_ROW, Sequence, State

MAX_PREEMPTIONS = 2


class Scheduler:
    """Owns the waiting and the running sequences and, through the pool, every block."""

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
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {max_num_batched_tokens}, max_num_seqs is {max_num_seqs}: "
                "a step must hold a token of each running sequence"
            )
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = min(max_model_len, pool.total * pool.block_size)
        self.ledger = Ledger()
        self._eos = eos_token_ids
        self._watermark_blocks = max(1, int(pool.total * watermark))
        self._model = model
        self._sequences: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []  # by rank; the next one is first
        self._running: list[Sequence] = []  # by rank; the first victim is last
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._rows = list(range(max_num_seqs))  # a heap: the lowest free row is next
        self._in_flight: list[tuple[Sequence, int, bool]] = []  # (sequence, tokens, samples) of the plan being executed
        self._ended: list[Output] = []  # to be told with the next update
        self._steps = 0
        self._serial = 0

    # --- requests

    def add(self, request: Request, now: float) -> None:
        """Put a request into the queue."""
        assert request.id not in self._sequences, "an id runs once"
        assert 0 < len(request.prompt_token_ids) < self.max_model_len, "refused at the door"
        self._serial += 1
        sequence = Sequence(
            request=request,
            serial=self._serial,
            max_tokens=min(len(request.prompt_token_ids) + request.params.max_tokens, self.max_model_len),
            keys=[root_key(model=self._model, salt=request.cache_salt)],
            queued_at=now,
        )
        self._sequences[request.id] = sequence
        insort(self._waiting, sequence, key=_rank)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, sequence.serial, sequence))
        self.ledger.admitted += 1
        self.ledger.prompt_tokens += len(request.prompt_token_ids)

    def abort(self, request_id: str, reason: FinishReason, now: float) -> None:
        """End a request in whatever state it is; unknown ids are ignored. STOP counts it as finished.

        Its blocks are free at once, or after the step that is computing them right now.
        """
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence, reason, now)

    @property
    def has_work(self) -> bool:
        """Whether a step would compute or tell anything."""
        return bool(self._sequences or self._ended)

    # --- one step

    def schedule(self, now: float) -> StepPlan:
        """Decide what the next step computes. `update` must follow before the next call."""
        assert not self._in_flight, "the last plan was not updated"
        self._expire(now)
        self._steps += 1
        new_blocks: dict[Sequence, tuple[int, ...]] = {}
        new_rows: list[NewRow] = []

        budget = self.max_num_batched_tokens
        preemptions = self.ledger.preemptions
        for sequence in self._running.copy():
            if sequence.num_tokens - sequence.num_computed == 1 and sequence.state is State.RUNNING:
                budget -= self._schedule_decode(sequence, new_blocks)
        for sequence in self._running:
            if sequence.num_tokens - sequence.num_computed > 1 and budget > 0:
                budget -= self._schedule_chunk(sequence, budget)
        if self.ledger.preemptions == preemptions:  # room that was just made is for those who run
            while self._waiting and budget > 0 and self._rows:
                sequence = self._waiting[0]
                if not self._admit(sequence, new_blocks, new_rows, now):
                    break  # nobody overtakes: what is short for the first may be short for the next one for ever
                budget -= self._schedule_chunk(sequence, budget)
        return self._plan(new_rows, new_blocks)

    def update(self, result: StepResult, now: float) -> list[Output]:
        """Take in what the step computed and drew; tell what it brought for whom."""
        assert result.step == self._steps, "results come back in order"
        outputs = []
        in_flight, self._in_flight = self._in_flight, []
        for (sequence, num_new, samples), token_ids in zip(in_flight, result.token_ids, strict=True):
            if sequence.state is State.ENDED:  # ended while it was computed: its last token never happened
                self._give_back(sequence)
                continue
            sequence.num_computed += num_new
            self.ledger.computed_tokens += num_new
            if samples:
                (token_id,) = token_ids
                outputs.append(self._accept(sequence, token_id, now))
            self._publish(sequence)
            if sequence.finish_reason is not None:
                self._leave(sequence)
                self._give_back(sequence)
                sequence.state = State.ENDED
        ended, self._ended = self._ended, []
        return outputs + ended

    def stats(self, now: float) -> EngineStats:
        """The numbers as they are."""
        return self.ledger.stats(
            running=len(self._running),
            waiting=len(self._waiting),
            waiting_tokens=sum(sequence.num_tokens for sequence in self._waiting),
            pool=self.pool,
            steps=self._steps,
            now=now,
        )

    def check(self) -> None:
        """Raise AssertionError when blocks, rows or requests are unaccounted for."""
        self.pool.check()
        held = [block for sequence in self._running for block in sequence.blocks]
        assert len(set(held)) == self.pool.live, "every live block belongs to a running sequence"
        assert not self._in_flight, "between steps only"
        assert not any(sequence.blocks for sequence in self._waiting)
        assert len(self._rows) + len(self._running) == self.max_num_seqs
        assert len(self._sequences) == len(self._running) + len(self._waiting)
        stats = self.stats(0.0)
        assert stats.admitted == stats.finished + stats.aborted + stats.handed_over + stats.running + stats.waiting

    # --- running sequences

    def _schedule_decode(self, sequence: Sequence, new_blocks: dict[Sequence, tuple[int, ...]]) -> int:
        if sequence.num_computed == len(sequence.blocks) * self.pool.block_size:
            if not self._make_room(sequence):
                return 0
            block = self.pool.allocate(1)
            sequence.blocks += block
            new_blocks[sequence] = tuple(block)
        self._in_flight.append((sequence, 1, True))
        return 1

    def _schedule_chunk(self, sequence: Sequence, budget: int) -> int:
        remaining = sequence.num_tokens - sequence.num_computed
        num_new = min(remaining, budget)
        self._in_flight.append((sequence, num_new, num_new == remaining))
        return num_new

    def _make_room(self, sequence: Sequence) -> bool:
        """See that a block is available, preempting; False when the sequence itself had to go."""
        while self.pool.available == 0:
            victim = next((s for s in reversed(self._running) if s.preemptions < MAX_PREEMPTIONS), sequence)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        # Victims are taken from the end of the order in which rows are scheduled, so none of them is in flight yet.
        assert all(sequence is not scheduled for scheduled, _, _ in self._in_flight)
        self._leave(sequence)
        self._give_back(sequence)
        sequence.state = State.WAITING
        sequence.num_computed = 0
        sequence.num_published = 0
        sequence.preemptions += 1
        self.ledger.preemptions += 1
        insort(self._waiting, sequence, key=_rank)

    # --- waiting sequences

    def _admit(
        self, sequence: Sequence, new_blocks: dict[Sequence, tuple[int, ...]], new_rows: list[NewRow], now: float
    ) -> bool:
        """Give the first of the queue a row and its blocks, if they are there."""
        pool = self.pool
        # At least one token stays to be computed: without it there would be nothing to draw the next one from.
        hits = pool.match(sequence.block_keys((sequence.num_tokens - 1) // pool.block_size, pool.block_size))
        length = sequence.max_tokens if sequence.preemptions >= MAX_PREEMPTIONS else sequence.num_tokens
        need = pool.blocks_for(length) - len(hits)
        left = pool.available - pool.reusable(hits) - need
        if self._running and left < self._watermark_blocks + len(self._running):
            return False
        assert left >= 0, "a sequence alone always fits: longer ones are refused"
        pool.hold(hits)
        sequence.blocks = hits + pool.allocate(need)
        sequence.num_computed = len(hits) * pool.block_size
        sequence.num_published = len(hits)
        sequence.row = heapq.heappop(self._rows)
        sequence.state = State.RUNNING
        self._waiting.pop(0)
        insort(self._running, sequence, key=_rank)
        if sequence.scheduled_at is None:
            sequence.scheduled_at = now
            sequence.cached_tokens = sequence.num_computed
            self.ledger.started += 1
            self.ledger.prefix_queries += sequence.num_prompt_tokens
            self.ledger.prefix_hits += sequence.cached_tokens
        new_blocks[sequence] = tuple(sequence.blocks)
        new_rows.append(
            NewRow(
                row=sequence.row,
                token_ids=tuple(sequence.token_ids),
                num_prompt_tokens=sequence.num_prompt_tokens,
                params=sequence.request.params,
            )
        )
        return True

    # --- ends

    def _accept(self, sequence: Sequence, token_id: int, now: float) -> Output:
        """Append a drawn token and see whether it is the last one."""
        sequence.token_ids.append(token_id)
        self.ledger.generated_tokens += 1
        first = sequence.first_token_at is None
        if first:
            sequence.first_token_at = now
        sequence.finish_reason = self._reason_to_stop(sequence, token_id)
        if sequence.finish_reason is not None:
            del self._sequences[sequence.request.id]
            self.ledger.count_end(sequence.finish_reason)
        return Output(
            request_id=sequence.request.id,
            token_ids=(token_id,),
            finish_reason=sequence.finish_reason,
            stop_token_id=token_id if sequence.finish_reason is FinishReason.STOP else None,
            cached_tokens=sequence.cached_tokens if first else 0,
            queued_at=sequence.queued_at if first else None,
            scheduled_at=sequence.scheduled_at if first else None,
            first_token_at=now if first else None,
            finished_at=None if sequence.finish_reason is None else now,
        )

    def _reason_to_stop(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        params = sequence.request.params
        if sequence.num_output_tokens >= params.min_tokens and (
            (token_id in self._eos and not params.ignore_eos) or token_id in params.stop_token_ids
        ):
            return FinishReason.STOP
        return FinishReason.LENGTH if sequence.num_tokens >= sequence.max_tokens else None

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, sequence = heapq.heappop(self._deadlines)
            if sequence.state is not State.ENDED:
                self._end(sequence, FinishReason.TIMEOUT, now)

    def _end(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        in_flight = any(sequence is scheduled for scheduled, _, _ in self._in_flight)
        self._leave(sequence)
        if not in_flight:  # otherwise the step is still writing into its blocks: `update` gives them back
            self._give_back(sequence)
        sequence.state = State.ENDED
        sequence.finish_reason = reason
        del self._sequences[sequence.request.id]
        self.ledger.count_end(reason)
        self._ended.append(
            Output(
                request_id=sequence.request.id,
                finish_reason=reason,
                queued_at=sequence.queued_at if sequence.first_token_at is None else None,
                scheduled_at=sequence.scheduled_at if sequence.first_token_at is None else None,
                finished_at=now,
            )
        )

    def _leave(self, sequence: Sequence) -> None:
        (self._running if sequence.state is State.RUNNING else self._waiting).remove(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        if sequence.row != NO_ROW:
            heapq.heappush(self._rows, sequence.row)
            sequence.row = NO_ROW

    def _publish(self, sequence: Sequence) -> None:
        """Let others find the blocks that are full and computed. Drawn tokens count once they are accepted."""
        full = sequence.num_computed // self.pool.block_size
        if full > sequence.num_published:
            keys = sequence.block_keys(full, self.pool.block_size)
            for index in range(sequence.num_published, full):
                self.pool.publish(sequence.blocks[index], keys[index])
            sequence.num_published = full

    def _plan(self, new_rows: list[NewRow], new_blocks: dict[Sequence, tuple[int, ...]]) -> StepPlan:
        self._in_flight.sort(key=lambda scheduled: scheduled[1] != 1)  # rows of one token first
        in_flight = self._in_flight
        return StepPlan(
            step=self._steps,
            new_rows=tuple(new_rows),
            rows=tuple([sequence.row for sequence, _, _ in in_flight]),
            num_computed=tuple([sequence.num_computed for sequence, _, _ in in_flight]),
            num_new=tuple([num_new for _, num_new, _ in in_flight]),
            new_blocks=tuple([new_blocks.get(sequence, ()) for sequence, _, _ in in_flight]),
            samples=tuple([samples for _, _, samples in in_flight]),
        )


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank
