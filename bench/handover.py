"""Benchmark of stream handover: what a gateway needs for each open stream and chunk, with handover and without."""

import asyncio

import aiohttp
import uvloop

from bench.figures import Figure, Section, seconds_each
from bench.servers import MODEL_NAME, Server, a_gateway, a_module
from slipway_api.stream_marks import tokens_mark
from slipway_gateway.sse import Events, EventSplitter, MarkedEvents

STREAMS = 1000
PROMPT_BYTES = 4096
CHUNKS = 20  # one a second


def measure(streams: int = STREAMS) -> Section:
    """Memory of a stream, and CPU of a chunk, with and without handover."""
    held = {}
    for name, environment in (("on", {}), ("off", {"SLIPWAY_HANDOVER_SECONDS": "0"})):
        with (
            a_module("upstream") as upstream,
            a_gateway((MODEL_NAME, upstream.url), environment=environment) as gateway,
        ):
            before = gateway.rss_bytes()
            during, counted = uvloop.run(_hold(gateway, streams))
            held[name] = (during - before) / streams, counted / streams
    how = f"{streams:,} streams, prompts of {PROMPT_BYTES:,} bytes, {CHUNKS} tokens"
    return Section(
        "Handover: memory and CPU of open streams in the gateway",
        (
            Figure("memory of a stream, handover on", held["on"][0] / 1024, "KiB", how),
            Figure("memory of a stream, handover off", held["off"][0] / 1024, "KiB", "the same, a gateway of its own"),
            Figure("counted for a handover, a stream", held["on"][1] / 1024, "KiB", "slipway_gateway_handover_bytes"),
            *_chunk_figures(),
        ),
    )


def _chunk_figures() -> list[Figure]:
    """The CPU time of cutting a chunk of one event, and of taking its mark out as well."""
    event = b'data: {"id":"bench","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"word"}}]}'

    def seconds(events: Events, chunk: bytes) -> float:
        return seconds_each(lambda: events.feed(chunk), calls=10_000)

    plain = seconds(EventSplitter(), event + b"\n\n")
    marked = seconds(MarkedEvents(1, lambda *_: None), event + b"\n\n" + tokens_mark(0, (1234,), ended=False))
    return [
        Figure("cutting events, a chunk", plain * 1e6, "µs", "handover off"),
        Figure("cutting events and taking marks out, a chunk", marked * 1e6, "µs", f"{len(event)} bytes"),
    ]


async def _hold(gateway: Server, streams: int) -> tuple[int, float]:
    """Resident and counted memory shortly before the streams end."""
    body = {"model": MODEL_NAME, "stream": True, "max_tokens": CHUNKS, "interval_ms": 1000}
    body["messages"] = [{"role": "user", "content": "x" * PROMPT_BYTES}]
    timeout = aiohttp.ClientTimeout(total=120)
    begun = 0

    async def read(session: aiohttp.ClientSession) -> None:
        nonlocal begun
        async with session.post(f"{gateway.url}/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            await response.content.readany()
            begun += 1
            while await response.content.readany():
                pass

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        running = []
        for _ in range(streams):
            running.append(asyncio.create_task(read(session)))
            await asyncio.sleep(0.002)
        while begun < streams:  # noqa: ASYNC110  counted by the readers
            await asyncio.sleep(0.05)
        await asyncio.sleep(CHUNKS / 2)
        during = gateway.rss_bytes()
        async with session.get(f"{gateway.admin_url}/metrics") as response:
            lines = (await response.text()).splitlines()
        counted = next(float(line.split()[1]) for line in lines if line.startswith("slipway_gateway_handover_bytes "))
        await asyncio.gather(*running)
    return during, counted
