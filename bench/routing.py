"""Benchmark of routing: prefix affinity against round robin and least load, with the gateway's own code, simulated.

Two gateways that share nothing (two real `Fleet`s) route to 3 and to 8 simulated replicas in virtual time. The cost
model of a replica: one prefill at a time at 8,000 tokens/s for what is not in its cache (an LRU of whole blocks), then
decoding beside the others at 20 ms a token and 0.5 ms more for each running request; `bench.vllm_routing` measures
these rates of vLLM. Requests arrive as a Poisson process that would keep the replicas busy with prefill for 80 % of the
time if nothing were cached. The figures are of this model: they compare strategies, and promise no time on a GPU.
"""

import heapq
import random
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count

from bench.figures import Figure, Section, seconds_each
from bench.plan import Percentiles
from slipway_api.inference_service import RoutingStrategy
from slipway_gateway.fleet import Fleet, Lease
from slipway_gateway.picker.endpoints import Endpoint, Service
from slipway_gateway.picker.pick import Picked
from slipway_gateway.picker.prefix import TOKENS_OF_BLOCK, PrefixIndex, block_hashes
from slipway_gateway.picker.scorers import RoutingRequest
from slipway_gateway.request_body import OUTPUT_WEIGHT

CACHE_TOKENS = 60_000  # of one replica: 60 system prompts, or 40 conversations
UTILISATION = 0.8  # of prefill, without any cache
REQUESTS = 6000
WARM_UP = 1000  # not counted: the caches fill
GATEWAYS = 2
BYTES_PER_TOKEN = 4


@dataclass(frozen=True)
class Rates:
    """How fast one replica computes."""

    prefill_tokens_per_second: float = 8000.0
    itl_seconds: float = 0.020
    itl_seconds_per_request: float = 0.0005  # more, for each running request


ASSUMED = Rates()


@dataclass(frozen=True)
class Arrival:
    """One request of a mix."""

    text: bytes
    output_tokens: int
    session: str = ""

    @property
    def prompt_tokens(self) -> int:
        return len(self.text) // BYTES_PER_TOKEN


@dataclass
class Replica:
    """A replica by the cost model."""

    prefill_free_at: float = 0.0
    running: int = 0
    waiting: int = 0
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    evicted: list[int] = field(default_factory=list)  # by the last request

    def cached_tokens(self, blocks: tuple[int, ...]) -> int:
        """Tokens of the prompt that are in the cache; the prompt is in it from now on."""
        matched = 0
        while matched < len(blocks) and blocks[matched] in self.cache:
            matched += 1
        for block in reversed(blocks):
            self.cache[block] = None
            self.cache.move_to_end(block)
        self.evicted = []
        while len(self.cache) > CACHE_TOKENS // TOKENS_OF_BLOCK:
            self.evicted.append(self.cache.popitem(last=False)[0])
        return matched * TOKENS_OF_BLOCK


