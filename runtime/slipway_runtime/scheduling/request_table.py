"""Request table: the requests of the scheduler with their rows, blocks, shares and adapters; counters of tokens.

    add ──> waiting ──(start)──> running ──(close)──> ended ──(retire)──> gone
               ^                    │
               └─────(preempt)─────┘

The other answers of a request with `n` > 1 wait for the first one, their leader, to compute the prompt. If it ends
before, the next one leads. An ended sequence keeps its row and its blocks while a plan in flight still writes them.

A paused sequence keeps its row until other sequences need the row or its blocks; then it is parked, outside the queue.
"""

import heapq
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from slipway_runtime.messages import EngineStats, FinishReason, Output, Request
from slipway_runtime.scheduling.block_pool import BlockPool, root_key
from slipway_runtime.scheduling.fairness import Shares
from slipway_runtime.scheduling.host_tier import HostTier
from slipway_runtime.scheduling.residency import Residency
from slipway_runtime.scheduling.sequence import NO_ROW, Sequence, State, ended, reason_to_stop
from slipway_runtime.scheduling.speculation import Speculation
from slipway_runtime.scheduling.waiting import WaitingQueue


@dataclass(slots=True)
class RequestCounters:
    """admitted = finished + aborted + handed_over + running + waiting, after any step; a request counts `n` times."""

    admitted: int = 0
    started: int = 0
    finished: int = 0
    aborted: int = 0
    handed_over: int = 0
    preemptions: int = 0
    invalid_logits: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    host_hits: int = 0  # of those, in host memory

    def count_end(self, reason: FinishReason) -> None:
        """Count an ended answer by its finish reason."""
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.finished += 1
        elif reason is FinishReason.HANDED_OVER:
            self.handed_over += 1
        else:
            self.aborted += 1


