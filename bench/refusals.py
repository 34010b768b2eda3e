"""Benchmark of a refusal: the gateway's CPU time for a request beyond its tenant's rate, by the size of its body.

A flood is refused one request at a time, so this is what a tenant's flood costs the others.
"""

import asyncio
import json
from dataclasses import dataclass

from bench.figures import Figure, Section
from bench.flood import KEYS, PER_MINUTE, a_limited_gateway
from bench.servers import MODEL_NAME, Server, a_runtime

REQUESTS = 4000
CONNECTIONS = 8
PROMPT_BYTES = (500, 30_000, 500_000)


@dataclass(frozen=True)
class Refused:
    """The cost of the refused requests with bodies of one size."""

    prompt_bytes: int
    requests: int
    cpu_seconds: float


def measure(requests: int = REQUESTS) -> Section:
    """CPU time of the gateway per refused request."""
    with a_runtime() as runtime, a_limited_gateway(runtime) as gateway:
        # One at a time, so that it is the rate that refuses from here on, and not the concurrency.
        asyncio.run(_use_connection(gateway, _request(200), PER_MINUTE))
        sizes = [_measure_size(gateway, size, requests // (10 if size > 100_000 else 1)) for size in PROMPT_BYTES]
    figures = [
        Figure(
            f"CPU of a refusal, prompt of {one.prompt_bytes:,} bytes",
            one.cpu_seconds / one.requests * 1e6,
            "µs",
            f"{one.requests} requests, {CONNECTIONS} connections",
        )
        for one in sizes
    ]
    return Section("Refusals: what a request beyond its tenant's rate costs the gateway", tuple(figures))


def _measure_size(gateway: Server, prompt_bytes: int, requests: int) -> Refused:
    before = gateway.cpu_seconds()
    statuses = asyncio.run(_send(gateway, prompt_bytes, requests))
    used = gateway.cpu_seconds() - before
    if set(statuses) != {429}:
        raise RuntimeError(f"not every request was refused: statuses {sorted(set(statuses))}")
    return Refused(prompt_bytes, len(statuses), used)


async def _send(gateway: Server, prompt_bytes: int, requests: int) -> list[int]:
    """Send requests of tenant A, one at a time on each connection; their statuses."""
    message = _request(prompt_bytes)
    answers = await asyncio.gather(
        *(_use_connection(gateway, message, requests // CONNECTIONS) for _ in range(CONNECTIONS))
    )
    return [status for statuses in answers for status in statuses]


async def _use_connection(gateway: Server, message: bytes, requests: int) -> list[int]:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    statuses = []
    for _ in range(requests):
        writer.write(message)
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        statuses.append(int(head.split(b" ", 2)[1]))
        if b"transfer-encoding: chunked" in head:
            await reader.readuntil(b"0\r\n\r\n")
        else:
            await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0]))
    writer.close()
    await writer.wait_closed()
    return statuses


def _request(prompt_bytes: int) -> bytes:
    """One request as it is on the wire; the connection is kept."""
    prompt = {"role": "user", "content": "Once more. " * (prompt_bytes // 11)}
    body = json.dumps({"model": MODEL_NAME, "messages": [prompt], "stream": True, "max_tokens": 1}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer {KEYS['a']}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
