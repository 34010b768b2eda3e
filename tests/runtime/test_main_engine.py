"""The two processes of a replica: one serves and never loads torch, one computes, and neither outlives the other."""

import asyncio
import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.runtime.processes import TINY, serving

TIME_TO_DIE = 20.0
ADAPTER = TINY.parent / "adapters" / "sailor"


def resident_bytes(pid: int) -> int:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


def maps_torch(pid: int) -> bool:
    return "/torch/" in Path(f"/proc/{pid}/maps").read_text()


async def gone(pid: int) -> None:
    async with asyncio.timeout(TIME_TO_DIE):
        while Path(f"/proc/{pid}").exists():  # noqa: ASYNC110, ASYNC240  another process's end
            await asyncio.sleep(0.02)


@pytest.mark.capability("KV-10", "KN-4", "BS-7", "ML-4")
async def test_the_process_that_serves_is_small_and_has_no_torch():
    warm = "You are a helpful assistant who answers in one sentence, whatever is asked of you. "
    flags = ["--warm-prompts", json.dumps([warm]), "--max-adapters", "2", "--adapter", "broken=file:///nowhere"]
    async with serving(*flags) as replica, httpx.AsyncClient(timeout=60) as http:
        await replica.ready()
        body = {"model": "tiny", "prompt": warm + "Who are you?", "max_tokens": 4}
        answer = await http.post(f"{replica.url}/v1/completions", json=body)
        assert answer.status_code == 200
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= 16, "the warm prompt was computed before the first request came"

        refused = await http.post(f"{replica.url}/v1/completions", json={**body, "model": "broken"})
        assert refused.status_code in {404, 503}, "one adapter that does not load leaves the replica ready"
        assert "error" in refused.json()

        assert not maps_torch(replica.process.pid)
        assert maps_torch(replica.engine_pid)
        assert resident_bytes(replica.process.pid) < 200 * 2**20
        engine = replica.engine_pid
        replica.process.send_signal(signal.SIGTERM)
        assert await replica.ended() == 0
        await gone(engine)


@pytest.mark.capability("API-3", "RD-3")
async def test_when_the_engine_process_is_killed_streams_hear_of_it_and_the_replica_ends():
    async with serving() as replica, httpx.AsyncClient(timeout=60) as http:
        await replica.ready()
        body = {"model": "tiny", "prompt": "Hi", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        async with http.stream("POST", f"{replica.url}/v1/completions", json=body) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            os.kill(replica.engine_pid, signal.SIGKILL)
            rest = [line async for line in lines if line]

        assert "error" in json.loads(rest[-2].removeprefix("data: "))
        assert rest[-1] == "data: [DONE]"
        assert await replica.ended() == 1
        died = next(line for line in replica.log if line["message"] == "the engine has died")
        assert "signal 9" in died["reason"]


@pytest.mark.parametrize("when", ["loading", "serving"])
async def test_an_engine_does_not_outlive_the_process_that_serves(when: str):
    async with serving() as replica:
        if when == "serving":
            await replica.ready()
        else:
            async with asyncio.timeout(60):
                while not list(replica.run_directory.glob("engine-*")):  # noqa: ASYNC110  another process's folder
                    await asyncio.sleep(0.02)
            await asyncio.sleep(0.5)
        engine = replica.engine_pid
        replica.process.kill()
        await replica.ended()
        await gone(engine)


async def test_the_sockets_are_for_this_user_only():
    async with serving() as replica:
        await replica.ready()
        (directory,) = replica.run_directory.glob("engine-*")
        assert directory.stat().st_mode & 0o777 == 0o700
        replica.process.send_signal(signal.SIGTERM)
        assert await replica.ended() == 0
        assert not directory.exists()


@pytest.mark.capability("PF-30", "KV-5")
async def test_memory_that_does_not_last_is_one_sentence():
    async with serving("--kv-cache-bytes", "1Pi") as replica:
        assert await replica.ended() == 1
    last = replica.log[-1]
    assert "there is not enough memory on cpu for the KV cache" in last["reason"]
    assert "exception" not in last, "no traceback for what the user can mend"


@pytest.mark.capability("ML-1", "ML-4")
@pytest.mark.skipif(not ADAPTER.is_dir(), reason="the adapters of the embedded model are not there")
async def test_an_adapter_of_the_command_line_answers_and_an_in_process_engine_serves_alike():
    flags = ["--max-adapters", "1", "--adapter", f"sailor=file://{ADAPTER}"]
    texts = []
    for more in ([], ["--in-process"]):
        async with serving(*flags, *more) as replica, httpx.AsyncClient(timeout=60) as http:
            await replica.ready()
            body = {"prompt": "Tell me a story.", "max_tokens": 24, "temperature": 0}
            answers = [
                (await http.post(f"{replica.url}/v1/completions", json={**body, "model": model})).json()
                for model in ("tiny", "sailor")
            ]
            texts.append([answer["choices"][0]["text"] for answer in answers])
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]