@dataclass
class Outcome:
    """The results of one run of a mix."""

    ttft: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    per_replica: dict[str, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def shared_prefixes(chance: random.Random) -> Iterator[Arrival]:
    """400 applications with a system prompt of 1,000 tokens each, of which few are popular; every question is new."""
    prompts = [chance.randbytes(1000 * BYTES_PER_TOKEN) for _ in range(400)]
    weights = [1 / (rank + 1) ** 0.8 for rank in range(len(prompts))]
    while True:
        (prompt,) = chance.choices(prompts, weights)
        yield Arrival(prompt + chance.randbytes(chance.randint(50, 300) * BYTES_PER_TOKEN), chance.randint(20, 200))


def conversations(chance: random.Random) -> Iterator[Arrival]:
    """150 conversations at once, of six turns each, that share a system prompt of 500 tokens."""
    system = chance.randbytes(500 * BYTES_PER_TOKEN)
    numbers = count()

    def begin() -> tuple[str, list[bytes]]:
        return f"session-{next(numbers)}", [system]

    running = [begin() for _ in range(150)]
    while True:
        index = chance.randrange(len(running))
        session, texts = running[index]
        texts.append(chance.randbytes(chance.randint(50, 200) * BYTES_PER_TOKEN))
        output = chance.randint(50, 300)
        yield Arrival(b"".join(texts), output, session)
        texts.append(chance.randbytes(output * BYTES_PER_TOKEN))
        if len(texts) >= 13:
            running[index] = begin()


MIXES: dict[str, Callable[[random.Random], Iterator[Arrival]]] = {
    "shared prefixes": shared_prefixes,
    "conversations": conversations,
}


class Simulation:
    """Simulates replicas that get the requests of a mix by one routing strategy."""

    def __init__(
        self,
        strategy: RoutingStrategy,
        replicas: int,
        *,
        with_sessions: bool = False,
        kv_events: bool = False,
        rates: Rates = ASSUMED,
    ) -> None:
        """`kv_events`: both gateways are told at once what a replica stores and evicts."""
        self.now = 0.0
        self.kv_events = kv_events
        self.rates = rates
        self.replicas = {f"ns/p{number}": Replica() for number in range(replicas)}
        self.chance = random.Random(7)
        self.with_sessions = with_sessions
        self.fleets = [Fleet(clock=lambda: self.now, draw=random.Random(number).random) for number in range(GATEWAYS)]
        for fleet in self.fleets:
            fleet.set_service("ns/chat", Service("ns/chat", "chat", strategy=strategy))
            for name in self.replicas:
                fleet.set_endpoint(name, Endpoint(name, "ns/chat", "r1", "http://0"))
        self.outcome = Outcome(per_replica=dict.fromkeys(self.replicas, 0))
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def run(self, arrivals: Iterator[Arrival], requests: int, warm_up: int) -> Outcome:
        """Serve `requests` and return what they met after the first `warm_up`."""
        drawn = [next(arrivals) for _ in range(requests)]
        mean = sum(arrival.prompt_tokens for arrival in drawn) / len(drawn)
        rate = UTILISATION * len(self.replicas) * self.rates.prefill_tokens_per_second / mean
        at = 0.0
        for number, arrival in enumerate(drawn):
            at += self.chance.expovariate(rate)
            self._at(at, self._arrive(arrival, is_counted=number >= warm_up))
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()
        return self.outcome

    def _at(self, moment: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._numbers), act))

    def _arrive(self, arrival: Arrival, *, is_counted: bool) -> Callable[[], None]:
        def act() -> None:
            fleet = self.chance.choice(self.fleets)
            cost = arrival.prompt_tokens + arrival.output_tokens * OUTPUT_WEIGHT
            blocks = block_hashes([arrival.text], "", "chat")
            request = RoutingRequest("chat", cost=cost, prompt_tokens=arrival.prompt_tokens, blocks=blocks)
            if self.with_sessions:
                request = replace(request, session=arrival.session)
            picked = fleet.pick(fleet.table.route("ns/chat"), request)
            assert isinstance(picked, Picked)
            saved = picked.matched_tokens
            lease = fleet.lease(picked.endpoint, cost - saved, lambda: None)
            lease.__enter__()
            replica = self.replicas[picked.endpoint.name]
            cached = replica.cached_tokens(blocks)
            if self.kv_events:
                for each in self.fleets:
                    each.prefixes.discard(picked.endpoint.name, replica.evicted)
                    each.prefixes.add(picked.endpoint.name, blocks)
            begin = max(self.now, replica.prefill_free_at)
            computed = arrival.prompt_tokens - cached
            replica.prefill_free_at = begin + computed / self.rates.prefill_tokens_per_second
            replica.waiting += 1
            first = replica.prefill_free_at + self.rates.itl_seconds
            if is_counted:
                self.outcome.ttft.append(first - self.now)
                self.outcome.prompt_tokens += arrival.prompt_tokens
                self.outcome.cached_tokens += cached
                self.outcome.per_replica[picked.endpoint.name] += 1
            self._at(
                first, self._answer(fleet, picked.endpoint, lease, replica, arrival, arrival.prompt_tokens - saved)
            )

        return act

    def _answer(
        self, fleet: Fleet, endpoint: Endpoint, lease: Lease, replica: Replica, arrival: Arrival, computed: int
    ) -> Callable[[], None]:
        def end() -> None:
            replica.running -= 1
            lease.__exit__(None, None, None)

        def act() -> None:
            replica.waiting -= 1
            replica.running += 1
            lease.answered()
            lease.progress(computed)
            fleet.record_load(
                endpoint,
                f"TEXT named_metrics.num_requests_running={replica.running}, "
                f"named_metrics.num_requests_waiting={replica.waiting}",
            )
            itl = self.rates.itl_seconds + replica.running * self.rates.itl_seconds_per_request
            self._at(self.now + arrival.output_tokens * itl, end)

        return act


