"""TLS between gateway, operator and replicas, with the real runtime as a process and real certificates."""

import asyncio
import os
import ssl
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import aiohttp
import pytest

from slipway_api.internal_tls import CA_FILE, gateways_name, replicas_name
from slipway_api.trust import CHECK_SECONDS, NoTrustError, Trust, TrustFile
from slipway_gateway.fleet import static_fleet
from slipway_gateway.gateway import Gateway
from slipway_gateway.settings import GatewaySettings
from slipway_operator.keepalive import KeptConnections
from slipway_operator.replica_client import Address, ReplicaClient, ReplicaUnreachable, direct
from tests.gateway.doubles import MODEL, Caller, events_of, text_of
from tests.operator.tls_files import TlsFiles
from tests.runtime.processes import Replica, serving, serving_here

pytestmark = [pytest.mark.timeout(600), pytest.mark.capability("SE-10")]

TEAM = replicas_name("team")
NO_TOKENS = SimpleNamespace(tokens=lambda *_: ["any"])  # without digests, a runtime requires none


@asynccontextmanager
async def a_gateway(replica: Replica, files: TlsFiles, *, name: str = TEAM, bundle: str | None = None, **settings):
    """A real gateway whose one replica speaks TLS under this name."""
    ca = files.folder.parent / "gateway-ca.crt"
    if bundle != "":
        ca.write_text(bundle or files.bundle)
    configured = GatewaySettings(
        static=((MODEL, replica.url),), port=0, admin_port=0, internal_ca_file=ca, loading_wait_seconds=0, **settings
    )
    fleet = static_fleet(configured.static)
    (endpoint,) = fleet.table.endpoints.values()
    fleet.set_endpoint(endpoint.name, replace(endpoint, url=replica.url.replace("http:", "https:"), tls_name=name))
    async with Gateway(configured, fleet) as gateway, aiohttp.ClientSession() as session:
        yield Caller(session, gateway)


def operator_client(replica: Replica, trust: Trust, connections: list[KeptConnections], **options) -> ReplicaClient:
    port = int(replica.admin_url.rsplit(":", 1)[1])
    connections.append(KeptConnections(trust))
    return ReplicaClient(direct(connections[-1], port=port), NO_TOKENS, **options)


def trusting(bundle: str) -> Trust:
    trust = Trust()
    trust.use(bundle)
    return trust


def address(name: str) -> Address:
    return Address("team", "chat-0-0-0", "127.0.0.1", tls_name=name)


@pytest.fixture
def files(tmp_path) -> TlsFiles:
    return TlsFiles(tmp_path / "tls")


@pytest.fixture
def kept():
    connections: list[KeptConnections] = []
    yield connections
    for one in connections:
        one.close()


async def test_both_ports_speak_tls_verify_and_rotate_without_losing_a_stream(files, kept):
    old = files.authority
    files.issue(TEAM, "*.team.svc")
    async with serving("--tls-directory", str(files.folder), "--served-name", MODEL) as replica:
        await replica.ready()
        async with a_gateway(replica, files) as caller:
            async with caller.chat(stream=True, max_tokens=200, ignore_eos=True) as running:
                first = await running.content.readline()

                # The operator renews the certificate by another authority, trusted beside the old one.
                renewed = TlsFiles(files.folder)
                both = old.certificate.decode() + renewed.bundle
                renewed.issue(TEAM, "*.team.svc")
                new = operator_client(replica, trusting(renewed.bundle), kept)
                await answers(new, address(TEAM))
                assert (files.folder.parent / "gateway-ca.crt").write_text(both)

                rest = await running.read()
                assert first.startswith(b"data: ")
                assert rest.endswith(b"data: [DONE]\n\n")
                assert b'"error"' not in rest

            async def is_served() -> bool:
                async with caller.chat(max_tokens=1) as response:
                    return response.status == 200

            async with asyncio.timeout(30):  # the gateway reads its file at most once a second
                while not await is_served():  # noqa: ASYNC110
                    await asyncio.sleep(0.1)

        # Who trusts only the old authority is refused from now on.
        with pytest.raises(ReplicaUnreachable, match="certificate verify failed"):
            await operator_client(replica, trusting(old.certificate.decode()), kept).signals(address(TEAM))


async def answers(client: ReplicaClient, where: Address) -> None:
    """Until the replica shows the new certificate: it looks at its files at most once a second."""
    async with asyncio.timeout(30):
        while True:
            try:
                await client.signals(where)
            except ReplicaUnreachable:
                await asyncio.sleep(0.1)
            else:
                return


