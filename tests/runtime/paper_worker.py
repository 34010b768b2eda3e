"""A worker with pencil and paper: executes plans exactly, over a "KV cache" that remembers which token was written.

The token that it draws is a hash of what it reads back through the block table. So a block that is shared wrongly,
reused too early or never written changes the output, or fails an assertion on the spot.
"""

from collections.abc import Iterable
from hashlib import blake2b

from slipway_runtime.messages import Output, Request, SamplingParams, StepPlan, StepResult
from slipway_runtime.scheduling.block_pool import BlockPool
from slipway_runtime.scheduling.scheduler import Scheduler

VOCABULARY = 50
EOS = 0


def next_token(token_ids: Iterable[int], salt: str = "") -> int:
    """The "model": what follows these tokens. Never EOS, unless a test asks a length of it."""
    digest = blake2b(repr((list(token_ids), salt)).encode(), digest_size=4).digest()
    return 1 + int.from_bytes(digest, "big") % (VOCABULARY - 1)


def continuation(prompt: Iterable[int], count: int) -> list[int]:
    """What a request must give when nothing interferes."""
    tokens = list(prompt)
    start = len(tokens)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[start:]


class PaperWorker:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.memory: dict[int, int] = {}  # slot -> token
        self.tokens: dict[int, list[int]] = {}  # row -> tokens known
        self.tables: dict[int, list[int]] = {}  # row -> blocks

    def execute(self, plan: StepPlan) -> StepResult:
        for new in plan.new_rows:
            self.tokens[new.row], self.tables[new.row] = list(new.token_ids), []
        for row, blocks in zip(plan.rows, plan.new_blocks, strict=True):
            self.tables[row] += blocks
        assert len(set(plan.rows)) == len(plan.rows)
        assert list(plan.num_new) == sorted(plan.num_new, key=lambda n: n != 1), "rows of one token come first"
        drawn: list[tuple[int, ...]] = []
        written: dict[int, int] = {}
        for row, computed, new, samples in zip(plan.rows, plan.num_computed, plan.num_new, plan.samples, strict=True):
            tokens = self.tokens[row]
            assert new >= 1
            assert samples == (computed + new == len(tokens))
            for position in range(computed, computed + new):
                slot = self._slot(row, position)
                assert slot not in written, "two rows of one step write to the same place"
                written[slot] = self.memory[slot] = tokens[position]
            if not samples:
                drawn.append(())
                continue
            read = [self.memory[self._slot(row, position)] for position in range(computed + new)]
            assert read == tokens, "the cache holds other tokens than the sequence"
            tokens.append(next_token(read))
            drawn.append((tokens[-1],))
        return StepResult(step=plan.step, token_ids=tuple(drawn))

    def _slot(self, row: int, position: int) -> int:
        block = self.tables[row][position // self.block_size]
        assert block != 0, "nobody computes in the null block"
        return block * self.block_size + position % self.block_size


class Play:
    """A scheduler and a paper worker on a stage with a clock that steps by one second."""

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
    ) -> None:
        self.pool = BlockPool(blocks, block_size)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            eos_token_ids=frozenset(eos),
            watermark=watermark,
        )
        self.worker = PaperWorker(block_size)
        self.now = 0.0
        self.outputs: dict[str, list[Output]] = {}
        self.plan = StepPlan(step=0)

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

    def step(self) -> list[Output]:
        self.now += 1
        self.plan = self.scheduler.schedule(self.now)
        outputs = self.scheduler.update(self.worker.execute(self.plan), self.now)
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        self.scheduler.check()
        return outputs

    def run(self, most_steps: int = 10_000) -> "Play":
        for _ in range(most_steps):
            if not self.scheduler.has_work:
                return self
            self.step()
        raise AssertionError(f"still at work after {most_steps} steps")

    def text(self, id: str) -> list[int]:
        return [token for output in self.outputs.get(id, []) for token in output.token_ids]

    def end(self, id: str) -> Output:
        return self.outputs[id][-1]
