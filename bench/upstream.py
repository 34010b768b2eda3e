"""A server that streams on schedule and computes nothing, to measure the cost of the proxy in front of it.

    POST /v1/chat/completions {"stream": true, "max_tokens": 100, "interval_ms": 50}

The text of every event is the time at which it was written (nanoseconds of this machine's monotonic clock); with its
padding it is as long as a real one.
Where a gateway asks for marks (`slipway_api.stream_marks`), each event has one behind it, as a runtime's has.
"""

import asyncio
import random
import time

import msgspec
from aiohttp import web

from bench.peer_main import Addresses, serve_until_killed
from slipway_api.names import HEADER_TOKEN_IDS
from slipway_api.stream_marks import tokens_mark

PADDING = "x" * 170  # id, object, created, model, fingerprint: what else a real event carries


async def answer(request: web.Request) -> web.StreamResponse:
    """Stream, or answer at once."""
    body = msgspec.json.decode(await request.read())
    if not body.get("stream"):
        message = {"role": "assistant", "content": "word"}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        return web.json_response({"id": "bench", "object": "chat.completion", "created": 1, "choices": choices})
    headers = {"Content-Type": "text/event-stream"}
    is_marked = HEADER_TOKEN_IDS in request.headers
    if is_marked:
        headers[HEADER_TOKEN_IDS] = "bench"
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    interval = body.get("interval_ms", 50) / 1000
    await asyncio.sleep(random.random() * interval)  # streams of real users do not tick together
    due = time.monotonic()
    for number in range(body.get("max_tokens", 100)):
        await response.write(_event() + (tokens_mark(0, (number,), ended=False) if is_marked else b""))
        due += interval
        await asyncio.sleep(max(0.0, due - time.monotonic()))
    await response.write(b"data: [DONE]\n\n")
    return response


def _event() -> bytes:
    event = {"padding": PADDING, "choices": [{"index": 0, "delta": {"content": str(time.monotonic_ns())}}]}
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


async def _ready(request: web.Request) -> web.Response:
    return web.Response()


async def serve(at: Addresses) -> None:
    """Begin to serve."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_get("/ready", _ready)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    for number in (at.port, at.admin_port):
        await web.TCPSite(runner, at.host, number, backlog=1024).start()


if __name__ == "__main__":
    serve_until_killed("upstream", serve)
