"""The agent as a process: its memory, its hooks, its boot list, its logs, and what strangers can do to its port."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from slipway_agent.main import run
from slipway_agent.settings import SettingsError, parse_arguments, serve_settings
from slipway_api.dialect import ENV_DIALECT
from slipway_api.names import HEADER_ADMIN_TOKEN
from slipway_api.served_certificate import Certificate
from slipway_api.trust import client_context
from tests.agent.agents import TOKEN, AgentProcess, an_agent, mounted, tls_flags, vllm_dialect
from tests.agent.stand_in import StandIn, listening

pytestmark = pytest.mark.capability("OP-11")

HEADERS = {HEADER_ADMIN_TOKEN: TOKEN}


def read_file(path: str) -> str:
    return Path(path).read_text()


def resident(pid: int, what: str = "VmHWM") -> int:
    """Bytes of memory of a process, at their highest."""
    found = re.search(rf"{what}:\s+(\d+) kB", read_file(f"/proc/{pid}/status"))
    assert found is not None
    return int(found[1]) * 1024


async def until_ready(agent: AgentProcess, http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(30):
        while (await http.get(f"{agent.admin_url}/ready")).status_code != 200:  # noqa: ASYNC110  it is asked
            await asyncio.sleep(0.05)


LIMIT, TLS_LIMIT = 64 * 2**20, 128 * 2**20  # of its container


@pytest.mark.parametrize(
    ("adapters", "most_bytes", "speaks_tls"),
    [(100, 60_000_000, False), (1000, LIMIT - 2_000_000, False), (1000, TLS_LIMIT - 2_000_000, True)],
)
async def test_the_agent_has_less_than_60_megabytes_whatever_it_is_asked(
    adapters: int, most_bytes: int, speaks_tls: bool, tmp_path: Path
):
    """As in its image, which has no rich: structlog would import it. A pod gives it 64 MiB, for a thousand adapters."""
    files = mounted(tmp_path / "tls")
    tls, flags = (Certificate(files.folder).context, tls_flags(files)) if speaks_tls else (None, ())
    async with (
        listening(StandIn(adapters={f"a{n}": "/tmp" for n in range(adapters)}), tls=tls) as engine,
        an_agent(engine.url, *flags, without_rich=True) as agent,
        httpx.AsyncClient(timeout=60, verify=client_context(files.bundle)) as http,
    ):
        await until_ready(agent, http)
        seen = {"start": resident(agent.process.pid)}
        for path in ("/signals", "/state", "/adapters", "/metrics", "/model"):
            answers = await asyncio.gather(*(http.get(f"{agent.admin_url}{path}", headers=HEADERS) for _ in range(40)))
            assert {answer.status_code for answer in answers} == {200}, path
            seen[path] = resident(agent.process.pid)
        engine.endless = "/metrics"
        await asyncio.gather(*(http.get(f"{agent.admin_url}/signals", headers=HEADERS) for _ in range(10)))
        seen["an endless page"] = resident(agent.process.pid)
        big = b'{"reason": "' + b"x" * 60_000 + b'"}'
        await asyncio.gather(*(http.post(f"{agent.admin_url}/sleep", headers=HEADERS, content=big) for _ in range(40)))
        seen["big bodies"] = resident(agent.process.pid)
        print(seen)
        assert max(seen.values()) < most_bytes, seen
        assert "torch" not in read_file(f"/proc/{agent.process.pid}/maps")


async def test_a_hook_drains_and_then_lets_the_engine_end(tmp_path: Path):
    file = tmp_path / "drained"
    file.write_text("of an earlier start")
    async with (
        listening(StandIn()) as engine,
        an_agent(engine.url, "--drained-file", str(file)) as agent,
        httpx.AsyncClient(timeout=60) as http,
    ):
        await until_ready(agent, http)
        assert not file.exists()
        body = {"model": "tiny", "max_tokens": 200, "stream": True}
        async with http.stream("POST", f"{engine.url}/v1/completions", json=body) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            hook = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "slipway_agent.main", "drain"),
                env={**os.environ, "SLIPWAY_RUN_DIR": str(agent.run_directory)},
            )
            await agent.logged("draining")
            assert (await http.get(f"{agent.admin_url}/ready")).status_code == 503
            assert hook.returncode is None
            assert not file.exists(), "a request runs"
            rest = [line async for line in lines if line]
            assert rest[-1] == "data: [DONE]"
        async with asyncio.timeout(30):
            assert await hook.wait() == 0
        assert file.read_text() == "drained\n"


async def test_a_hook_ends_at_the_deadline_although_a_request_runs(tmp_path: Path):
    file = tmp_path / "drained"
    async with (
        listening(StandIn(loads=1)) as engine,
        an_agent(engine.url, "--drained-file", str(file), "--drain-timeout", "1") as agent,
        httpx.AsyncClient(timeout=60) as http,
    ):
        await until_ready(agent, http)
        hook = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "slipway_agent.main", "drain"),
            env={**os.environ, "SLIPWAY_RUN_DIR": str(agent.run_directory)},
        )
        async with asyncio.timeout(30):
            assert await hook.wait() == 0
        assert file.read_text() == "the deadline has passed\n"
        signals = (await http.get(f"{agent.admin_url}/signals", headers=HEADERS)).json()
        assert (signals["draining"], signals["running"]) == (True, 1), "the operator is not told that it is over"


async def test_a_hook_waits_for_no_engine_that_can_finish_nothing(tmp_path: Path):
    """A liveness probe restarts only the engine's container: nobody drains, and its hook must not wait for a drain."""
    file, engine = tmp_path / "drained", StandIn(health_status=503)

    async def until(exists: bool) -> None:
        async with asyncio.timeout(20):
            while file.exists() != exists:  # noqa: ASYNC110  another process writes it
                await asyncio.sleep(0.05)

    dialect = json.loads(vllm_dialect())
    dialect["probe"] |= {"timeoutSeconds": 1, "unreadyAfterSeconds": 2, "restartAfterSeconds": 10}
    async with (
        listening(engine) as server,
        an_agent(server.url, "--drained-file", str(file), dialect=json.dumps(dialect)) as agent,
        httpx.AsyncClient(timeout=60) as http,
    ):
        await until(True)
        assert file.read_text() == "the engine cannot finish requests\n"  # it starts: a failed start ends immediately

        engine.health_status = 200
        await until_ready(agent, http)
        await until(False)

        engine.health_status = 500
        await until(True)
        engine.health_status = 200
        await until(False)

        engine.hang = {"/health"}
        async with asyncio.timeout(30):
            while (await http.get(f"{agent.admin_url}/ready")).status_code == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert not file.exists(), "it is silent, and may still finish what it has"
        await until(True)


def test_a_hook_without_an_agent_has_nothing_to_drain(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("SLIPWAY_RUN_DIR", str(tmp_path))
    assert run(["drain"]) == 0
    assert "nothing to drain" in capsys.readouterr().err


async def test_the_boot_list_is_loaded_before_the_replica_is_ready_and_after_a_restart_of_the_engine(tmp_path: Path):
    listed = tmp_path / "adapters.json"
    adapters = [{"name": "one", "uri": f"file://{tmp_path}", "version": "v1"}, {"name": "two", "uri": "s3://b/x"}]
    listed.write_text(json.dumps({"adapters": adapters}))
    async with (
        listening(StandIn(load_seconds=0.5)) as engine,
        an_agent(engine.url, "--max-adapters", "2", boot_list=listed) as agent,
        httpx.AsyncClient(timeout=60) as http,
    ):
        await agent.logged("the engine is well")
        warming = await http.get(f"{agent.admin_url}/ready")
        assert (warming.status_code, warming.json()["reason"]) == (503, "WarmingUp")
        await until_ready(agent, http)
        assert engine.adapters == {"one": str(tmp_path)}
        refused = await agent.logged("adapter of the boot list")
        assert refused["adapter"] == "two"
        listing = (await http.get(f"{agent.admin_url}/adapters", headers=HEADERS)).json()
        assert listing["adapters"][0]["version"] == "v1"
        engine.adapters.clear()
        engine.start_time = 2.0
        await http.get(f"{agent.admin_url}/signals", headers=HEADERS)
        async with asyncio.timeout(10):
            while engine.adapters != {"one": str(tmp_path)}:  # noqa: ASYNC110  the engine does not tell
                await asyncio.sleep(0.05)


async def test_no_text_of_requests_answers_or_tokens_is_logged():
    async with listening(StandIn()) as engine, an_agent(engine.url) as agent, httpx.AsyncClient(timeout=60) as http:
        await until_ready(agent, http)
        engine.page = b"vllm:num_requests_running SECRETTEXT\n"
        await http.get(f"{agent.admin_url}/signals", headers=HEADERS)
        uri = "hf://SECRETTEXT/x?token=SECRETTEXT"
        body = {"name": "one", "uri": uri, "credentials": {"HF_TOKEN": "SECRETTEXT"}}
        await http.post(f"{agent.admin_url}/adapters", headers=HEADERS, json=body)
        await http.post(f"{agent.admin_url}/drain", headers={HEADER_ADMIN_TOKEN: "SECRETTEXT"})
        await http.request("SECRETTEXT", f"{agent.admin_url}/signals")
        agent.process.terminate()
        assert await agent.process.wait() == 0, "SIGTERM ends it cleanly"
        await asyncio.sleep(0.2)
    assert agent.log
    assert "SECRETTEXT" not in json.dumps(agent.log)
    assert TOKEN not in json.dumps(agent.log)


async def test_strangers_take_few_connections_and_little_time(monkeypatch):
    async with listening(StandIn()) as engine, an_agent(engine.url) as agent, httpx.AsyncClient(timeout=60) as http:
        await until_ready(agent, http)
        port = int(agent.admin_url.rpartition(":")[2])
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(126)]
        assert (await http.get(f"{agent.admin_url}/ready")).status_code == 200
        more = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        for reader, _ in more[2:]:
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
        started = asyncio.get_running_loop().time()
        for reader, _ in idle:
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
        assert asyncio.get_running_loop().time() - started < 15, "headers that do not come are not waited for"
        assert (await http.get(f"{agent.admin_url}/ready")).status_code == 200
        for _, writer in idle + more:
            writer.close()