class RequestTable:
    """All sequences, with their rows, blocks, shares and adapters."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        model: str,
        shares: Shares,
        aging_seconds: float,
        residency: Residency | None,
        tier: HostTier | None,
        on_row_lost: Callable[[Sequence], object] | None = None,
    ) -> None:
        """on_row_lost: called when a sequence that has ended or is preempted gives up its row."""
        self.pool = pool
        self.residency = residency
        self.tier = tier
        self.counters = RequestCounters()
        self.waiting = WaitingQueue(aging_seconds)
        self.running: list[Sequence] = []  # by rank; the last one is preempted first
        self.free_rows = list(range(max_num_seqs))  # a heap: the lowest free row is next
        self.final_outputs: list[Output] = []  # of sequences that ended outside of a step, for the next update
        self.parked: dict[Sequence, int] = {}  # paused, without a row: its number of tokens then
        self._parked_tokens = 0
        self.ending: set[Sequence] = set()  # ended, and in a plan in flight
        self._eos = eos_token_ids
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._model = model
        self._on_row_lost = on_row_lost
        self._shares = shares
        self._requests: dict[str, list[Sequence]] = {}  # the answers that have not ended
        self._num_following = 0  # sequences that wait for their leader
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._num_stale = 0  # of these, sequences that ended before their deadline
        self._serial = 0

    def __bool__(self) -> bool:
        """Whether a sequence can be planned or a final output waits. Paused sequences and followers do not count."""
        return bool(self.final_outputs or len(self.waiting) or not all(s.paused for s in self.running))

    # --- adding requests

    def add(self, request: Request, now: float, *, refusal: str = "") -> None:
        """Add all answers of a request. With a refusal they end at once, with this sentence as their error."""
        assert request.id not in self._requests, "an id runs once"
        # A prompt that fills the context ends with its one sample: it is pooled.
        assert 0 < len(request.prompt_token_ids) <= self._max_model_len, "refused before it is queued"
        refusal = refusal or self._refusal(request.adapter)
        answers = [self._new(request, index, "" if refusal else request.adapter, now) for index in range(request.n)]
        self._requests[request.id] = answers.copy()
        leader = answers[0]
        self.waiting.push(leader, now)
        self._follow(leader, answers[1:])
        self.counters.admitted += request.n
        self.counters.prompt_tokens += len(request.prompt_token_ids)
        for answer in answers:
            if self.residency is not None and answer.adapter:
                self.residency.start_request(answer.adapter, now)
            if request.deadline is not None:
                heapq.heappush(self._deadlines, (request.deadline, answer.serial, answer))
        for answer in answers:
            if refusal:
                self.end(answer, FinishReason.ERROR, now, refusal)
            elif request.output_token_ids:
                reason = reason_to_stop(answer, self._eos)
                if reason is not None:  # the replica before ended without sending the final output
                    self.end(answer, reason, now)

    def _refusal(self, adapter: str) -> str:
        if not adapter:
            return ""
        return "adapters are off" if self.residency is None else self.residency.refusal(adapter)

    def _new(self, request: Request, index: int, adapter: str, now: float) -> Sequence:
        self._serial += 1
        params = request.params
        root = partial(root_key, model=self._model, adapter=request.adapter)
        if index:  # the prompt is scored once
            params = msgspec.structs.replace(params, seed=params.seed + index, prompt_logprobs=None)
        return Sequence(
            request=request,
            index=index,
            params=params,
            adapter=adapter,
            serial=self._serial,
            max_tokens=min(len(request.prompt_token_ids) + params.max_tokens, self._max_model_len),
            keys=[root(salt=None if request.public else request.cache_salt)],
            public_keys=[root(salt=None)],
            queued_at=now,
            share=self._shares.join(request.tenant, request.adapter),
        )

    # --- start, preempt, pause

    def start(
        self,
        sequence: Sequence,
        blocks: list[int],
        num_computed: int,
        *,
        num_from_host: int,
        num_published: int,
        now: float,
    ) -> None:
        """Move a sequence from the queue to a row. `num_computed` of its tokens are in the blocks already."""
        sequence.blocks = blocks
        sequence.num_computed = sequence.num_planned = num_computed
        sequence.num_published = num_published
        sequence.row = heapq.heappop(self.free_rows)
        sequence.state = State.RUNNING
        self.waiting.serve(sequence, now)
        insort(self.running, sequence, key=_rank)
        if self.residency is not None and sequence.adapter:
            self.residency.start_row(sequence.adapter)
        if sequence.scheduled_at is None:
            sequence.scheduled_at = now
            self.counters.started += 1
            sequence.share.charge(prefill=sequence.num_tokens - num_computed)
            if sequence.index == 0:  # the other answers reuse the prompt of the first one: that is no cache hit
                sequence.cached_tokens = min(num_computed, sequence.num_prompt_tokens)
                self.counters.prefix_queries += sequence.num_prompt_tokens
                self.counters.prefix_hits += sequence.cached_tokens
                self.counters.host_hits += min(num_from_host, sequence.cached_tokens)

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Preempt a sequence: move it from its row to the queue. Its KV is lost, except for published blocks."""
        self.running.remove(sequence)
        self._release_row_and_blocks(sequence)
        sequence.forget_computed()
        sequence.state = State.WAITING
        sequence.preemptions += 1
        self.counters.preemptions += 1
        self._enqueue(sequence, now)

    def release_followers(self, leader: Sequence, now: float) -> None:
        """Queue the other answers of a request, whose prompt their leader has computed."""
        followers, leader.siblings = leader.siblings, []
        self._num_following -= len(followers)
        for follower in followers:
            self._enqueue(follower, now)

    def pause(self, request_id: str, on: bool, now: float) -> None:
        """Pause a request, so that it is not planned, or resume it; unknown ids are ignored."""
        for sequence in self._requests.get(request_id, []):
            sequence.paused = on
            if on and sequence in self.waiting:
                self.waiting.remove(sequence)
                self._park(sequence)
            elif not on and sequence in self.parked:
                self._unpark(sequence)
                self.waiting.push(sequence, now)

    def preempt_paused(self, now: float) -> None:
        """Preempt the last paused sequence, so that a waiting one can get its row, its blocks and its slot."""
        idle = next((s for s in reversed(self.running) if s.paused and not s.in_flight), None)
        if idle is not None:
            self.preempt(idle, now)

    def _enqueue(self, sequence: Sequence, now: float) -> None:
        if sequence.paused:
            self._park(sequence)
        else:
            self.waiting.push(sequence, now)

    def _park(self, sequence: Sequence) -> None:
        self.parked[sequence] = sequence.num_tokens
        self._parked_tokens += sequence.num_tokens

    def _unpark(self, sequence: Sequence) -> None:
        self._parked_tokens -= self.parked.pop(sequence)

    def _follow(self, leader: Sequence, followers: list[Sequence]) -> None:
        leader.siblings = followers
        self._num_following += len(followers)
        for follower in followers:
            follower.leader = leader

    # --- ending sequences

    def abort(
        self, request_id: str, reason: FinishReason, now: float, index: int | None, *, sends_output: bool = True
    ) -> None:
        """End a request, or one of its answers, in any state. sends_output: else the caller sends the final output."""
        for sequence in self._requests.get(request_id, []).copy():
            if index is None or index == sequence.index:
                if sends_output:
                    self.end(sequence, reason, now)
                else:
                    self.close(sequence, reason, now)

    def expire(self, now: float) -> None:
        """End the sequences whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, sequence = heapq.heappop(self._deadlines)
            self._num_stale -= 1  # it had ended, or is counted when it ends now
            if sequence.state is not State.ENDED:
                self.end(sequence, FinishReason.TIMEOUT, now)

    def end_waiting(self, adapter: str, error: str, now: float) -> None:
        """End the requests that wait for an adapter that cannot be loaded."""
        for answers in list(self._requests.values()):
            for sequence in answers.copy():
                if sequence.adapter == adapter and sequence.state is State.WAITING:
                    self.end(sequence, FinishReason.ERROR, now, error)

    def end(self, sequence: Sequence, reason: FinishReason, now: float, error: str = "") -> None:
        """End a sequence outside of a step; the next update returns its final output."""
        self.close(sequence, reason, now)
        self.final_outputs.append(ended(sequence, reason, error, now))

    def close(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """Remove an ended sequence from its list; its row and blocks are freed when no plan in flight writes them."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        elif sequence.leader is not None and sequence in sequence.leader.siblings:
            sequence.leader.siblings.remove(sequence)
            self._num_following -= 1
        elif sequence in self.parked:
            self._unpark(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.state = State.ENDED
        sequence.finish_reason = reason
        self.counters.count_end(reason)
        answers = self._requests[sequence.request.id]
        answers.remove(sequence)
        if not answers:
            del self._requests[sequence.request.id]
        if sequence.request.deadline is not None:
            self._drop_stale_deadlines()
        if sequence.siblings:  # it has not computed the prompt: the next answer does
            leader, *followers = sequence.siblings
            self._num_following -= len(sequence.siblings)
            sequence.siblings, leader.leader = [], None
            self._enqueue(leader, now)
            self._follow(leader, followers)
        if sequence.in_flight:
            self.ending.add(sequence)
        else:
            self.retire(sequence)

    def _drop_stale_deadlines(self) -> None:
        """Count a sequence that ended before its deadline, and free such entries: clients may choose late deadlines."""
        self._num_stale += 1
        if self._num_stale > 8 and 2 * self._num_stale > len(self._deadlines):
            self._deadlines = [entry for entry in self._deadlines if entry[2].state is not State.ENDED]
            heapq.heapify(self._deadlines)
            self._num_stale = 0

    def retire(self, sequence: Sequence) -> None:
        """Free the row, blocks and adapter of an ended sequence, which is in no plan in flight any more."""
        self.ending.discard(sequence)
        self._release_row_and_blocks(sequence)
        self._shares.leave(sequence.share)
        if self.residency is not None and sequence.adapter:
            self.residency.end_request(sequence.adapter)

    def _release_row_and_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        if sequence.row != NO_ROW:
            if self._on_row_lost is not None:
                self._on_row_lost(sequence)
            heapq.heappush(self.free_rows, sequence.row)
            sequence.row = NO_ROW
            if self.residency is not None and sequence.adapter:
                self.residency.end_row(sequence.adapter)

    # --- statistics and checks

    @property
    def num_waiting(self) -> int:
        """Sequences without a row: queued, parked, or following a leader."""
        return len(self.waiting) + len(self.parked) + self._num_following

    def stats(self, speculation: Speculation | None, steps: int, now: float) -> EngineStats:
        """Build the statistics of the scheduler."""
        pool, counters, waiting, residency, tier = self.pool, self.counters, self.waiting, self.residency, self.tier
        adapters = {sequence.adapter for sequence in self.running} if residency is not None else set()
        return EngineStats(
            running=len(self.running),
            waiting=self.num_waiting,
            waiting_tokens=waiting.num_tokens + self._parked_tokens,  # parked prompts take memory like waiting ones
            running_tokens=sum([sequence.num_tokens for sequence in self.running]),
            blocks_total=pool.total - pool.reserved,
            blocks_live=pool.live,
            blocks_cached=pool.cached,
            steps=steps,
            preemptions=counters.preemptions,
            invalid_logits=counters.invalid_logits,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            admitted=counters.admitted,
            finished=counters.finished,
            aborted=counters.aborted,
            handed_over=counters.handed_over,
            last_step_at=now,
            prompt_tokens=counters.prompt_tokens,
            prefilled_tokens=counters.prefilled_tokens,
            generated_tokens=counters.generated_tokens,
            computed_tokens=counters.computed_tokens,
            started=counters.started,
            waiting_by_tenant=tuple(sorted(waiting.by_tenant.items())),
            running_adapters=tuple(sorted(adapters - {""})),
            waiting_adapters=tuple(sorted(adapter for adapter in waiting.by_adapter if adapter)),
            invalid_kv_blocks=0 if residency is None else residency.invalid_blocks(),
            host_blocks=0 if tier is None else tier.held,
            host_active=tier is not None and tier.active,
            host_hits=counters.host_hits,
            demotions=0 if tier is None else tier.demotions,
            promotions=0 if tier is None else tier.promotions,
            speculation_active=speculation is not None and speculation.active,
            drafts=0 if speculation is None else speculation.drafts,
            draft_tokens=0 if speculation is None else speculation.draft_tokens,
            accepted_tokens=0 if speculation is None else speculation.accepted_tokens,
            accepted_by_position=() if speculation is None else tuple(speculation.accepted_by_position),
            draft_model=None if speculation is None else speculation.stats_of_model(),
        )

    def check(self, *, most_blocks: int | None = None) -> None:
        """Raise AssertionError when blocks, rows, adapters or requests are unaccounted for.

        most_blocks: check so many blocks of the pool, those after the blocks of the last call; None: all.
        """
        if most_blocks is None:
            self.pool.check()
        else:
            self.pool.check_next(most_blocks)
        holders = [*self.running, *self.ending]
        held = {block for sequence in holders for block in sequence.blocks}
        assert len(held) == self.pool.live, "every live block belongs to a running sequence"
        assert not any(sequence.blocks for sequence in (*self.waiting, *self.parked))
        assert all(sequence.paused for sequence in self.parked)
        assert self._parked_tokens == sum(self.parked.values())
        assert not any(sequence.paused for sequence in self.waiting)
        assert len(self.free_rows) + sum(s.row != NO_ROW for s in holders) == self._max_num_seqs
        answers = [sequence for answers in self._requests.values() for sequence in answers]
        assert len(answers) == len(self.running) + self.num_waiting
        assert self._num_following == sum(len(sequence.siblings) for sequence in answers)
        counters = self.counters
        done = counters.finished + counters.aborted + counters.handed_over
        assert counters.admitted == done + len(self.running) + self.num_waiting
        if self.residency is not None:
            self.residency.check()


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank
