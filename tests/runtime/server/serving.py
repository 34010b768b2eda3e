"""A replica as it really runs, on free ports: the tiny model, the engine, uvicorn, both applications."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from slipway_api.admin_token import token_digest
from slipway_api.runtime_api import Ready, ReadyReason, StartupTimes
from slipway_runtime.engine import build
from slipway_runtime.engine.client import EngineClient, QueueLimits
from slipway_runtime.engine.engine import Engine
from slipway_runtime.engine.loop import EngineThread
from slipway_runtime.messages import EngineFacts, EngineStats, FinishReason, Message, Request, StepReport
from slipway_runtime.server.adapter_registry import AdapterRegistry, AdapterSource
from slipway_runtime.server.app import admin_app, listening, serving_app
from slipway_runtime.server.metrics import Metrics
from slipway_runtime.server.model_choice import ModelChoice
from slipway_runtime.server.prompt import PromptEncoder
from slipway_runtime.server.replica import Identity, LoadedModel, Replica
from slipway_runtime.server.sampling import model_defaults
from slipway_runtime.server.structured import GrammarValidator
from slipway_runtime.server.tokenizer import TokenizerFiles, load_tokenizer
from slipway_runtime.settings import RuntimeSettings, SamplingDefaults
from tests.runtime.gateway_token import GATEWAY_TOKEN

TINY = Path(__file__).parents[3] / "models" / "tiny"
FOREVER = {"ignore_eos": True, "max_tokens": 2000}  # a stream that ends only when somebody ends it


@cache
def tiny_tokenizer() -> TokenizerFiles:
    return load_tokenizer(TINY)


def tiny_engine(model_path: Path = TINY, **options: Any) -> Engine:
    """A cold one: each test has its own, and warming it takes longer than the test. (`engine/test_warmup.py`)"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_warm_up", lambda *_: 0.0)
        return build.build_engine(
            model_path, **({"max_num_seqs": 4, "kv_cache_bytes": 16 * 2**20, "device": "cpu"} | options)
        )


class Steps:
    """The real engine with a hand on its step loop: hold it, let single steps through, or break it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._permits = threading.Semaphore(0)
        self._free = threading.Event()
        self._free.set()
        self.failure: Exception | None = None

    def hold(self) -> None:
        """From now on each step needs a permit."""
        self._free.clear()

    def allow(self, steps: int = 1) -> None:
        self._permits.release(steps)

    def resume_steps(self) -> None:
        """From now on steps need no permit again."""
        self._free.set()
        self._permits.release()

    @property
    def facts(self) -> EngineFacts:
        return self._engine.facts

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def add(self, request: Request, now: float) -> None:
        self._engine.add(request, now)

    def attach(self, wake: Callable[[], None]) -> None:
        self._engine.attach(wake)

    def abort(self, request_id: str, reason: FinishReason, now: float, index: int | None = None) -> None:
        self._engine.abort(request_id, reason, now, index)

    def control(self, message: Message, now: float) -> None:
        self._engine.control(message, now)

    def step(self, now: float) -> StepReport:
        if not self._free.is_set():
            self._permits.acquire()
        if self.failure is not None:
            raise self.failure
        return self._engine.step(now)

    def idle(self) -> None:
        self._engine.idle()

    def stats(self, now: float) -> EngineStats:
        return self._engine.stats(now)


class WiredThread(EngineThread):
    """An engine thread that gets each message as the engine process gets it: encoded and decoded."""

    def send(self, message: Message) -> None:
        super().send(msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Message))


@dataclass
class Clock:
    """The server's clock, which a test may push forward; the engine keeps the real one."""

    real: Callable[[], float]
    ahead: float = 0.0

    def __call__(self) -> float:
        return self.real() + self.ahead


