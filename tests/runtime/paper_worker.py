"""A worker with pencil and paper: executes plans exactly, over a "KV cache" that remembers which token was written.

The token that it samples is a hash of what it reads back through the block table, and of the adapter in the slot
at that moment. So a block that is shared wrongly, reused too early, computed under another adapter or never written
changes the output, or fails an assertion on the spot.
"""

from collections import deque
from collections.abc import Iterable
from hashlib import blake2b

from slipway_runtime.messages import (
    Demote,
    FinishReason,
    FreeHostMemory,
    HostMove,
    Output,
    Promote,
    Request,
    SamplingParams,
    SchedulerOutput,
    StepResult,
    TokenLogprobs,
)
from slipway_runtime.scheduling.block_pool import BlockPool
from slipway_runtime.scheduling.draft_model import DraftModel, KnownTokens
from slipway_runtime.scheduling.host_tier import HostTier
from slipway_runtime.scheduling.residency import Residency
from slipway_runtime.scheduling.scheduler import Scheduler

VOCABULARY = 50
EOS = 0


def next_token(token_ids: Iterable[int], adapter: str = "", seed: int = 0, variety: int = VOCABULARY - 1) -> int:
    """The "model": what follows these tokens. Never EOS, unless a test asks a length of it.

    `seed`: answers of one request differ. `variety`: few words make copies, and draft tokens that prove right.
    """
    digest = blake2b(repr((list(token_ids), adapter, seed)).encode(), digest_size=4).digest()
    return 1 + int.from_bytes(digest, "big") % variety


def continuation(
    prompt: Iterable[int], count: int, adapter: str = "", seed: int = 0, memory: int | None = None
) -> list[int]:
    """What a request must give when nothing interferes."""
    tokens = list(prompt)
    start = len(tokens)
    for _ in range(count):
        tokens.append(next_token(tokens if memory is None else tokens[-memory:], adapter, seed))
    return tokens[start:]


