"""What the gateway adds per chunk and per request: delay and CPU, against the same upstream called directly.

Direct and through the gateway take turns in one run, so that a busy neighbour hits both.
"""

import asyncio
import time
from dataclasses import dataclass, field

import aiohttp
import msgspec
import uvloop

from bench.figures import Figure, Section
from bench.load import Percentiles
from bench.servers import MODEL_NAME, Server, a_gateway, an_upstream

STREAMS = 100
INTERVAL_MS = 50  # 20 chunks a second, as a comfortable reader gets
CHUNKS = 100  # per stream and round: 5 s
REQUESTS = 400  # short ones, eight at a time
ROUNDS = 3


@dataclass
class Samples:
    """What one way brought, over all rounds."""

    first: list[float] = field(default_factory=list)  # seconds to the first event
    delay: list[float] = field(default_factory=list)  # seconds from written to read, per event
    short: list[float] = field(default_factory=list)  # seconds of a request that is not streamed
    cpu_streams: float = 0.0  # of the gateway's process
    cpu_requests: float = 0.0


def measure(rounds: int = ROUNDS, streams: int = STREAMS) -> Section:
    """All figures of the gateway."""
    with an_upstream() as upstream, a_gateway((MODEL_NAME, upstream.url)) as gateway:
        direct, through = Samples(), Samples()
        for _ in range(rounds):
            for samples, server in ((direct, upstream), (through, gateway)):
                uvloop.run(_round(samples, server, gateway, streams))
        return _section(direct, through, gateway, rounds, streams)


async def _round(samples: Samples, server: Server, gateway: Server, streams: int) -> None:
    url = f"{server.url}/v1/chat/completions"
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        before = gateway.cpu_seconds()
        await asyncio.gather(*(_stream(session, url, samples) for _ in range(streams)))
        between = gateway.cpu_seconds()
        await asyncio.gather(*(_requests(session, url, samples, REQUESTS // 8) for _ in range(8)))
        samples.cpu_streams += between - before
        samples.cpu_requests += gateway.cpu_seconds() - between


async def _stream(session: aiohttp.ClientSession, url: str, samples: Samples) -> None:
    body = {"model": MODEL_NAME, "stream": True, "max_tokens": CHUNKS, "interval_ms": INTERVAL_MS}
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
                if event != b"data: [DONE]":
                    samples.delay.append((now - msgspec.json.decode(event[6:])["at"]) / 1e9)


async def _requests(session: aiohttp.ClientSession, url: str, samples: Samples, count: int) -> None:
    for _ in range(count):
        started = time.monotonic()
        async with session.post(url, json={"model": MODEL_NAME, "messages": []}) as response:
            response.raise_for_status()
            await response.read()
        samples.short.append(time.monotonic() - started)


def _section(direct: Samples, through: Samples, gateway: Server, rounds: int, streams: int) -> Section:
    chunks, requests = rounds * streams * (CHUNKS + 1), rounds * REQUESTS
    how = f"{streams} streams × {1000 // INTERVAL_MS} chunks/s"
    figures = [
        Figure("gateway CPU per chunk", through.cpu_streams / chunks * 1e6, "µs", how),
        Figure("gateway CPU per request", through.cpu_requests / requests * 1e6, "µs", "8 at a time, not streamed"),
        Figure("gateway memory", gateway.rss_bytes() / 2**20, "MiB", f"after {chunks:,} chunks"),
    ]
    for name, mine, theirs in (
        ("chunk delay", through.delay, direct.delay),
        ("short request", through.short, direct.short),
    ):
        a, b = Percentiles.of(mine), Percentiles.of(theirs)
        figures += [
            Figure(f"{name}, added at p50", (a.p50 - b.p50) * 1e3, "ms", f"{b.p50 * 1e3:.2f} direct"),
            Figure(f"{name}, added at p99", (a.p99 - b.p99) * 1e3, "ms", f"{b.p99 * 1e3:.2f} direct"),
            Figure(f"{name}, p50 through ÷ direct", a.p50 / b.p50 if b.p50 else 0.0, "×", "same run"),
        ]
    return Section("Gateway: what it adds to an upstream that computes nothing", tuple(figures))