@dataclass
class Running:
    """A replica that answers, and what a test holds it by."""

    replica: Replica
    client: EngineClient
    steps: Steps
    clock: Clock
    url: str
    admin_url: str
    http: httpx.AsyncClient
    openai: AsyncOpenAI
    models: list[LoadedModel] = field(default_factory=list)

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return await self.http.post(f"{self.url}{path}", json=body, **options)

    async def chat(self, text: str = "Hello!", headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        return await self.post("/v1/chat/completions", {"messages": messages, **body}, headers=headers or {})

    def streaming(self, text: str = "Hello!", headers: dict[str, str] | None = None, **body: Any) -> Any:
        messages = [{"role": "user", "content": text}]
        json = {"messages": messages, "stream": True, **body}
        return self.http.stream("POST", f"{self.url}/v1/chat/completions", json=json, headers=headers or {})

    async def admin(self, path: str, method: str = "GET", **options: Any) -> httpx.Response:
        return await self.http.request(method, f"{self.admin_url}{path}", **options)

    async def until(self, condition: Callable[[EngineStats], bool]) -> EngineStats:
        """Wait for the engine's numbers to say so."""
        async with asyncio.timeout(120):
            while not condition(stats := self.client.stats()):  # noqa: ASYNC110  the engine's numbers are asked for
                await asyncio.sleep(0.01)
        return stats


@asynccontextmanager
async def a_replica(
    *,
    limits: QueueLimits | None = None,
    defaults: SamplingDefaults | None = None,
    token_digests: tuple[str, ...] = (),
    serving_token_digests: tuple[str, ...] = (),
    gateway_token_digests: tuple[str, ...] = (token_digest(GATEWAY_TOKEN),),
    max_output_tokens: int = 0,
    max_body_bytes: int = 2**20,
    max_open_requests: int = 64,
    max_open_body_bytes: int = 2**28,
    drain_timeout: float = 60.0,
    load: bool = True,
    revision: str = "rev1",
    adapter_endpoints: bool = False,
    adapter_roots: tuple[Path, ...] = (),
    fetch_adapter: Callable[[str], Path] = Path,
    release_adapter: Callable[[Path], None] = lambda path: None,
    tokenizer: TokenizerFiles | None = None,
    **engine: Any,
) -> AsyncIterator[Running]:
    """A replica named `tiny` of the namespace `team-a`; with `load=False` it stays at Loading."""
    files = tokenizer or tiny_tokenizer()
    steps = Steps(tiny_engine(**engine))
    client = EngineClient(WiredThread(steps), limits=limits)
    clock = Clock(asyncio.get_running_loop().time)
    replica = Replica(
        Identity(model="tiny", revision=revision, namespace="team-a", uri=f"file://{TINY}"),
        drain_timeout=drain_timeout,
        clock=clock,
    )
    settings = RuntimeSettings(
        model_uri=replica.identity.uri, served_name="tiny", revision=revision, namespace=replica.identity.namespace
    )
    choice = ModelChoice(settings, replica)
    serving = serving_app(
        replica,
        max_body_bytes=max_body_bytes,
        max_open_requests=max_open_requests,
        max_open_body_bytes=max_open_body_bytes,
        adapter_endpoints=adapter_endpoints,
        token_digests=serving_token_digests,
        gateway_token_digests=gateway_token_digests,
    )
    await client.start()
    try:
        async with (
            listening(serving, "127.0.0.1", 0) as port,
            listening(admin_app(replica, choice, token_digests=token_digests), "127.0.0.1", 0) as admin_port,
            # Nothing here is encrypted: reading the machine's certificates would cost more than most tests.
            httpx.AsyncClient(timeout=120, verify=False) as http,
            AsyncOpenAI(
                base_url=f"http://127.0.0.1:{port}/v1",
                api_key="none",
                max_retries=0,
                http_client=DefaultAsyncHttpxClient(verify=False),
            ) as openai,
        ):
            with ThreadPoolExecutor(2) as threads:
                adapters = AdapterRegistry(
                    client,
                    replica.identity,
                    source=AdapterSource(lambda uri, *_: fetch_adapter(uri), release_adapter, roots=adapter_roots),
                    clock=client._clock,
                )
                model = LoadedModel(
                    engine=client,
                    prompts=PromptEncoder(files, max_model_len=client.facts.max_model_len, threads=threads),
                    metrics=Metrics(
                        "tiny",
                        client.facts,
                        client.stats,
                        gpu_memory_utilization=0.85,
                        adapter_names=adapters.names_of,
                    ),
                    grammars=GrammarValidator.over(files.tokenizer, client.facts.eos_token_ids),
                    adapters=adapters,
                    defaults=(defaults or SamplingDefaults()).over(model_defaults(TINY)),
                    max_output_tokens=max_output_tokens,
                    created=1,
                )
                client.on_step = model.metrics.stepped
                if load:
                    replica.ready_with(model, StartupTimes(load_seconds=0.1, warmup_seconds=0.1))
                yield Running(
                    replica=replica,
                    client=client,
                    steps=steps,
                    clock=clock,
                    url=f"http://127.0.0.1:{port}",
                    admin_url=f"http://127.0.0.1:{admin_port}",
                    http=http,
                    openai=openai,
                    models=[model],
                )
                steps.resume_steps()
    finally:
        steps.resume_steps()
        await client.stop()


async def ready_of(replica: Running) -> tuple[int, ReadyReason]:
    """The answer of `/ready`: its status and reason."""
    response = await replica.admin("/ready")
    body = Ready.model_validate_json(response.content)
    assert body.ready == (response.status_code == 200)
    return response.status_code, body.reason