def simulate(
    mix: str,
    strategy: RoutingStrategy,
    replicas: int,
    *,
    with_sessions: bool = False,
    kv_events: bool = False,
    requests: int = REQUESTS,
    warm_up: int = WARM_UP,
    rates: Rates = ASSUMED,
) -> Outcome:
    """Run one case; every strategy gets the same requests."""
    simulation = Simulation(strategy, replicas, with_sessions=with_sessions, kv_events=kv_events, rates=rates)
    return simulation.run(MIXES[mix](random.Random(1)), requests, warm_up)


def measure() -> Section:
    """All figures of routing."""
    figures = []
    for mix in MIXES:
        for replicas in (3, 8):
            where = f"{mix}, {replicas} replicas"
            base = simulate(mix, RoutingStrategy.ROUND_ROBIN, replicas)
            for strategy in RoutingStrategy:
                outcome = simulate(mix, strategy, replicas)
                figures += _figures(f"{where}, {strategy.value}", outcome, base)
            outcome = simulate(mix, RoutingStrategy.PREFIX_CACHE, replicas, kv_events=True)
            figures += _figures(f"{where}, PrefixCache with KV events", outcome, base)
            if mix == "conversations":
                outcome = simulate(mix, RoutingStrategy.PREFIX_CACHE, replicas, with_sessions=True)
                figures += _figures(f"{where}, PrefixCache with session ids", outcome, base)
    return Section("Routing: simulated replicas behind the gateway's own picker", (*figures, *_cpu_figures()))


def _cpu_figures() -> Iterator[Figure]:
    """The CPU time of the parts of a pick, and the memory of its index."""
    text = random.Random(0).randbytes(64 * 1024)
    for size in (10, 64):
        seconds = seconds_each(lambda size=size: block_hashes([text[: size * 1024]]))
        yield Figure(f"hashing a prompt of {size} KiB", seconds * 1e6, "µs", "no more than 64 KiB are hashed")
    for replicas in (8, 50, 200):
        simulation = Simulation(RoutingStrategy.PREFIX_CACHE, replicas)
        fleet = simulation.fleets[0]
        route = fleet.table.resolve("chat")
        assert route is not None
        request = RoutingRequest("chat", blocks=block_hashes([text[:4096]]), prompt_tokens=1024, prompt_bytes=4096)
        seconds = seconds_each(lambda fleet=fleet, route=route, request=request: fleet.pick(route, request))
        yield Figure(f"a pick among {replicas} replicas", seconds * 1e6, "µs", "a prompt of 16 blocks")
    index, blocks = PrefixIndex(), 8192
    tracemalloc.start()
    index.add("ns/p0", [random.Random(number).getrandbits(64) for number in range(blocks)])
    yield Figure("memory of a block in the index", tracemalloc.get_traced_memory()[0] / blocks, "B", f"of {blocks:,}")
    tracemalloc.stop()


def _figures(name: str, outcome: Outcome, base: Outcome) -> list[Figure]:
    mean, base_mean = sum(outcome.ttft) / len(outcome.ttft), sum(base.ttft) / len(base.ttft)
    own, peer = Percentiles.of(outcome.ttft), Percentiles.of(base.ttft)
    busiest = max(outcome.per_replica.values()) * len(outcome.per_replica) / sum(outcome.per_replica.values())
    return [
        Figure(f"{name}: hit rate", outcome.hit_rate * 100, "%", f"{base.hit_rate * 100:.1f} round robin"),
        Figure(f"{name}: mean TTFT", mean * 1e3, "ms", f"÷ round robin {mean / base_mean:.2f}"),
        Figure(f"{name}: p99 TTFT", own.p99 * 1e3, "ms", f"÷ round robin {own.p99 / peer.p99:.2f}"),
        Figure(f"{name}: p99 ÷ p50", own.p99 / own.p50, "×", f"busiest replica: {busiest:.2f} of its share"),
    ]
