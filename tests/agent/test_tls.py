"""An agent and its engine that serve TLS: what is refused, renewals, and an engine that misses one."""

import asyncio
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import httpx
import pytest

from slipway_agent.engine import Engine
from slipway_agent.engine_certificate import OUTDATED_AFTER_SECONDS, EngineCertificate
from slipway_agent.main import run
from slipway_agent.replica import Replica
from slipway_api.internal_tls import CA_FILE, replicas_name
from slipway_api.names import HEADER_ADMIN_TOKEN
from slipway_api.runtime_api import ReadyReason
from slipway_api.served_certificate import Certificate
from slipway_api.trust import Trust, TrustFile, client_context
from slipway_operator.authority import Pair, certificate_of
from tests.agent.agents import TEAM, TOKEN, WITHOUT_RICH, an_agent, mounted, tls_flags, vllm_dialect
from tests.agent.stand_in import StandIn, listening
from tests.agent.subjects import VLLM_START_SECONDS, beside_vllm
from tests.agent.test_faults import Clock, dialect
from tests.agent.test_process import resident
from tests.operator.tls_files import TlsFiles

pytestmark = pytest.mark.capability("OP-11", "SE-10")

HEADERS = {HEADER_ADMIN_TOKEN: TOKEN}
NOW = datetime.now(UTC)


def ends(pair: Pair) -> int:
    return int(certificate_of(pair).not_after.timestamp())


