"""The two processes of a replica: one serves and never loads torch, one computes, and neither outlives the other."""

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from slipway_runtime.server.replica import HUNG
from tests.runtime.gateway_token import as_gateway
from tests.runtime.processes import TINY, Replica, serving, serving_here

TIME_TO_DIE = 20.0
SAILOR = TINY.parent / "adapters" / "sailor"
WARM = "You are a helpful assistant who answers in one sentence, whatever is asked of you. "
FLAGS = (
    *("--warm-prompts", json.dumps([WARM]), "--max-adapters", "2"),
    *("--adapter", "broken=file:///nowhere", "--adapter", f"sailor=file://{SAILOR}"),
)


def resident_bytes(pid: int) -> int:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


def maps_torch(pid: int) -> bool:
    return "/torch/" in Path(f"/proc/{pid}/maps").read_text()


async def gone(pid: int) -> None:
    async with asyncio.timeout(TIME_TO_DIE):
        while Path(f"/proc/{pid}").exists():  # noqa: ASYNC110, ASYNC240  another process's end
            await asyncio.sleep(0.02)


async def texts(replica: Replica, http: httpx.AsyncClient) -> list[str]:
    """What the base model and its adapter say."""
    body = {"prompt": "Tell me a story.", "max_tokens": 24, "temperature": 0}
    answers = [
        (await http.post(f"{replica.url}/v1/completions", json={**body, "model": model})).json()
        for model in ("tiny", "sailor")
    ]
    return [answer["choices"][0]["text"] for answer in answers]


async def cached_tokens(replica: Replica, http: httpx.AsyncClient, prompt: str, tenant: str) -> int:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    answer = await http.post(f"{replica.url}/v1/completions", json=body, headers=as_gateway(tenant=tenant))
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.capability("KV-10", "KN-4", "BS-7", "ML-1", "ML-4", "MT-2")
async def test_two_processes_serve_and_the_engine_does_not_outlive_the_other_one():
    async with serving(*FLAGS) as replica, httpx.AsyncClient(timeout=60) as http:
        await replica.ready()
        for tenant in ("a", "b"):
            question = WARM + "Who are you, and what is your name, and where do you come from?"
            cached = await cached_tokens(replica, http, question, tenant)
            assert 16 <= cached < 48, "the warm prompt was computed before the first request came, for every tenant"

        refused = await http.post(f"{replica.url}/v1/completions", json={"model": "broken", "prompt": "Hi"})
        assert refused.status_code in {404, 503}, "one adapter that does not load leaves the replica ready"
        assert "error" in refused.json()
        base, sailor = said = await texts(replica, http)
        assert base != sailor

        assert not maps_torch(replica.process.pid)
        assert maps_torch(replica.engine_pid)
        assert resident_bytes(replica.process.pid) < 200 * 2**20
        (directory,) = replica.run_directory.glob("engine-*")
        assert directory.stat().st_mode & 0o777 == 0o700, "its sockets are for this user only"

        engine = replica.engine_pid
        replica.process.kill()
        await replica.ended()
        await gone(engine)

    async with serving_here(*FLAGS) as replica, httpx.AsyncClient(timeout=60) as http:
        await replica.ready()
        assert await texts(replica, http) == said, "an engine on a thread serves alike"


@pytest.mark.capability("API-3", "RD-3", "RD-9")
async def test_when_the_engine_process_is_killed_streams_hear_of_it_and_the_replica_ends():
    async with serving() as replica, httpx.AsyncClient(timeout=60) as http:
        await replica.ready()
        body = {"model": "tiny", "prompt": "Hi", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        async with http.stream("POST", f"{replica.url}/v1/completions", json=body) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            os.kill(replica.engine_pid, signal.SIGKILL)
            rest = [line async for line in lines if line]
            statuses = set()
            with contextlib.suppress(httpx.TransportError):  # the port closes
                while not replica.is_over():
                    late = await http.post(f"{replica.url}/v1/completions", json={"model": "tiny", "prompt": "Hi"})
                    statuses.add(late.status_code)
            assert statuses <= {503}, "chaos C3: what comes until the port closes can be sent elsewhere"

        assert "error" in json.loads(rest[-2].removeprefix("data: "))
        assert rest[-1] == "data: [DONE]"
        assert await replica.ended() == 1
        died = next(line for line in replica.log if line["message"] == "the engine has died")
        assert "signal 9" in died["reason"]


@pytest.mark.capability("RD-2", "RD-9")
async def test_on_sigterm_a_replica_whose_engine_process_hangs_ends_its_streams_and_does_not_drain_for_an_hour():
    """ADR 81: SIGSTOP as in the fault matrix; the kubelet sends SIGTERM."""
    async with serving("--drain-timeout", "3600", "--hang-seconds", "3") as replica:
        await replica.ready()
        body = {"model": "tiny", "prompt": "Hi", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        async with (
            httpx.AsyncClient(timeout=60) as http,
            http.stream("POST", f"{replica.url}/v1/completions", json=body) as stream,
        ):
            lines = stream.aiter_lines()
            await anext(lines)
            engine = replica.engine_pid
            os.kill(engine, signal.SIGSTOP)
            replica.terminate()
            rest = [line async for line in lines if line]

        assert json.loads(rest[-2].removeprefix("data: "))["error"]["message"] == HUNG
        assert await replica.ended() == 0
        await gone(engine)


async def test_an_engine_that_is_still_loading_does_not_outlive_the_process_that_serves():
    async with serving() as replica:
        async with asyncio.timeout(60):
            while not list(replica.run_directory.glob("engine-*")):  # noqa: ASYNC110  another process's folder
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)
        engine = replica.engine_pid
        replica.process.kill()
        await replica.ended()
        await gone(engine)


@pytest.mark.capability("PF-30", "KV-5", "KV-12")
@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--kv-cache-bytes", "a KV cache of 1125899906842624 bytes"),
        ("--kv-cache-host-bytes", "1125899906842624 bytes of host memory are requested for cold KV blocks"),
    ],
)
async def test_memory_that_does_not_last_is_one_sentence(flag: str, sentence: str):
    async with serving_here(flag, "1Pi") as replica:
        assert await replica.ended() == 1
    last = replica.log[-1]
    assert last["reason"].startswith(f"DoesNotFit: {sentence}")
    assert "exception" not in last, "no traceback for what the user can mend"
