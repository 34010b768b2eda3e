"""Simulation of a trace of requests for many adapters under a memory policy, without a model. Pure.

A step takes the milliseconds of its tokens; an adapter that is not in memory takes its load time, beside the steps. So
two policies can be compared by the mean time to the first token and the share of KV that no request can use, with the
same requests, the same pool and the same bytes.
"""

import math
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from slipway_runtime.messages import Request, SamplingParams, SchedulerOutput, StepResult
from slipway_runtime.scheduling.block_pool import BlockPool
from slipway_runtime.scheduling.residency import EvictionRule, Residency
from slipway_runtime.scheduling.scheduler import Scheduler


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace, with its adapter."""

    at_ms: float
    adapter: str
    prompt: tuple[int, ...]
    max_tokens: int = 4


@dataclass(frozen=True)
class TraceResult:
    """Latency, cache hits and invalid KV of a trace under one policy."""

    mean_ttft_ms: float
    p95_ttft_ms: float
    prefix_hit_share: float  # of prompt tokens
    loads: int  # from storage into memory
    mean_invalid_share: float  # of published KV blocks, over all steps
    max_invalid_blocks: int


@dataclass(frozen=True)
class Machine:
    """The simulated machine. The defaults are a small one: adapters and KV compete for 6 MiB."""

    blocks: int = 96
    block_size: int = 16
    block_bytes: int = 65_536
    adapter_bytes: int = 262_144
    adapter_share: float = 0.5  # of the bytes: at most with one budget, always with two
    slots: int = 4
    max_num_seqs: int = 8
    budget: int = 256
    step_ms: float = 5.0
    prefill_ms_per_token: float = 0.5
    load_ms: float = 20.0  # of any adapter
    load_ms_per_mib: float = 40.0
    half_life_seconds: float = 10.0

    @property
    def adapter_load_ms(self) -> float:
        """The time that loading an adapter takes."""
        return self.load_ms + self.load_ms_per_mib * self.adapter_bytes / 2**20


def skewed_trace(
    uniform: Callable[[], float],
    *,
    adapters: int = 64,
    requests: int = 600,
    exponent: float = 1.1,
    prefix_tokens: int = 128,
    gap_ms: float = 60.0,
    drift: int = 0,
    burst: int = 1,
) -> list[TraceRequest]:
    """Requests for adapters chosen by Zipf's law, each with the prefix of its adapter and 16 tokens of its own.

    drift: after each 60 requests, the popularity of the adapters is rotated by so many. burst: the same adapter is
    asked up to so many times in a row. `uniform` draws from [0, 1): `random.Random(0).random` repeats a trace.
    """
    shares = list(accumulate(1.0 / (rank + 1) ** exponent for rank in range(adapters)))
    at, rank, left = 0.0, 0, 0
    trace = []
    for number in range(requests):
        at -= gap_ms * math.log(1.0 - uniform())
        drawn = bisect(shares, uniform() * shares[-1])
        if left == 0:
            rank, left = (drawn + number // 60 * drift) % adapters, 1 + int(uniform() * burst) if burst > 1 else 1
        left -= 1
        own = tuple(10_000 + number * 16 + offset for offset in range(16))
        trace.append(TraceRequest(at, f"adapter-{rank:02d}", (*range(1, prefix_tokens + 1), *own)))
    return trace


def play(
    trace: Sequence[TraceRequest],
    machine: Machine | None = None,
    *,
    dependency_aware: bool,
    rule: Callable[[BlockPool, Machine], EvictionRule] | None = None,
) -> TraceResult:
    """Run a trace to its end, with one budget for adapters and KV or with two independent LRUs.

    rule: what is evicted from the one budget, in place of the runtime's own rule.
    """
    machine = machine or Machine()
    pool = BlockPool(machine.blocks, machine.block_size)
    residency = Residency(
        pool,
        max_adapters=machine.slots,
        max_cpu_adapters=machine.blocks,  # bytes are the limit, not their number
        block_bytes=machine.block_bytes,
        most_blocks=int(machine.blocks * machine.adapter_share),
        dependency_aware=dependency_aware,
        half_life_seconds=machine.half_life_seconds,
        rule=rule(pool, machine) if rule is not None else None,
    )
    scheduler = Scheduler(
        pool,
        max_num_seqs=machine.max_num_seqs,
        max_num_batched_tokens=machine.budget,
        max_model_len=machine.blocks * machine.block_size,
        residency=residency,
    )
    run = _Run(scheduler, machine)
    for name in sorted({request.adapter for request in trace}):
        if scheduler.register_adapter(name, 0.0):
            scheduler.note_adapter_loaded(name, 0.0, num_bytes=machine.adapter_bytes, rank=8)
    for number, request in enumerate(trace):
        run.until(request.at_ms)
        run.add(f"{number}", request)
    run.until(float("inf"))
    return run.result()


class _Run:
    """A scheduler, a clock in milliseconds, and simulated loads of adapters."""

    def __init__(self, scheduler: Scheduler, machine: Machine) -> None:
        self._scheduler = scheduler
        self._machine = machine
        self._now = 0.0
        self._reading: list[tuple[float, str]] = []
        self._arrived: dict[str, float] = {}
        self._ttft: list[float] = []
        self._loads = 0
        self._invalid: list[float] = []
        self._most_invalid = 0

    def add(self, name: str, request: TraceRequest) -> None:
        self._now = max(self._now, request.at_ms)
        self._arrived[name] = request.at_ms
        self._scheduler.add(
            Request(
                id=name,
                prompt_token_ids=request.prompt,
                params=SamplingParams(max_tokens=request.max_tokens),
                arrived=request.at_ms / 1000,
                adapter=request.adapter,
            ),
            self._now / 1000,
        )

    def until(self, at_ms: float) -> None:
        """Step while there is work, up to that time."""
        while self._now < at_ms and self._scheduler.has_work:
            self._step()

    def _step(self) -> None:
        scheduler = self._scheduler
        for done, name in [entry for entry in self._reading if entry[0] <= self._now]:
            self._reading.remove((done, name))
            scheduler.note_adapter_loaded(name, self._now / 1000, num_bytes=self._machine.adapter_bytes, rank=8)
        plan = scheduler.schedule(self._now / 1000)
        if plan.rows:
            self._now += self._machine.step_ms + self._machine.prefill_ms_per_token * sum(plan.num_new)
        elif self._reading:
            self._now = max(self._now, min(done for done, _ in self._reading))
        else:
            self._now += self._machine.step_ms
        for output in scheduler.update(_sampled(plan), self._now / 1000):
            if output.first_token_at is not None:
                self._ttft.append(self._now - self._arrived[output.request_id])
        for name in scheduler.take_wanted_adapters():
            self._reading.append((self._now + self._machine.adapter_load_ms, name))
            self._loads += 1
        scheduler.take_dropped_adapters()
        self._look(scheduler)

    def _look(self, scheduler: Scheduler) -> None:
        invalid = scheduler.stats(0.0).invalid_kv_blocks
        published = sum(scheduler.pool.members(group) for group in scheduler.pool.groups())
        self._invalid.append(invalid / published if published else 0.0)
        self._most_invalid = max(self._most_invalid, invalid)

    def result(self) -> TraceResult:
        ttft, stats = sorted(self._ttft), self._scheduler.stats(0.0)
        return TraceResult(
            mean_ttft_ms=sum(ttft) / len(ttft),
            p95_ttft_ms=ttft[int(len(ttft) * 0.95)],
            prefix_hit_share=stats.prefix_hits / stats.prefix_queries,
            loads=self._loads,
            mean_invalid_share=sum(self._invalid) / len(self._invalid),
            max_invalid_blocks=self._most_invalid,
        )


def _sampled(plan: SchedulerOutput) -> StepResult:
    def tokens() -> Iterator[tuple[int, ...]]:
        for samples in plan.samples:
            yield (7,) if samples else ()

    return StepResult(step=plan.step, token_ids=tuple(tokens()))
