"""Benchmark of the gateway's aims: latency added at 100 requests a second, and 1,000 streams at once on one core.

Peers in the same run: a TCP pass-through on bare asyncio, the bare aiohttp proxy, the gateway on the standard event
loop, and nginx and Envoy (one worker each) where their packages can be had.
"""

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

import aiohttp
import msgspec
import uvloop

from bench.arrivals import poisson
from bench.envoy import an_envoy
from bench.figures import Figure, Section
from bench.nginx import an_nginx
from bench.packages import NoProgramError
from bench.plan import Percentiles
from bench.servers import MODEL_NAME, Server, ServerFailedError, a_gateway, a_module

RATE = 100.0  # requests a second
SECONDS = 10.0
STREAMS = 1000
INTERVAL_MS = 200  # 5 chunks a second and stream: the clients and the upstream have one core for themselves
CHUNKS = 50
ROUNDS = 2
AIM_P50_MS, AIM_P99_MS = 1.0, 5.0
MESSAGES = [{"role": "user", "content": "Tell me a story."}]


@dataclass
class Samples:
    """The samples of one path, over all rounds."""

    version: str = ""  # of a peer's program
    short: list[float] = field(default_factory=list)  # seconds of a request that is not streamed
    delay: list[float] = field(default_factory=list)  # seconds from written to read, of each chunk
    cpu: float = 0.0  # of the server's process, for the streams
    failed: int = 0

    @property
    def cpu_per_chunk(self) -> float:
        """In microseconds."""
        return self.cpu / max(1, len(self.delay)) * 1e6


def measure(rounds: int = ROUNDS, streams: int = STREAMS, seconds: float = SECONDS) -> Section:
    """All figures."""
    with ExitStack() as stack:
        upstream = stack.enter_context(a_module("upstream"))
        route = (MODEL_NAME, upstream.url)
        limits = {"SLIPWAY_MAX_CONNECTIONS_PER_CLIENT": str(4 * streams)}
        starts: dict[str, Callable[[], AbstractContextManager[Server]]] = {
            "gateway": lambda: a_gateway(route, environment=limits),
            "gateway on asyncio": lambda: a_gateway(route, environment=limits | {"SLIPWAY_EVENT_LOOP": "asyncio"}),
            "bare asyncio": lambda: a_module("bare_pipe", "--upstream", upstream.url),
            "bare aiohttp": lambda: a_module("bare_proxy", "--upstream", upstream.url),
            "nginx": lambda: an_nginx(upstream.url, "proxy_buffering off"),
            "Envoy": lambda: an_envoy(upstream.url),
        }
        ways = {"direct": (upstream, Samples())}
        for name, start in starts.items():
            try:
                server = stack.enter_context(start())
                ways[name] = (server, Samples(server.version))
            except (NoProgramError, ServerFailedError) as missing:
                print(f"without {name}: {missing}")
        for _ in range(rounds):
            for server, samples in ways.values():
                uvloop.run(_at_a_rate(server, samples, seconds))
                uvloop.run(_many_streams(server, samples, streams))
    return _section({name: samples for name, (_, samples) in ways.items()}, rounds, streams, seconds)


async def _at_a_rate(server: Server, samples: Samples, seconds: float) -> None:
    """Short requests, RATE a second, whether the last ones are answered or not."""
    draw, end = random.Random(1), time.monotonic() + seconds
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as requests:

        async def ask() -> None:
            started = time.monotonic()
            try:
                async with session.post(
                    f"{server.url}/v1/chat/completions", json={"model": MODEL_NAME, "messages": MESSAGES}
                ) as response:
                    response.raise_for_status()
                    await response.read()
                samples.short.append(time.monotonic() - started)
            except aiohttp.ClientError:
                samples.failed += 1

        for pause in poisson(RATE, draw):
            if time.monotonic() >= end:
                break
            requests.create_task(ask())
            await asyncio.sleep(pause)


async def _many_streams(server: Server, samples: Samples, streams: int) -> None:
    """Streams that all run at once."""
    body = {"model": MODEL_NAME, "messages": MESSAGES, "stream": True, "max_tokens": CHUNKS, "interval_ms": INTERVAL_MS}
    timeout = aiohttp.ClientTimeout(total=120)

    async def read(session: aiohttp.ClientSession, number: int) -> None:
        await asyncio.sleep(number * 0.002)
        buffer = b""
        try:
            async with session.post(f"{server.url}/v1/chat/completions", json=body) as response:
                response.raise_for_status()
                async for piece in response.content.iter_any():
                    now = time.monotonic_ns()
                    *events, buffer = (buffer + piece).split(b"\n\n")
                    for event in events:
                        if event != b"data: [DONE]" and (choices := msgspec.json.decode(event[6:])["choices"]):
                            samples.delay.append((now - int(choices[0]["delta"]["content"])) / 1e9)
        except aiohttp.ClientError:
            samples.failed += 1

    before = server.cpu_seconds()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        await asyncio.gather(*(read(session, number) for number in range(streams)))
    samples.cpu += server.cpu_seconds() - before


def _section(ways: dict[str, Samples], rounds: int, streams: int, seconds: float) -> Section:
    direct, gateway = ways.pop("direct"), ways["gateway"]
    short, delay = Percentiles.of(direct.short), Percentiles.of(direct.delay)
    at_rate = f"{RATE:.0f} requests/s, {rounds} × {seconds:.0f} s"
    at_once = f"{streams:,} streams × {1000 / INTERVAL_MS:.0f} chunks/s"
    figures = []
    for name, samples in ways.items():
        own, chunk = Percentiles.of(samples.short), Percentiles.of(samples.delay)
        aims = (f"; aim {AIM_P50_MS:.0f}", f"; aim {AIM_P99_MS:.0f}") if samples is gateway else ("", "")
        figures += [
            Figure(f"{name}: request, added at p50", (own.p50 - short.p50) * 1e3, "ms", at_rate + aims[0]),
            Figure(f"{name}: request, added at p99", (own.p99 - short.p99) * 1e3, "ms", at_rate + aims[1]),
            Figure(f"{name}: chunk, added at p99", (chunk.p99 - delay.p99) * 1e3, "ms", at_once),
            Figure(f"{name}: CPU per chunk", samples.cpu_per_chunk, "µs", at_once),
            Figure(f"{name}: failed", samples.failed, "", f"of {rounds * streams:,} streams, and requests"),
        ]
    figures.append(Figure("gateway: chunks a second of one core", 1e6 / gateway.cpu_per_chunk, "", "1 ÷ CPU per chunk"))
    for name, samples in ways.items():
        if samples is not gateway:
            share = samples.cpu_per_chunk / gateway.cpu_per_chunk
            figures.append(Figure(f"gateway's chunks a second ÷ {name}'s", share, "×", samples.version))
    return Section("Capacity of the gateway: 100 requests a second, and 1,000 streams on one core", tuple(figures))
