"""Two real replicas behind proxies that cut their answers at any byte, and a gateway in front; what a client reads."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
from aiohttp import web

from slipway_gateway.gateway import Gateway
from tests.gateway.doubles import MODEL, a_gateway
from tests.runtime.server.serving import Running, a_replica

MESSAGES = [{"role": "user", "content": "Tell me a story about a fox."}]


@dataclass
class Cuts:
    """After how many bytes the next answers are cut, in the order in which they come; then none is."""

    at: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # bytes of the bodies that were relayed
    bodies: list[dict[str, Any]] = field(default_factory=list)  # of the requests


class Cutter:
    """A proxy in front of one replica. It stays when the replica's answer is cut, as a restarted replica would."""

    def __init__(self, url: str, cuts: Cuts) -> None:
        self._target = url
        self._cuts = cuts
        self.url = ""

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(auto_decompress=False)
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._relay)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site.port}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _relay(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self._cuts.bodies.append(json.loads(body))
        left = self._cuts.at.pop(0) if self._cuts.at else None
        url = self._target + request.path_qs
        async with self._session.request(request.method, url, data=body, headers=request.headers) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() != "transfer-encoding"}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            sent = 0
            async for piece in answer.content.iter_any():
                part = piece if left is None else piece[: left - sent]
                await response.write(part)
                sent += len(part)
                if sent == left:
                    assert request.transport is not None
                    request.transport.close()  # what was written still arrives
                    break
        self._cuts.sizes.append(sent)
        return response


@dataclass
class Pair:
    """The gateway, its two replicas, and the cuts to make."""

    gateway: Gateway
    replicas: list[Running]
    cuts: Cuts
    http: aiohttp.ClientSession

    async def ask(self, path: str, body: dict[str, Any], *cuts: int) -> "Read":
        """A streamed request whose answers are cut so; everything that its client reads."""
        self.cuts.at[:] = cuts
        self.cuts.sizes.clear()
        self.cuts.bodies.clear()
        url = f"http://127.0.0.1:{self.gateway.port}{path}"
        async with self.http.post(url, json={"model": MODEL, "stream": True} | body) as response:
            assert response.status == 200, await response.text()
            return Read.of(await response.read())


@asynccontextmanager
async def a_pair(*, engine: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[Pair]:
    """Two deterministic replicas of one model behind a gateway; `engine` goes to both."""
    async with AsyncExitStack() as stack:
        cuts = Cuts()
        replicas = [await stack.enter_async_context(a_replica(deterministic=True, **(engine or {}))) for _ in range(2)]
        proxies = [await stack.enter_async_context(Cutter(replica.url, cuts)) for replica in replicas]
        gateway = await stack.enter_async_context(a_gateway(*(proxy.url for proxy in proxies), **settings))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Pair(gateway, replicas, cuts, http)


@dataclass
class Read:
    """What a client reads of a stream, put together: equal for two streams that say the same."""

    texts: dict[int, str] = field(default_factory=dict)
    calls: dict[int, list[list[str]]] = field(default_factory=dict)  # name and arguments
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    offsets: dict[int, list[int]] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    finish_reasons: dict[int, list[Any]] = field(default_factory=dict)
    roles: dict[int, int] = field(default_factory=dict)
    usage: list[tuple[int, int]] = field(default_factory=list)
    identities: int = 0  # different ids, creation times, models and fingerprints
    errors: list[Any] = field(default_factory=list)
    ends: int = 0
    call_ids: int = field(default=0, compare=False)

    @classmethod
    def of(cls, raw: bytes) -> "Read":
        read, identities = cls(), set()
        assert raw.endswith(b"\n\n")
        for event in raw.removesuffix(b"\n\n").split(b"\n\n"):
            assert event.startswith(b"data: "), "nothing but events: no marks"
            if event == b"data: [DONE]":
                read.ends += 1
                continue
            body = json.loads(event[6:])
            if "error" in body:
                read.errors.append(body["error"])
                continue
            identities.add((body["id"], body["created"], body["model"], body["system_fingerprint"], body["object"]))
            if body.get("usage"):
                read.usage.append((body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]))
            for choice in body["choices"]:
                read._take(choice)
        read.identities = len(identities)
        return read

    def _take(self, choice: dict[str, Any]) -> None:
        index, delta = choice["index"], choice.get("delta", {})
        self.texts[index] = self.texts.get(index, "") + (delta.get("content") or choice.get("text") or "")
        self.roles[index] = self.roles.get(index, 0) + ("role" in delta)
        self.token_ids.setdefault(index, []).extend(choice.get("token_ids", ()))
        for call in delta.get("tool_calls", ()):
            calls = self.calls.setdefault(index, [])
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append([call["function"]["name"], ""])
                self.call_ids += 1
            calls[call["index"]][1] += call["function"]["arguments"]
        if choice["finish_reason"]:
            self.finish_reasons.setdefault(index, []).append((choice["finish_reason"], choice.get("stop_reason")))
        if logprobs := choice.get("logprobs"):
            if "content" in logprobs:
                self.logprobs.setdefault(index, []).extend(logprobs["content"])
            else:
                self.logprobs.setdefault(index, []).extend(
                    zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
                )
                self.offsets.setdefault(index, []).extend(logprobs["text_offset"])
