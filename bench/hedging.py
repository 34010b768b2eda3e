"""Benchmark of hedged first tokens: their gain and their extra load, with the gateway's own code, simulated.

A real `Fleet` with its picker, its times of first tokens and its retry budget routes short prompts to simulated
replicas in virtual time. The cost model of a replica: one prefill after the other at 8,000 tokens/s, and now and then a
stall that no gateway can foresee (a long prompt of another gateway, a compilation, a noisy neighbour). The figures are
of this model: they compare hedging with none, and promise no time on a GPU.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from bench.figures import Figure, Section
from bench.plan import Percentiles
from slipway_gateway.fleet import Fleet, Lease
from slipway_gateway.picker.endpoints import Endpoint, Service
from slipway_gateway.picker.pick import Picked
from slipway_gateway.picker.scorers import RoutingRequest

PREFILL_TOKENS_PER_SECOND = 8000.0
REPLICAS = 4
REQUESTS = 20_000
WARM_UP = 1000  # not counted
UTILISATION = 0.3  # of prefill
STALL_SECONDS = 0.5
STALLS: dict[str, float] = {"a stall of each replica every 20 s": 20.0, "every 5 s": 5.0, "none": float("inf")}


@dataclass(eq=False)
class Job:
    """One prompt at one replica."""

    tokens: int
    endpoint: Endpoint
    lease: Lease
    answer: Callable[["Job"], None]
    is_over: bool = False


@dataclass
class Replica:
    """A replica by the cost model."""

    waiting: deque[Job] = field(default_factory=deque)
    is_busy: bool = False
    stalled_until: float = 0.0
    computed_tokens: int = 0


@dataclass
class Outcome:
    """What one run gave."""

    ttft: list[float] = field(default_factory=list)
    hedges: int = 0
    computed_tokens: int = 0


class Simulation:
    """One run, with hedging or without."""

    def __init__(self, seconds_between_stalls: float, *, hedged: bool) -> None:
        self.now = 0.0
        self.hedged = hedged
        self.stalls = seconds_between_stalls
        self.chance = random.Random(3)
        self.stalling = random.Random(5)  # apart, so that both runs meet the same requests
        self.fleet = Fleet(clock=lambda: self.now, draw=random.Random(11).random)
        self.replicas = {f"ns/p{number}": Replica() for number in range(REPLICAS)}
        self.fleet.set_service("ns/chat", Service("ns/chat", "chat"))
        for name in self.replicas:
            self.fleet.set_endpoint(name, Endpoint(name, "ns/chat", "r1", "http://0"))
        self.destination = self.fleet.destination("ns/chat")
        self.outcome = Outcome()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def run(self, requests: int, warm_up: int) -> Outcome:
        """Serve `requests`, and return what they met after the first `warm_up`."""
        at, rate = 0.0, UTILISATION * REPLICAS * PREFILL_TOKENS_PER_SECOND / 210
        for number in range(requests):
            at += self.chance.expovariate(rate)
            self._at(at, self._arrival(self.chance.randint(20, 400), is_counted=number >= warm_up))
        for replica in self.replicas.values():
            moment = 0.0
            while self.stalls < float("inf") and (moment := moment + self.stalling.expovariate(1 / self.stalls)) < at:
                self._at(moment, self._stall(replica))
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.outcome.computed_tokens = sum(replica.computed_tokens for replica in self.replicas.values())
        return self.outcome

    def _at(self, moment: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._numbers), act))

    def _arrival(self, tokens: int, *, is_counted: bool) -> Callable[[], None]:
        def act() -> None:
            arrived, jobs = self.now, []
            self.destination.retry_budget.add_request()
            request = RoutingRequest("chat", cost=tokens, prompt_tokens=tokens)

            def answered(winner: Job) -> None:
                self.fleet.record_success(winner.endpoint)
                if winner is not jobs[0]:
                    self.fleet.record_late(jobs[0].endpoint, self.now - arrived)
                for job in jobs:
                    job.is_over = True  # the slower one is cancelled, and its lease ends
                    job.lease.__exit__(None, None, None)
                self.destination.first_token_times.record(self.now - arrived)
                if is_counted:
                    self.outcome.ttft.append(self.now - arrived)

            def send(tried: list[str]) -> list[str]:
                picked = self.fleet.pick(self.fleet.table.route("ns/chat"), request, tried=tried)
                assert isinstance(picked, Picked)
                lease = self.fleet.lease(picked.endpoint, tokens, lambda: None)
                jobs.append(Job(tokens, picked.endpoint, lease.__enter__(), answered))
                replica = self.replicas[picked.endpoint.name]
                replica.waiting.append(jobs[-1])
                self._begin(replica)
                return [picked.endpoint.name]

            def hedge() -> None:
                if not jobs[0].is_over and self.destination.retry_budget.spend():
                    self.outcome.hedges += is_counted
                    send(tried)

            delay = self.destination.first_token_times.delay()
            tried = send([])
            if self.hedged and delay is not None:
                self._at(self.now + delay, hedge)

        return act

    def _begin(self, replica: Replica) -> None:
        """Compute the next prompt that is still wanted, if the replica is free."""
        while replica.waiting and replica.waiting[0].is_over:
            replica.waiting.popleft()
        if replica.is_busy or not replica.waiting:
            return
        replica.is_busy = True
        job = replica.waiting.popleft()
        replica.computed_tokens += job.tokens
        start = max(self.now, replica.stalled_until)

        def end() -> None:
            if self.now < replica.stalled_until:  # it stalled in the middle
                self._at(replica.stalled_until, end)
                return
            replica.is_busy = False
            if not job.is_over:
                job.answer(job)
            self._begin(replica)

        self._at(start + job.tokens / PREFILL_TOKENS_PER_SECOND, end)

    def _stall(self, replica: Replica) -> Callable[[], None]:
        def act() -> None:
            replica.stalled_until = self.now + STALL_SECONDS

        return act


def simulate(
    seconds_between_stalls: float, *, hedged: bool, requests: int = REQUESTS, warm_up: int = WARM_UP
) -> Outcome:
    """One run; the same requests and stalls with hedging and without."""
    return Simulation(seconds_between_stalls, hedged=hedged).run(requests, warm_up)


def measure() -> Section:
    """The gain at each rate of stalls, and what it costs."""
    figures = []
    for name, seconds in STALLS.items():
        base, hedged = (simulate(seconds, hedged=on) for on in (False, True))
        own, peer = Percentiles.of(hedged.ttft), Percentiles.of(base.ttft)
        for percentile in ("p50", "p95", "p99"):
            mine, other = getattr(own, percentile), getattr(peer, percentile)
            note = f"without {other * 1e3:.1f}: ÷ {mine / other:.2f}"
            figures.append(Figure(f"{name}: {percentile} TTFT, hedged", mine * 1e3, "ms", note))
        worst, before = (sorted(one.ttft)[-len(one.ttft) // 1000] for one in (hedged, base))
        note = f"without {before * 1e3:.1f}: ÷ {worst / before:.2f}"
        figures.append(Figure(f"{name}: p99.9 TTFT, hedged", worst * 1e3, "ms", note))
        share = 100 * hedged.hedges / len(hedged.ttft)
        more = 100 * (hedged.computed_tokens / base.computed_tokens - 1)
        figures.append(Figure(f"{name}: requests hedged", share, "%", f"{more:.1f} % more prefill"))
    return Section(f"Hedged first token: {REPLICAS} simulated replicas behind the gateway's own picker", tuple(figures))