async def test_a_wrong_name_a_stranger_and_plain_text_are_refused_on_both_sides(files, kept, tmp_path):
    files.issue(TEAM)
    stranger = TlsFiles(tmp_path / "stranger")
    async with serving_here("--tls-directory", str(files.folder), "--served-name", MODEL) as replica:
        await replica.ready()
        trust = trusting(files.bundle)
        assert await operator_client(replica, trust, kept).signals(address(TEAM))

        with pytest.raises(ReplicaUnreachable, match="Hostname mismatch"):
            await operator_client(replica, trust, kept).signals(address(replicas_name("other")))
        with pytest.raises(ReplicaUnreachable, match="certificate verify failed"):
            await operator_client(replica, trusting(stranger.bundle), kept).signals(address(TEAM))
        with pytest.raises(ReplicaUnreachable, match="no certificate authority is known"):
            await operator_client(replica, Trust(), kept).signals(address(TEAM))
        with pytest.raises(ReplicaUnreachable):  # plain text to a port that speaks TLS
            await operator_client(replica, trust, kept).signals(address(""))
        async with aiohttp.ClientSession() as session:
            for url in (replica.url, replica.admin_url):
                with pytest.raises(aiohttp.ClientError):
                    await session.get(f"{url}/health")

        async with a_gateway(replica, files, name=replicas_name("other")) as caller, caller.chat() as response:
            assert response.status == 503
        async with a_gateway(replica, files, bundle=stranger.bundle) as caller, caller.chat() as response:
            assert response.status == 503
        (tmp_path / "gateway-ca.crt").unlink()
        async with a_gateway(replica, files, bundle="") as caller, caller.chat() as response:
            assert response.status == 503
        async with a_gateway(replica, files) as caller, caller.chat(stream=True, max_tokens=4) as response:
            assert text_of(await events_of(response))


async def test_a_replica_in_plain_text_is_not_called_as_one_that_speaks_tls(files, kept):
    async with serving_here("--served-name", MODEL) as replica:
        await replica.ready()
        with pytest.raises(ReplicaUnreachable, match=r"(?i)ssl|wrong version"):
            await operator_client(replica, trusting(files.bundle), kept).signals(address(TEAM))
        async with a_gateway(replica, files) as caller, caller.chat() as response:
            assert response.status == 503


async def test_an_expired_certificate_is_refused(files, kept):
    long_ago = datetime.now(UTC) - timedelta(days=45)
    files.authority = TlsFiles(files.folder, made_at=long_ago).authority  # a year: still valid
    files.issue(TEAM, made_at=long_ago)  # 30 days: over
    async with serving_here("--tls-directory", str(files.folder), "--served-name", MODEL) as replica:
        await replica.ready()
        with pytest.raises(ReplicaUnreachable, match="certificate has expired"):
            await operator_client(replica, trusting(files.bundle), kept).signals(address(TEAM))
        async with a_gateway(replica, files) as caller, caller.chat() as response:
            assert response.status == 503


async def test_a_replica_without_a_usable_certificate_does_not_start(files):
    (files.folder / "tls.crt").write_text("not a certificate")
    with pytest.raises(AssertionError, match="no usable TLS certificate"):
        async with serving_here("--tls-directory", str(files.folder)):
            raise RuntimeError("it listens")


async def test_the_admin_port_of_a_gateway_speaks_tls_under_the_name_of_gateways(files):
    name = gateways_name("slipway-system")
    files.issue(name)
    settings = GatewaySettings(
        static=((MODEL, "http://127.0.0.1:9"),), port=0, admin_port=0, internal_tls_directory=files.folder
    )
    connections = KeptConnections(trusting(files.bundle))
    try:
        async with Gateway(settings, static_fleet(settings.static)) as gateway:
            call = ("GET", "127.0.0.1", gateway.admin_port, "/health", {}, None)
            status, _ = await connections.request(*call, tls_name=name)
            assert status == 200
            with pytest.raises(ssl.SSLCertVerificationError):
                await connections.request(*call, tls_name=TEAM)
            with pytest.raises(OSError, match=r"closed|reset|HTTP"):
                await connections.request(*call)
    finally:
        connections.close()


def test_authorities_that_cannot_be_read_change_nothing_and_are_a_fault(tmp_path):
    now = [0.0]
    files = TlsFiles(tmp_path / "tls")
    trust = TrustFile(tmp_path / CA_FILE, clock=lambda: now[0])
    with pytest.raises(NoTrustError, match="does not exist"):
        _ = trust.context
    assert not trust.is_known

    (tmp_path / CA_FILE).write_text(files.bundle)
    now[0] += CHECK_SECONDS
    first = trust.context
    assert (trust.is_known, trust.fault) == (True, "")

    (tmp_path / CA_FILE).write_text("garbage")
    os.utime(tmp_path / CA_FILE, (1, 1))
    now[0] += CHECK_SECONDS
    assert trust.context is first
    assert trust.fault

    (tmp_path / CA_FILE).write_text(files.bundle + TlsFiles(tmp_path / "next").bundle)
    now[0] += CHECK_SECONDS
    assert trust.context is not first
    assert trust.fault == ""
