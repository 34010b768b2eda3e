"""Benchmark of the gateway: delay and CPU that it adds per chunk and per request, and the cost of a fleet change.

Peers are `bench.bare_proxy`, the least that passes a stream on with aiohttp, `bench.bare_pipe`, which passes TCP on
without HTTP and is the floor of any Python on this machine, and if their packages can be had nginx and Envoy, proxies
that know nothing of models, and LiteLLM's proxy. All alternate in one run, so that a busy neighbour hits all of them.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

import aiohttp
import msgspec
import uvloop

from bench.envoy import an_envoy
from bench.figures import Figure, Section
from bench.litellm import a_litellm
from bench.nginx import an_nginx
from bench.packages import NoProgramError
from bench.plan import Percentiles
from bench.servers import MODEL_NAME, Server, ServerFailedError, a_gateway, a_module
from slipway_gateway.picker.endpoints import Endpoint, Service
from slipway_gateway.resolve import RoutingTable

STREAMS = 100
INTERVAL_MS = 50  # 20 chunks a second, as a comfortable reader gets
CHUNKS = 100  # per stream and round: 5 s
REQUESTS = 400  # short ones, eight at a time
ROUNDS = 3
MESSAGES = [{"role": "user", "content": "Tell me a story."}]


PEERS: dict[str, Callable[[str], AbstractContextManager[Server]]] = {
    "TCP pass-through": lambda upstream: a_module("bare_pipe", "--upstream", upstream),
    "nginx": lambda upstream: an_nginx(upstream, "proxy_buffering off"),
    "Envoy": an_envoy,
    "LiteLLM": a_litellm,
}


@dataclass
class Samples:
    """The samples of one path (direct, proxy or gateway), over all rounds."""

    version: str = ""  # of a peer's program
    first: list[float] = field(default_factory=list)  # seconds to the first event
    delay: list[float] = field(default_factory=list)  # seconds from written to read, per event
    short: list[float] = field(default_factory=list)  # seconds of a request that is not streamed
    cpu_streams: float = 0.0  # of the server's process
    cpu_requests: float = 0.0


def measure(rounds: int = ROUNDS, streams: int = STREAMS) -> Section:
    """All figures of the gateway."""
    with (
        a_module("upstream") as upstream,
        a_module("bare_proxy", "--upstream", upstream.url) as bare,
        a_gateway((MODEL_NAME, upstream.url)) as gateway,
        ExitStack() as stack,
    ):
        ways = {"direct": (upstream, Samples()), "bare": (bare, Samples()), "through": (gateway, Samples())}
        for name, start in PEERS.items():
            try:
                server = stack.enter_context(start(upstream.url))
                ways[name] = (server, Samples(server.version))
            except (NoProgramError, ServerFailedError) as missing:
                print(f"without {name}: {missing}")
        for _ in range(rounds):
            for server, samples in ways.values():
                uvloop.run(_round(samples, server, streams))
        samples_of = {way: samples for way, (_, samples) in ways.items()}
        peers = {name: samples_of.pop(name) for name in PEERS if name in samples_of}
        return _section(**samples_of, peers=peers, gateway=gateway, rounds=rounds, streams=streams)


async def _round(samples: Samples, server: Server, streams: int) -> None:
    url = f"{server.url}/v1/chat/completions"
    timeout = aiohttp.ClientTimeout(total=120)

    def session() -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)

    # A session for each part: a slow peer may have closed connections that were idle while its last streams ended.
    before = server.cpu_seconds()
    async with session() as streaming:
        await asyncio.gather(*(_stream(streaming, url, samples) for _ in range(streams)))
    between = server.cpu_seconds()
    async with session() as asking:
        await asyncio.gather(*(_requests(asking, url, samples, REQUESTS // 8) for _ in range(8)))
    samples.cpu_streams += between - before
    samples.cpu_requests += server.cpu_seconds() - between


async def _stream(session: aiohttp.ClientSession, url: str, samples: Samples) -> None:
    body = {"model": MODEL_NAME, "messages": MESSAGES, "stream": True, "max_tokens": CHUNKS, "interval_ms": INTERVAL_MS}
    buffer, first, started = b"", True, time.monotonic()
    async with session.post(url, json=body) as response:
        response.raise_for_status()
        async for chunk in response.content.iter_any():
            now = time.monotonic_ns()
            *events, buffer = (buffer + chunk).split(b"\n\n")
            if first:
                samples.first.append(time.monotonic() - started)
                first = False
            for event in events:
                if event != b"data: [DONE]" and (written := _written_at(event)):
                    samples.delay.append((now - written) / 1e9)


def _written_at(event: bytes) -> int:
    """When the upstream wrote the event; 0: a proxy made it, and it has no text."""
    choices = msgspec.json.decode(event[6:]).get("choices")
    return int(choices[0]["delta"].get("content") or 0) if choices else 0


async def _requests(session: aiohttp.ClientSession, url: str, samples: Samples, count: int) -> None:
    for _ in range(count):
        started = time.monotonic()
        async with session.post(url, json={"model": MODEL_NAME, "messages": MESSAGES}) as response:
            response.raise_for_status()
            await response.read()
        samples.short.append(time.monotonic() - started)


def _section(
    *,
    direct: Samples,
    bare: Samples,
    through: Samples,
    gateway: Server,
    rounds: int,
    streams: int,
    peers: Mapping[str, Samples],
) -> Section:
    chunks, requests = rounds * streams * (CHUNKS + 1), rounds * REQUESTS
    how = f"{streams} streams × {1000 // INTERVAL_MS} chunks/s"
    figures = [
        Figure("CPU per chunk", through.cpu_streams / chunks * 1e6, "µs", how),
        Figure("CPU per chunk ÷ bare proxy", through.cpu_streams / bare.cpu_streams, "×", "bench.bare_proxy, same run"),
        Figure("CPU per request", through.cpu_requests / requests * 1e6, "µs", "8 at a time, not streamed"),
        Figure("CPU per request ÷ bare proxy", through.cpu_requests / bare.cpu_requests, "×", "same run"),
        Figure("memory", gateway.rss_bytes() / 2**20, "MiB", f"after {chunks:,} chunks"),
    ]
    compared = [
        ("chunk delay", through.delay, direct.delay),
        ("chunk delay of the bare proxy", bare.delay, direct.delay),
        ("short request", through.short, direct.short),
    ]
    for peer, its in peers.items():
        figures += [
            Figure(f"CPU per chunk of {peer}", its.cpu_streams / chunks * 1e6, "µs", its.version),
            Figure(f"CPU per chunk ÷ {peer}", through.cpu_streams / max(its.cpu_streams, 0.01), "×", "same run"),
            Figure(f"CPU per request ÷ {peer}", through.cpu_requests / max(its.cpu_requests, 0.01), "×", "same run"),
        ]
        compared += [
            (f"chunk delay of {peer}", its.delay, direct.delay),
            (f"short request of {peer}", its.short, direct.short),
        ]
    for name, mine, theirs in compared:
        a, b = Percentiles.of(mine), Percentiles.of(theirs)
        figures += [
            Figure(f"{name}, added at p50", (a.p50 - b.p50) * 1e3, "ms", f"{b.p50 * 1e3:.2f} direct"),
            Figure(f"{name}, added at p99", (a.p99 - b.p99) * 1e3, "ms", f"{b.p99 * 1e3:.2f} direct"),
        ]
    figures += _routing_figures()
    return Section("Gateway: what it adds to an upstream that computes nothing", tuple(figures))


def _routing_figures(services: int = 1000, replicas: int = 10, changes: int = 1000) -> list[Figure]:
    """What a change of one service or pod costs in a large fleet, until the next request of its service is routed."""
    how = f"{services:,} services, {services * replicas:,} pods"
    table, started = RoutingTable(), time.perf_counter()
    for number in range(services):
        key = f"ns/s{number}"
        for replica in range(replicas):
            table.set_endpoint(f"{key}-{replica}", _endpoint(key, replica))
        table.set_service(key, Service(key, f"m{number}"))
    for number in range(services):
        table.resolve(f"m{number}")
    first = time.perf_counter() - started
    built = table.built_routes
    started = time.perf_counter()
    for change in range(changes):
        number = change % services
        key = f"ns/s{number}"
        table.set_service(key, Service(key, f"m{number}", weights={"r1": 1 + change}))
        table.set_endpoint(f"{key}-0", _endpoint(key, 0) if change % 2 else None)
        table.resolve(f"m{number}")
    seconds = time.perf_counter() - started
    return [
        Figure("routing table from nothing", first * 1e3, "ms", how),
        Figure("routing table, a service and a pod change", seconds / changes * 1e6, "µs", how),
        Figure("routes built for each such change", (table.built_routes - built) / changes, "", how),
    ]


def _endpoint(service: str, replica: int) -> Endpoint:
    return Endpoint(f"{service}-{replica}", service, "r1", f"http://10.0.0.{replica}:8000")