def of_now(files: TlsFiles) -> ssl.SSLContext:
    """What an engine serves that reads its certificate at the start and never again."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.folder / "tls.crt", files.folder / "tls.key")
    return context


@asynccontextmanager
async def beside_tls(url: str, trust: Trust, name: str = TEAM) -> AsyncIterator[Replica]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        replica = Replica(dialect(), Engine(session, url, trust=trust, name=name), clock=Clock())
        yield replica
        await replica.stop()


def trusting(files: TlsFiles) -> Trust:
    trust = Trust()
    trust.use(files.bundle)
    return trust


async def test_the_port_speaks_tls_alone_and_renews_its_certificate_for_new_connections(tmp_path: Path):
    files = mounted(tmp_path / "tls")

    async def served(port: int) -> int:
        context = client_context(files.bundle)
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=TEAM)
        facts = writer.get_extra_info("peercert")
        writer.close()
        return int(ssl.cert_time_to_seconds(facts["notAfter"]))

    async with (
        listening(StandIn(), tls=Certificate(files.folder).context) as engine,
        an_agent(engine.url, *tls_flags(files), without_rich=True) as agent,
        httpx.AsyncClient(verify=client_context(files.bundle), timeout=60) as http,
    ):
        assert (await http.get(f"{agent.admin_url}/health")).status_code == 200
        port = int(agent.admin_url.rpartition(":")[2])
        async with httpx.AsyncClient() as stranger:
            with pytest.raises(httpx.HTTPError):
                await stranger.get(f"http://127.0.0.1:{port}/health")
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                await stranger.get(f"https://localhost:{port}/health")

        renewed = files.issue(TEAM, "localhost", made_at=NOW + timedelta(minutes=30))
        async with asyncio.timeout(60):
            while await served(port) != ends(renewed):  # noqa: ASYNC110  it is asked
                await asyncio.sleep(0.1)
        assert (await http.get(f"{agent.admin_url}/health")).status_code == 200, "an open connection goes on"
        async with asyncio.timeout(60):
            while (await http.get(f"{agent.admin_url}/ready")).status_code != 200:  # noqa: ASYNC110  it is asked
                await asyncio.sleep(0.05)
        memory = resident(agent.process.pid)
        print(f"{memory} bytes")
        assert memory < 60_000_000


@pytest.mark.parametrize(
    ("engine_name", "age", "why"),
    [
        (TEAM, timedelta(0), ""),
        (replicas_name("other"), timedelta(0), "Hostname mismatch"),
        (TEAM, timedelta(days=45), "certificate has expired"),
        (None, timedelta(0), "TLS with the engine failed"),
    ],
)
async def test_an_engine_that_cannot_be_verified_is_never_ready(tmp_path: Path, engine_name, age, why):
    files = TlsFiles(tmp_path / "tls", made_at=NOW - age)
    if engine_name is not None:
        files.issue(engine_name, made_at=NOW - age)
    tls = of_now(files) if engine_name is not None else None
    async with (
        listening(StandIn(), tls=tls) as engine,
        beside_tls(engine.url.replace("http:", "https:"), trusting(files)) as replica,
    ):
        await replica.probe()
        ready = replica.ready()
        assert ready.ready == (why == "")
        assert why in ready.message


async def test_without_the_authorities_no_call_is_made(tmp_path: Path):
    files = mounted(tmp_path / "tls")
    async with (
        listening(StandIn(), tls=of_now(files)) as engine,
        beside_tls(engine.url, TrustFile(tmp_path / "absent" / CA_FILE)) as replica,
    ):
        await replica.probe()
        assert "does not exist" in replica.ready().message
        assert engine.calls == []


async def test_an_engine_whose_certificate_has_ended_is_unready_and_may_finish_its_requests(tmp_path: Path):
    files = mounted(tmp_path / "tls")
    async with listening(StandIn(), tls=of_now(files)) as engine:
        stranger = TlsFiles(tmp_path / "stranger")
        trust = trusting(files)
        async with beside_tls(engine.url, trust) as replica:
            await replica.probe()
            assert replica.ready().ready
            trust.use(stranger.bundle)  # as at the end of the certificate: new connections cannot be verified
            await replica.probe()
            replica.clock.now += dialect().probe.unready_after_seconds + 1  # type: ignore[attr-defined]
            await replica.probe()
            ready = replica.ready()
            assert ready.reason is ReadyReason.STEP_LOOP_STALLED
            assert "TLS with the engine failed" in ready.message
            assert replica.can_finish_requests, "its streams go on: no hook may end it"


async def test_an_engine_that_misses_a_renewal_is_reported_with_the_end_of_its_certificate(tmp_path: Path):
    files, clock = mounted(tmp_path / "tls"), Clock()
    old = Pair((files.folder / "tls.crt").read_bytes(), (files.folder / "tls.key").read_bytes())

    def compared(url: str) -> EngineCertificate:
        return EngineCertificate(files.folder, trusting(files), TEAM, int(url.rpartition(":")[2]), clock=clock)

    async with listening(StandIn(), tls=of_now(files)) as engine:
        one, port = compared(engine.url), int(engine.url.rpartition(":")[2])
        await one.look()
        files.issue(TEAM, made_at=NOW + timedelta(hours=1))
        await one.look()
        clock.now += OUTDATED_AFTER_SECONDS - 1
        assert one.outdated_ends() == 0, "engines that watch their files need a moment"
        clock.now += 1
        assert one.outdated_ends() == ends(old)
        async with beside_tls(engine.url, trusting(files)) as replica:
            replica.outdated_certificate_ends = one.outdated_ends
            await replica.probe()
            assert (await replica.signals()).outdated_certificate_ends == ends(old)
    await one.look()
    assert one.outdated_ends() == ends(old), "a closed port shows nothing new"
    async with listening(StandIn(), port, tls=of_now(files)):
        await one.look()
        assert one.outdated_ends() == 0, "it was restarted"

    (files.folder / "tls.crt").write_text("not a certificate")
    async with listening(StandIn(), tls=of_now(mounted(tmp_path / "other"))):
        await one.look()
        clock.now += 2 * OUTDATED_AFTER_SECONDS
        assert one.outdated_ends() == 0, "an unreadable file accuses nobody"


def test_wrong_settings_are_refused_before_the_port_is_opened(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("SLIPWAY_DIALECT", vllm_dialect())
    folder = str(tmp_path)
    flags = ["--engine-url", "https://127.0.0.1:8000", "--tls-directory", folder, "--tls-name", TEAM]
    assert run(["serve", "--engine-url", "https://127.0.0.1:8000"]) == 2
    assert run(["serve", *flags[2:]]) == 2, "in plain text to an engine that serves TLS"
    assert run(["serve", *flags[:4]]) == 2
    assert "--tls-name" in capsys.readouterr().err
    argv = [sys.executable, "-c", WITHOUT_RICH, "serve", *flags]
    started = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert started.returncode == 1
    assert "no usable TLS certificate" in started.stderr


@pytest.mark.full
@pytest.mark.timeout(VLLM_START_SECONDS + 300)
async def test_vllm_serves_tls_by_the_flags_of_the_engine_and_a_renewal_is_read_or_reported(tmp_path: Path):
    """vLLM 0.32 watches the files themselves: once they were replaced it may miss the next renewal."""
    files = mounted(tmp_path / "tls")
    async with beside_vllm(files=files) as subject:
        assert (await subject.complete()).status_code == 200
        assert (await subject.signals()).outdated_certificate_ends == 0
        port, clock = int(subject.url.rpartition(":")[2]), Clock()
        one = EngineCertificate(files.folder, trusting(files), TEAM, port, clock=clock)
        old = Pair((files.folder / "tls.crt").read_bytes(), (files.folder / "tls.key").read_bytes())
        served = ends(old)
        for hours in (1, 2):
            renewed = files.issue(TEAM, "localhost", made_at=NOW + timedelta(minutes=20 * hours))
            for _ in range(20):
                await asyncio.sleep(0.5)
                await one.look()
                clock.now += OUTDATED_AFTER_SECONDS
                if one.outdated_ends() == 0:
                    break
            is_read = one.outdated_ends() == 0
            print(f"renewal {hours}: {'read' if is_read else 'missed'}")
            assert one.outdated_ends() in (0, served)
            served = ends(renewed) if is_read else served
        assert (await subject.complete()).status_code == 200
