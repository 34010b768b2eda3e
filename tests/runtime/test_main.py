"""`slipway-runtime` as a process: it starts, answers, drains on SIGTERM, and leaves with the right code."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI

from slipway_runtime import main
from tests.runtime.processes import RUNTIME, TINY, serving, serving_here


@pytest.mark.capability("RD-1", "RD-2", "RD-3", "ST-3", "OB-7", "PF-9")
async def test_a_replica_starts_drains_when_asked_and_on_sigterm_finishes_its_streams_before_it_leaves():
    async with serving("--drain-timeout", "60") as replica, httpx.AsyncClient(timeout=60) as http:
        early = await http.get(f"{replica.admin_url}/ready")
        assert early.status_code == 503, "it answers before its model is there"
        assert early.json()["reason"] in {"Loading", "WarmingUp"}
        await replica.ready()
        assert (await http.get(f"{replica.admin_url}/ready")).status_code == 200

        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "ignore_eos": True}
        asking = asyncio.create_task(http.post(f"{replica.url}/v1/chat/completions", json=body))
        while '"running":1' not in (await http.get(f"{replica.admin_url}/signals")).text:  # noqa: ASYNC110  its number
            await asyncio.sleep(0.01)
        drain = await asyncio.create_subprocess_exec(
            *(*RUNTIME, "drain", "--timeout", "30", "--refuse-after", "0"),
            env={**os.environ, "SLIPWAY_RUN_DIR": str(replica.run_directory)},
        )
        assert await drain.wait() == 0, "the verb waits for the last stream"
        assert (await asking).status_code == 200
        await http.post(f"{replica.admin_url}/undrain")
        replica.log = [line for line in replica.log if line["message"] != "draining"]

        async with AsyncOpenAI(base_url=f"{replica.url}/v1", api_key="none", max_retries=0) as client:
            ask = {"model": "tiny", "messages": [{"role": "user", "content": "Tell me a secret story."}]}
            stream = await client.chat.completions.create(
                **ask, stream=True, max_tokens=400, extra_body={"ignore_eos": True}
            )
            chunks = aiter(stream)
            await anext(chunks)
            replica.terminate()
            await replica.logged("draining")
            refused = await http.post(f"{replica.url}/v1/chat/completions", json=ask)
            rest = [chunk async for chunk in chunks]

        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert rest[-1].choices[0].finish_reason == "length", "the stream came to its own end"
        engine = replica.engine_pid
        assert await replica.ended() == 0
        assert not Path(f"/proc/{engine}").exists()  # noqa: ASYNC240  the kernel's own
        assert not list(replica.run_directory.glob("engine-*")), "its sockets are gone"
    assert {line["part"] for line in replica.log} == {"runtime"}
    assert "secret" not in json.dumps(replica.log)
    warnings = [line["message"] for line in replica.log if line["level"] not in ("info", "debug")]
    assert warnings == [], "a normal stop is no cause for an alarm (reference/field-2026.md F7)"


@pytest.mark.capability("RD-1", "RD-2")
async def test_a_stream_beyond_the_drain_timeout_ends_with_an_error_event_and_the_replica_with_0():
    async with serving_here("--drain-timeout", "0.3") as replica, httpx.AsyncClient(timeout=30) as http:
        await replica.ready()
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2000, "ignore_eos": True, "stream": True}
        async with http.stream("POST", f"{replica.url}/v1/chat/completions", json=body) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            replica.terminate()
            rest = [line async for line in lines if line]

        assert json.loads(rest[-2][6:])["error"]["code"] == 503
        assert rest[-1] == "data: [DONE]"
        assert await replica.ended() == 0


@pytest.mark.capability("RD-1")
async def test_a_replica_that_was_drained_ends_at_once():
    async with serving_here("--drain-timeout", "3600") as replica, httpx.AsyncClient(timeout=30) as http:
        await replica.ready()
        await http.post(f"{replica.admin_url}/drain")
        replica.terminate()
        assert await replica.ended() == 0


async def test_sigterm_while_loading_ends_the_process_at_once():
    async with serving() as replica:
        replica.terminate()

        assert await replica.ended() == 0


@pytest.mark.capability("PF-12", "ST-3")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tokenizer-sha256", "0" * 64], "refusing to start"),
        (["--model-digest", "sha256:" + "0" * 64], "refusing to start"),
        (["--max-model-len", "100000"], "2048"),
    ],
)
async def test_what_cannot_be_honoured_refuses_to_start_with_a_sentence(flags: list[str], words: str):
    async with serving_here(*flags) as replica:
        assert await replica.ended() == 1

    assert words in replica.log[-1]["reason"]


@pytest.mark.capability("ST-2")
async def test_pickled_weights_refuse_to_start(tmp_path: Path):
    shutil.copytree(TINY, tmp_path / "pickled", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x04.")

    async with serving_here(model=f"file://{tmp_path}/pickled") as replica:
        assert await replica.ended() == 1

    assert "pickle" in replica.log[-1]["reason"]


def test_a_senseless_command_line_is_a_sentence_and_not_a_traceback():
    result = subprocess.run(
        [*RUNTIME, "serve", "file:///x", "--kv-cache-bytes", "lots"], capture_output=True, text=True, check=False
    )

    assert result.returncode == 2
    assert result.stderr.startswith("slipway-runtime: ")


@pytest.mark.parametrize("left_behind", [False, True], ids=["no socket", "the socket of a server that was killed"])
def test_where_no_server_runs_nothing_is_left_to_drain(left_behind: bool, capsys: pytest.CaptureFixture[str]):
    """Chaos C8: the preStop hook of a pod whose server does not run succeeds."""
    with tempfile.TemporaryDirectory(prefix="slw") as run, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPWAY_RUN_DIR", run)
        if left_behind:
            with socket.socket(socket.AF_UNIX) as killed:
                killed.bind(f"{run}/drain.sock")

        assert main.run(["drain"]) == 0

    assert "nothing to drain: no server answers" in capsys.readouterr().err


def test_pull_prints_what_to_pin():
    result = subprocess.run([*RUNTIME, "pull", f"file://{TINY}"], capture_output=True, text=True, check=True)
    found = json.loads(result.stdout)

    assert found["path"] == str(TINY)
    assert found["digest"].startswith("sha256:")
    assert len(found["tokenizerSha256"]) == 64


def test_the_api_side_never_imports_torch():
    code = (
        "import sys; import slipway_runtime.serve, slipway_runtime.server.app, slipway_runtime.engine.client;"
        " sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
