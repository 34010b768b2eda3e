"""Real HTTP servers that behave like runtimes, and misbehave on demand; and a real gateway in front of them.

Nothing here waits for time to pass: a runtime says its next word when the test lets it.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Self

import aiohttp
from aiohttp import web

from slipway_gateway.fleet import static_fleet
from slipway_gateway.gateway import Gateway
from slipway_gateway.settings import GatewaySettings

MODEL = "tiny"
WORDS = ["Once", " upon", " a", " time", "."]

Behaviour = Callable[["Runtime", web.Request], Awaitable[web.StreamResponse]]


class Runtime:
    """One replica. `behaviour` answers every request; what happened is kept for the test to look at."""

    def __init__(
        self,
        behaviour: "Behaviour | None" = None,
        *,
        words: list[str] | None = None,
        revision: str = "r1",
        address: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.behaviour = behaviour or speak
        self.revision = revision
        self.address = address
        self.port = port
        self.words = WORDS if words is None else words
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.allowed = asyncio.Semaphore(10**6)  # words that may be said
        self.said = 0
        self.streaming = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.url = ""
        self._runner: web.AppRunner | None = None

    @property
    def requests(self) -> int:
        """How many requests came."""
        return len(self.bodies)

    def hold(self) -> Self:
        """From now on every word waits for `allow`."""
        self.allowed = asyncio.Semaphore(0)
        return self

    def allow(self, words: int) -> None:
        for _ in range(words):
            self.allowed.release()

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.address, self.port)
        await site.start()
        self.port = site.port
        self.url = f"http://{self.address}:{self.port}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(json.loads(await request.read()))
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        try:
            return await self.behaviour(self, request)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


def chunk(word: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": word}, "finish_reason": finish}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "choices": [choice],
    } | more


def event(body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


async def begin_stream(request: web.Request, **headers: str) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"} | headers)
    await response.prepare(request)
    return response


async def speak(runtime: Runtime, request: web.Request) -> web.StreamResponse:
    """The words as a stream, or whole when no stream was asked for."""
    if not runtime.bodies[-1].get("stream"):
        return await answer_whole(runtime, request)
    response = await begin_stream(request)
    for word in runtime.words:
        await runtime.allowed.acquire()
        await response.write(event(chunk(word)))
        runtime.said += 1
        runtime.streaming.set()
    await runtime.allowed.acquire()
    usage = {"prompt_tokens": 7, "completion_tokens": len(runtime.words), "total_tokens": 7 + len(runtime.words)}
    await response.write(event(chunk("", finish="stop")))
    await response.write(event({**chunk(""), "choices": [], "usage": usage}) + b"data: [DONE]\n\n")
    return response


async def answer_whole(runtime: Runtime, request: web.Request) -> web.StreamResponse:
    await runtime.allowed.acquire()
    message = {"role": "assistant", "content": "".join(runtime.words)}
    return web.json_response(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": MODEL,
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12},
        },
        headers={
            "x-slipway-revision": runtime.revision,
            "x-slipway-tokenizer": "t1",
            "x-secret": "inside",
            "Set-Cookie": "a=b",
        },
    )


async def be_full(runtime: Runtime, request: web.Request) -> web.StreamResponse:
    error = {"message": "The queue is full.", "type": "RateLimitError", "param": None, "code": 429}
    return web.json_response({"error": error}, status=429, headers={"Retry-After": "7", "retry-after-ms": "6500"})


async def be_draining(runtime: Runtime, request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "draining"}}, status=503, headers={"Retry-After": "3"})


async def hang_up(runtime: Runtime, request: web.Request) -> web.StreamResponse:
    """Take the request, then break the connection without a word."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def die_after_two_words(runtime: Runtime, request: web.Request) -> web.StreamResponse:
    """Two whole events and half of a third, then the process is gone."""
    response = await begin_stream(request)
    await response.write(event(chunk("Once")) + event(chunk(" upon")))
    await runtime.allowed.acquire()
    await response.write(event(chunk(" a"))[:25])
    assert request.transport is not None
    request.transport.close()
    return response


async def end_without_saying_why(runtime: Runtime, request: web.Request) -> web.StreamResponse:
    """A stream that stops cleanly as far as HTTP goes, but never says [DONE]."""
    response = await begin_stream(request)
    await response.write(event(chunk("Once")))
    return response


@asynccontextmanager
async def a_gateway(*runtimes: Runtime | str, **settings: Any) -> AsyncIterator[Gateway]:
    """A gateway in front of these replicas of one model, all started."""
    urls = [runtime if isinstance(runtime, str) else runtime.url for runtime in runtimes]
    configured = GatewaySettings(static=tuple((MODEL, url) for url in urls), port=0, admin_port=0, **settings)
    async with Gateway(configured, static_fleet(configured.static)) as gateway:
        yield gateway


async def until(condition: Callable[[], Any]) -> None:
    """Let everything else run until `condition` holds; the test's timeout is the limit."""
    while not condition():  # noqa: ASYNC110  what is waited for happens inside sockets and has no event
        await asyncio.sleep(0.005)


class Caller:
    """A client without opinions."""

    def __init__(self, session: aiohttp.ClientSession, gateway: Gateway) -> None:
        self.session = session
        self.url = f"http://127.0.0.1:{gateway.port}"
        self.admin_url = f"http://127.0.0.1:{gateway.admin_port}"

    def chat(self, *, headers: dict[str, str] | None = None, **fields: Any) -> Any:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me a story."}]} | fields
        return self.session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers)


@asynccontextmanager
async def a_caller(gateway: Gateway) -> AsyncIterator[Caller]:
    async with aiohttp.ClientSession() as session:
        yield Caller(session, gateway)


async def events_of(response: aiohttp.ClientResponse) -> list[Any]:
    """All events to the end, decoded; [DONE] as the string."""
    raw = (await response.read()).decode()
    assert raw.endswith("\n\n"), "the stream ends between two events"
    texts = [part.removeprefix("data: ") for part in raw.split("\n\n") if part]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


def text_of(events: list[Any]) -> str:
    return "".join(
        choice["delta"].get("content") or ""
        for body in events
        if isinstance(body, dict)
        for choice in body.get("choices", [])
    )
