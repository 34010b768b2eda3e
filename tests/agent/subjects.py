"""Replicas that must answer the admin protocol alike: our runtime, and agents beside other engines."""

import asyncio
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.peers.environments import environment, interpreter
from slipway_api.admin_token import token_digest
from slipway_api.crd import engine_manifest
from slipway_api.engine import parse_engine, render
from slipway_api.names import ENV_ADMIN_TOKEN_SHA256, HEADER_ADMIN_TOKEN
from slipway_api.runtime_api import Signals
from slipway_api.served_certificate import Certificate
from slipway_api.trust import client_context
from tests.agent.agents import TOKEN, an_agent, mounted, tls_flags
from tests.agent.stand_in import StandIn, listening
from tests.operator.tls_files import TlsFiles
from tests.runtime.processes import serving

MODELS = Path(__file__).parents[2] / "models"
SAILOR = f"file://{MODELS / 'adapters' / 'sailor'}"
VLLM_START_SECONDS = 600  # about a minute alone, several beside other load


@dataclass
class Subject:
    """One replica under test."""

    name: str
    url: str
    admin_url: str
    http: httpx.AsyncClient
    longest: int  # tokens of a stream that lasts some seconds

    async def admin(self, path: str, method: str = "GET", *, token: str = TOKEN, **options: Any) -> httpx.Response:
        headers = {HEADER_ADMIN_TOKEN: token} if token else {}
        return await self.http.request(method, f"{self.admin_url}{path}", headers=headers, **options)

    async def complete(self, model: str = "tiny", max_tokens: int = 4) -> httpx.Response:
        body = {"model": model, "prompt": "The sea", "max_tokens": max_tokens, "temperature": 0}
        return await self.http.post(f"{self.url}/v1/completions", json=body)

    def streaming(self, max_tokens: int | None = None) -> Any:
        """A stream that nobody cuts short, on the engine's own port."""
        body = {"model": "tiny", "prompt": "The sea", "stream": True, "ignore_eos": True, "temperature": 0}
        body["max_tokens"] = max_tokens or self.longest
        return self.http.stream("POST", f"{self.url}/v1/completions", json=body)

    async def signals(self) -> Signals:
        answer = await self.admin("/signals")
        assert answer.status_code == 200, answer.text
        return Signals.model_validate_json(answer.content)

    async def until(self, condition: Any, seconds: float = 60) -> Any:
        """What an awaitable condition returns once it is true."""
        async with asyncio.timeout(seconds):
            while not (found := await condition()):  # noqa: ASYNC110  the replica is asked
                await asyncio.sleep(0.1)
        return found

    async def until_idle(self) -> Signals:
        """The signals once nothing runs, as the engine counts it."""

        async def idle() -> Signals | None:
            signals = await self.signals()
            return signals if signals.running + signals.waiting == 0 else None

        found: Signals = await self.until(idle)
        return found

    async def until_ready(self) -> None:
        async def ready() -> bool:
            return (await self.admin("/ready", token="")).status_code == 200

        await self.until(ready, 120)


@asynccontextmanager
async def our_runtime() -> AsyncIterator[Subject]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENV_ADMIN_TOKEN_SHA256, token_digest(TOKEN))
        async with (
            serving("--max-adapters", "2", "--served-name", "tiny") as replica,
            httpx.AsyncClient(timeout=120) as http,
        ):
            await replica.ready()
            yield Subject("runtime", replica.url, replica.admin_url, http, longest=1500)


@asynccontextmanager
async def beside_the_stand_in() -> AsyncIterator[Subject]:
    async with listening(StandIn()) as engine, an_agent(engine.url) as agent, httpx.AsyncClient(timeout=120) as http:
        subject = Subject("stand-in", engine.url, agent.admin_url, http, longest=300)
        await subject.until_ready()
        yield subject


@asynccontextmanager
async def beside_the_stand_in_by_tls() -> AsyncIterator[Subject]:
    with tempfile.TemporaryDirectory(prefix="slw") as folder:
        files = mounted(Path(folder) / "tls")
        async with (
            listening(StandIn(), tls=Certificate(files.folder).context) as engine,
            an_agent(engine.url, *tls_flags(files)) as agent,
            httpx.AsyncClient(timeout=120, verify=client_context(files.bundle)) as http,
        ):
            url = engine.url.replace("127.0.0.1", "localhost")
            subject = Subject("stand-in by TLS", url, agent.admin_url, http, longest=300)
            await subject.until_ready()
            yield subject


@asynccontextmanager
async def beside_vllm(*, files: TlsFiles | None = None) -> AsyncIterator[Subject]:
    """An unmodified vLLM on the CPU, as `python -m bench.peers.environments` installs it; never installed by a test.

    files: the certificate with which vLLM and the agent serve TLS, by the flags of the chart's Engine.
    """
    if os.environ.get("PYTEST_XDIST_WORKER"):
        pytest.skip("vLLM takes 4 GB and a minute: `make test-cluster` starts it once, outside the parallel tests")
    python = interpreter("vLLM CPU")
    if python is None:
        pytest.skip("vLLM's environment is not cached: python -m bench.peers.environments makes it")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    engine = subprocess.Popen(  # noqa: ASYNC220  a fork, once
        [
            *(str(python.parent / "vllm"), "serve", str(MODELS / "tiny"), "--served-model-name", "tiny"),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "512"),
            *("--enforce-eager", "--max-num-seqs", "4", "--enable-lora", "--max-lora-rank", "16"),
            *(engine_flags(files) if files is not None else ()),
            *("--enable-server-load-tracking", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            # A small model would fill its answer with the spaces that a schema allows.
            *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
        ],
        env={
            **os.environ,
            **environment("vLLM CPU"),
            "PATH": f"{python.parent}:{os.environ['PATH']}",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ENFORCE_STRICT_TOOL_CALLING": "0",  # the tags of that parser are not bound by a schema
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        scheme, flags = ("https", tls_flags(files)) if files is not None else ("http", ())
        verify = client_context(files.bundle) if files is not None else True
        async with (
            an_agent(f"{scheme}://127.0.0.1:{port}", *flags) as agent,
            httpx.AsyncClient(timeout=120, verify=verify) as http,
        ):
            subject = Subject("vllm", f"{scheme}://localhost:{port}", agent.admin_url, http, longest=480)

            async def ready() -> bool:
                assert engine.poll() is None, "vLLM ended while it started"
                return (await subject.admin("/ready", token="")).status_code == 200

            await subject.until(ready, VLLM_START_SECONDS)
            yield subject
    finally:
        os.killpg(engine.pid, signal.SIGKILL)  # the group of this process: its workers too
        engine.wait()


def engine_flags(files: TlsFiles) -> list[str]:
    """How the chart's Engine vllm makes vLLM serve TLS."""
    spec = parse_engine(engine_manifest("vllm")["spec"])
    assert spec.tls is not None
    values = {"tls.certificate": str(files.folder / "tls.crt"), "tls.key": str(files.folder / "tls.key")}
    return [render(one, values) or "" for one in spec.tls.args]


SUBJECTS = {
    "runtime": our_runtime,
    "stand-in": beside_the_stand_in,
    "stand-in by TLS": beside_the_stand_in_by_tls,
    "vllm": beside_vllm,
}
