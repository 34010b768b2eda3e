"""A server in the shape of vLLM 0.32: its routes, error bodies and metrics page as recorded from the real one.

It computes nothing: it streams a word every `pace` seconds. It stands in for faults that a real engine does not show on
request: slow, dead, garbage metrics, bodies without an end.
"""

import asyncio
import contextlib
import json
import os
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

RECORDED = Path(__file__).parent / "recorded" / "vllm-0.32.0-metrics.txt"
LINE = re.compile(r"^([a-zA-Z_:]+)(\{.*\})? (\S+)$")


@dataclass
class StandIn:
    """The engine, and the knobs of a test."""

    pace: float = 0.01
    start_time: float = 1.0
    has_sleep: bool = True
    health_status: int = 200
    page: bytes | None = None  # instead of the metrics page
    endless: str = ""  # the path whose answer never ends
    hang: set[str] = field(default_factory=set)  # paths that never answer
    loads: int | None = None  # what /load answers instead of the truth
    load_seconds: float = 0.0
    url: str = ""
    running: int = 0
    waiting: int = 0
    kv_usage: float | None = None  # None: an eighth for each running request
    held: int = 0
    finished: int = 0
    tokens: int = 0
    adapters: dict[str, str] = field(default_factory=dict)
    asleep: bool = False
    calls: list[tuple[str, str]] = field(default_factory=list)
    loaded: list[dict[str, Any]] = field(default_factory=list)  # the bodies of the loads

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._faulty])
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/load", self._load)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        for prefix in ("/v1", ""):  # SGLang's have no version in their path
            app.router.add_post(f"{prefix}/load_lora_adapter", self._load_adapter)
            app.router.add_post(f"{prefix}/unload_lora_adapter", self._unload_adapter)
        if self.has_sleep:
            app.router.add_get("/is_sleeping", self._is_sleeping)
            app.router.add_post("/sleep", self._sleep)
            app.router.add_post("/wake_up", self._wake_up)
        return app

    @web.middleware
    async def _faulty(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.calls.append((request.method, request.path))
        if request.path in self.hang:
            await asyncio.sleep(3600)
        if request.path == self.endless:
            response = web.StreamResponse()
            await response.prepare(request)
            with contextlib.suppress(ConnectionError):
                while True:
                    await asyncio.sleep(0)  # over TLS a write to a broken connection returns immediately
                    await response.write(b"# " + b"x" * 1000 + b"\n")
            return response
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=self.health_status)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self.page if self.page is not None else self.metrics().encode())

    def metrics(self) -> str:
        """The recorded page with the numbers of now."""
        now = {
            "vllm:num_requests_running": self.running,
            "vllm:num_requests_waiting": self.waiting,
            "vllm:kv_cache_usage_perc": min(1.0, self.running / 8) if self.kv_usage is None else self.kv_usage,
            "process_start_time_seconds": self.start_time,
            "vllm:generation_tokens_total": self.tokens,
            "vllm:prompt_tokens_total": 3 * self.finished,
        }
        lines = []
        for line in RECORDED.read_text().splitlines():
            match = LINE.match(line)
            if match and match[1] in now:
                line = f"{match[1]}{match[2] or ''} {float(now[match[1]])}"
            if match and match[1] == "vllm:request_success_total" and 'finished_reason="length"' in line:
                line = f"{match[1]}{match[2]} {float(self.finished)}"
            lines.append(line)
        return "\n".join(lines) + "\n"

    async def _load(self, _: web.Request) -> web.Response:
        return web.json_response({"server_load": self.held if self.loads is None else self.loads})

    async def _models(self, _: web.Request) -> web.Response:
        base = {"id": "tiny", "object": "model", "root": "/models/tiny", "parent": None, "max_model_len": 512}
        more = [
            {"id": name, "object": "model", "root": path, "parent": "tiny", "max_model_len": None}
            for name, path in self.adapters.items()
        ]
        return web.json_response({"object": "list", "data": [base, *more]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        if asked["model"] not in {"tiny", *self.adapters}:
            return _error(404, "NotFoundError", f"The model `{asked['model']}` does not exist.")
        self.held += 1
        self.running += 1
        try:
            if not asked.get("stream"):
                self.tokens += asked["max_tokens"]
                return web.json_response({"choices": [{"text": " word", "finish_reason": "length"}]})
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for _ in range(asked["max_tokens"]):
                await response.write(f"data: {json.dumps({'choices': [{'text': ' word'}]})}\n\n".encode())
                self.tokens += 1
                await asyncio.sleep(self.pace)
            await response.write(b"data: [DONE]\n\n")
            return response
        finally:
            self.held -= 1
            self.running -= 1
            self.finished += 1

    async def _load_adapter(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.loaded.append(asked)
        name, path = asked["lora_name"], asked["lora_path"]
        await asyncio.sleep(self.load_seconds)
        if name in self.adapters and not asked.get("load_inplace"):
            sentence = f"The lora adapter '{name}' has already been loaded."
            return _error(400, "InvalidUserInput", sentence)
        if not os.path.isdir(path):  # noqa: ASYNC240  on a local disk
            return _error(404, "NotFoundError", f"Loading lora {name} failed: No adapter found for {path}")
        self.adapters[name] = path
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if name not in self.adapters:
            return _error(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
        del self.adapters[name]
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _is_sleeping(self, _: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": self.asleep})

    async def _sleep(self, request: web.Request) -> web.Response:
        self.asleep = True
        return web.json_response({"status": "sleeping", "level": int(request.query["level"])})

    async def _wake_up(self, _: web.Request) -> web.Response:
        self.asleep = False
        return web.json_response({"status": "awake", "tags": None})


def _error(status: int, kind: str, message: str) -> web.Response:
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return web.json_response(body, status=status)


@asynccontextmanager
async def listening(stand_in: StandIn, port: int = 0, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[StandIn]:
    """The stand-in on a port of this machine; another stand-in may take the port over later."""
    runner = web.AppRunner(stand_in.app(), access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True, ssl_context=tls)
    await site.start()
    assert site._server is not None
    stand_in.url = f"{'https' if tls else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield stand_in
    finally:
        await runner.cleanup()