class PaperWorker:
    """`memory`: how many tokens back the model looks when it samples; a short one repeats itself. It reads all."""

    def __init__(self, block_size: int, memory: int | None = None) -> None:
        self.block_size = block_size
        self.horizon = memory
        self.cache: dict[int, tuple[int, str]] = {}  # cache slot -> (token, adapter it was computed with)
        self.host: dict[int, list[tuple[int, str]]] = {}  # slot of host memory -> what a block held
        self.tokens: dict[int, list[int]] = {}  # row -> tokens known
        self.tables: dict[int, list[int]] = {}  # row -> blocks
        self.news: dict[int, tuple[int, int, int, bool]] = {}  # row -> (adapter slot, seed, prompt, scores the prompt)
        self.adapters: dict[int, str] = {}  # adapter slot -> digest
        self.steps = 0

    def execute(self, plan: SchedulerOutput) -> StepResult:
        assert plan.step == self.steps + 1, "plans are executed in their order"
        self.steps = plan.step
        for load in plan.adapter_loads:
            self.adapters[load.slot] = load.digest
        for new in plan.new_rows:
            self.tokens[new.row], self.tables[new.row] = list(new.token_ids), []
            scores = new.params.prompt_logprobs is not None
            self.news[new.row] = (new.adapter_slot, new.params.seed, new.num_prompt_tokens, scores)
        for row, blocks in zip(plan.rows, plan.new_blocks, strict=True):
            self.tables[row] += blocks
        assert len(set(plan.rows)) == len(plan.rows)
        assert list(plan.num_new) == sorted(plan.num_new, key=lambda n: n != 1), "rows of one token come first"
        for move in plan.host_moves:
            self._move(move)
        for source, target in plan.copies:
            self._copy(source, target)
        self.written: set[int] = set()
        sampled, scores = [], []
        for index, row in enumerate(plan.rows):
            drafts = plan.drafts[index] if plan.drafts else ()
            sampled.append(self._row(row, plan.num_computed[index], plan.num_new[index], plan.samples[index], drafts))
            scores.append(self._score(row, plan.num_computed[index], plan.num_new[index]))
        return StepResult(
            step=plan.step, token_ids=tuple(sampled), prompt_logprobs=tuple(scores) if any(scores) else ()
        )

    def _row(self, row: int, computed: int, new: int, samples: bool, drafts: tuple[int, ...]) -> tuple[int, ...]:
        tokens = self.tokens[row]
        slot, seed, _, _ = self.news[row]
        adapter = self.adapters[slot] if slot >= 0 else ""
        assert new - len(drafts) >= 1
        assert samples == (computed + new - len(drafts) == len(tokens))
        assert samples or not drafts
        drafted = [*tokens, *drafts]
        for position in range(computed, computed + new):
            place = self._place(row, position)
            assert place not in self.written, "two rows of one step write to the same place"
            self.written.add(place)
            self.cache[place] = (drafted[position], adapter)
        if not samples:
            return ()
        accepted: list[int] = []
        for draft in (*drafts, None):  # sample at every position, and go on while the draft was the sample
            read = [self.cache[self._place(row, position)] for position in range(len(tokens))]
            assert read == [(token, adapter) for token in tokens], "the cache holds other tokens than the sequence"
            token = next_token(tokens if self.horizon is None else tokens[-self.horizon :], adapter, seed)
            accepted.append(token)
            tokens.append(token)
            if token != draft:
                break
        return tuple(accepted)

    def _score(self, row: int, computed: int, new: int) -> tuple[TokenLogprobs, ...]:
        _, _, num_prompt, scores = self.news[row]
        if not scores:
            return ()
        following = self.tokens[row][computed + 1 : min(computed + new, num_prompt - 1) + 1]
        return tuple(TokenLogprobs(token_id=token, logprob=-1.0, rank=1) for token in following)

    def _move(self, move: HostMove) -> None:
        match move:
            case Demote(block, slot):
                assert slot != 0
                self.host[slot] = [self.cache[block * self.block_size + place] for place in range(self.block_size)]
            case Promote(slot, block):
                assert block != 0
                for place, what in enumerate(self.host[slot]):
                    self.cache[block * self.block_size + place] = what
            case FreeHostMemory():
                self.host.clear()

    def _copy(self, source: int, target: int) -> None:
        for offset in range(self.block_size):
            what = self.cache.get(source * self.block_size + offset)
            if what is not None:
                self.cache[target * self.block_size + offset] = what

    def _place(self, row: int, position: int) -> int:
        block = self.tables[row][position // self.block_size]
        assert block != 0, "nobody computes in the null block"
        return block * self.block_size + position % self.block_size


class PaperDraft:
    """A draft model with pencil and paper. `wrong_after`: of its tokens after so many, none is right; None: all are.

    `memory`: as of a PaperWorker. `fails`: in which calls the device is out of memory.
    """

    def __init__(
        self, block_size: int, memory: int | None = None, *, wrong_after: int | None = None, fails: Iterable[int] = ()
    ) -> None:
        self.worker = PaperWorker(block_size, memory)
        self.wrong_after = wrong_after
        self.fails = set(fails)
        self.calls = 0
        self.widest = 0  # tokens of a pass

    def __call__(self, passes: list[SchedulerOutput], known: list[KnownTokens]) -> list[StepResult] | None:
        self.calls += 1
        for row, position, token_ids in known:
            self.worker.tokens[row][position:] = token_ids
        results = []
        for place, plan in enumerate(passes):
            self.widest = max(self.widest, sum(plan.num_new))
            result = self.worker.execute(plan)
            if self.wrong_after is not None and place >= self.wrong_after:
                result = self._changed(plan, result)
            results.append(result)
        return None if self.calls in self.fails else results

    def _changed(self, plan: SchedulerOutput, result: StepResult) -> StepResult:
        for row, samples in zip(plan.rows, plan.samples, strict=True):
            if samples:
                self.worker.tokens[row][-1] = VOCABULARY
        changed = tuple([(VOCABULARY,) if tokens else () for tokens in result.token_ids])
        return StepResult(step=result.step, token_ids=changed)


class Play:
    """A scheduler and a paper worker on a stage with a clock that steps by one second.

    `overlap`: each plan is made before the results of the one before are known, whenever the scheduler allows it.
    `draft`: a draft model beside the model. Adapters are read from storage in one step, whenever they are wanted.
    """

    def __init__(
        self,
        *,
        blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 4,
        budget: int = 16,
        max_model_len: int = 100_000,
        eos: Iterable[int] = (),
        watermark: float = 0.01,
        overlap: bool = False,
        memory: int | None = None,
        residency: dict[str, object] | None = None,
        adapter_bytes: int = 100,
        shares_prefixes: bool = True,
        host_blocks: int = 0,
        host_enough: int = 256,
        draft: PaperDraft | None = None,
        draft_blocks: int = 64,
        draft_budget: int = 16,
        draft_max_model_len: int = 100_000,
        **options: object,
    ) -> None:
        self.pool = BlockPool(blocks, block_size, shares_prefixes=shares_prefixes)
        self.residency = Residency(self.pool, **residency) if residency is not None else None
        self.tier = HostTier(host_blocks, block_size, enough=host_enough) if host_blocks else None
        self.draft = draft
        self.draft_model = None
        if draft is not None:
            draft_pool = BlockPool(draft_blocks, block_size, shares_prefixes=shares_prefixes)
            self.draft_model = DraftModel(
                draft, draft_pool, max_num_batched_tokens=draft_budget, max_model_len=draft_max_model_len
            )
        self.scheduler = Scheduler(
            self.pool,
            tier=self.tier,
            draft_model=self.draft_model,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            eos_token_ids=frozenset(eos),
            watermark=watermark,
            residency=self.residency,
            **options,
        )
        self.worker = PaperWorker(block_size, memory)
        self.overlap = overlap
        self.adapter_bytes = adapter_bytes
        self.host: set[str] = set()  # adapters whose copy is in host memory
        self.now = 0.0
        self.outputs: dict[str, list[Output]] = {}
        self.plan = SchedulerOutput(step=0)
        self.plans: deque[SchedulerOutput] = deque()  # in flight
        self.all_plans: list[SchedulerOutput] = []
        self.most_in_flight = 0

    def add(self, id: str, prompt: Iterable[int], max_tokens: int = 4, **fields: object) -> Request:
        params = {name: fields.pop(name) for name in list(fields) if name in SamplingParams.__struct_fields__}
        request = Request(
            id=id,
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(max_tokens=max_tokens, **params),
            arrived=self.now,
            **fields,
        )
        self.scheduler.add(request, self.now)
        return request

    def load(self, digest: str, *, num_bytes: int | None = None, pinned: bool = False) -> None:
        if self.scheduler.register_adapter(digest, self.now, pinned=pinned):
            self._read(digest, num_bytes)

    def _read(self, digest: str, num_bytes: int | None = None) -> None:
        self.host.add(digest)
        self.scheduler.note_adapter_loaded(digest, self.now, num_bytes=num_bytes or self.adapter_bytes, rank=8)

    def _move_adapters(self) -> None:
        for digest in self.scheduler.take_dropped_adapters():
            self.host.remove(digest)
        for digest in self.scheduler.take_wanted_adapters():
            self._read(digest)

    def abort(self, id: str, index: int | None = None) -> None:
        self.scheduler.abort(id, FinishReason.CANCELLED, self.now, index)

    def pause(self, id: str, on: bool = True) -> None:
        self.scheduler.pause(id, on, self.now)

    def step(self) -> list[Output]:
        self.now += 1
        while len(self.plans) <= self.overlap and self.scheduler.can_overlap:
            self._schedule()
        self.most_in_flight = max(self.most_in_flight, len(self.plans))
        outputs = self.scheduler.update(self.worker.execute(self.plans.popleft()), self.now)
        self._move_adapters()
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        self.scheduler.check()
        return outputs

    def _schedule(self) -> None:
        self.plan = self.scheduler.schedule(self.now)
        self._check_drafts()
        self.plans.append(self.plan)
        self.all_plans.append(self.plan)
        for load in self.plan.adapter_loads:
            assert load.digest in self.host, "a slot is loaded from host memory"

    def _check_drafts(self) -> None:
        """A draft model that drafted for a row has the tokens of its sequence, not those that were rejected."""
        if self.draft is None or not self.plan.drafts:
            return
        drafted = {row: drafts for row, drafts in zip(self.plan.rows, self.plan.drafts, strict=True) if drafts}
        for sequence in self.scheduler._table.running:
            if sequence.row in drafted and sequence.drafted_by_model:
                expected = [*sequence.token_ids, *drafted[sequence.row]]
                assert self.draft.worker.tokens[sequence.row] == expected

    def run(self, most_steps: int = 10_000) -> "Play":
        for _ in range(most_steps):
            if not self.scheduler.has_work:
                return self
            self.step()
        raise AssertionError(f"still at work after {most_steps} steps")

    def text(self, id: str, index: int = 0) -> list[int]:
        return [token for output in self.outputs.get(id, []) if output.index == index for token in output.token_ids]

    def end(self, id: str, index: int = 0) -> Output:
        return [output for output in self.outputs[id] if output.index == index][-1]