async def test_a_body_beyond_the_limit_is_refused_unread():
    async with listening(StandIn()) as engine, an_agent(engine.url) as agent, httpx.AsyncClient(timeout=60) as http:
        await until_ready(agent, http)
        answer = await http.post(f"{agent.admin_url}/drain", headers=HEADERS, content=b" " * 100_000)
        assert (answer.status_code, answer.json()["error"]["type"]) == (413, "RequestTooLargeError")
        assert (await http.get(f"{agent.admin_url}/ready")).status_code == 200


@pytest.mark.parametrize(
    ("argv", "environment", "sentence"),
    [
        ([], {}, "no dialect: set SLIPWAY_DIALECT"),
        ([], {ENV_DIALECT: "{}"}, "the dialect is invalid: engine"),
        (["--dialect", "/nowhere"], {}, "the dialect cannot be read: /nowhere"),
        (["--engine-url", "http://10.0.0.1:8000"], {}, "the engine runs in the same pod"),
        (["--engine-url", "https://127.0.0.1:8000"], {}, "the engine runs in the same pod"),
        (["--admin-port", "70000"], {}, "--admin-port '70000' must be a number between 0 and 65535"),
        ([], {"SLIPWAY_MAX_ADAPTERS": "-1"}, "--max-adapters '-1' must be a number"),
        ([], {"SLIPWAY_ADMIN_TOKEN_SHA256": "abc"}, "digests of 64 lower-case hex digits"),
        ([], {"SLIPWAY_LOG_LEVEL": "loud"}, "--log-level 'loud' must be one of"),
    ],
)
def test_a_wrong_setting_is_named(argv: list[str], environment: dict[str, str], sentence: str):
    given = {ENV_DIALECT: vllm_dialect()} | environment if environment or argv else environment
    with pytest.raises(SettingsError, match=re.escape(sentence)):
        serve_settings(parse_arguments(argv, given), given)


def test_a_pod_sets_everything_by_variables_and_without_a_token_the_port_is_local():
    given = {
        ENV_DIALECT: vllm_dialect(),
        "SLIPWAY_ENGINE_URL": "http://127.0.0.1:9000",
        "SLIPWAY_SERVED_NAME": "chat",
        "SLIPWAY_REVISION": "rev7",
        "SLIPWAY_MAX_NUM_SEQS": "8",
        "SLIPWAY_MAX_ADAPTERS": "0",
        "SLIPWAY_DRAIN_TIMEOUT": "60",
        "SLIPWAY_DRAINED_FILE": "/run/slipway/drained",
    }
    settings = serve_settings(parse_arguments([], given), given)
    assert (settings.engine_url, settings.served_name, settings.revision) == ("http://127.0.0.1:9000", "chat", "rev7")
    assert (settings.max_num_seqs, settings.max_adapters, settings.drain_timeout_seconds) == (8, 0, 60)
    assert settings.drained_file == Path("/run/slipway/drained")
    assert settings.bind == "127.0.0.1"
    open_ = given | {"SLIPWAY_ADMIN_TOKEN_SHA256": "0" * 64}
    assert serve_settings(parse_arguments([], open_), open_).bind == "::"


def test_a_wrong_setting_is_one_sentence_and_exit_code_2():
    done = subprocess.run(
        [sys.executable, "-m", "slipway_agent.main"], capture_output=True, text=True, check=False, env={"PATH": ""}
    )
    assert done.returncode == 2
    assert done.stderr == "slipway-agent: no dialect: set SLIPWAY_DIALECT, or name a file with --dialect\n"
