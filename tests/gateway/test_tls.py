"""TLS on the port for clients, with real certificates: hot reload, and never plain HTTP by mistake."""

import ssl
from pathlib import Path

import aiohttp
import openai
import pytest

from e2e.cluster.pki import Authority
from slipway_api.served_certificate import CHECK_SECONDS, Certificate, CertificateError
from slipway_gateway.gateway import Gateway
from slipway_gateway.settings import GatewaySettings
from tests.gateway.doubles import Runtime, a_gateway, events_of


class Mounted:
    """A `kubernetes.io/tls` Secret as the kubelet mounts it, and the authorities that signed its certificates."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "tls"
        self.directory.mkdir()
        self._pki = directory

    def issue(self, authority: str) -> ssl.SSLContext:
        """Mount a certificate of a new authority; a client's context that trusts only this one."""
        folder = self._pki / authority
        folder.mkdir()
        Authority(folder, "ca").issue("server", "gateway", serves=["localhost", "127.0.0.1"])
        for name, source in (("tls.crt", "server.crt"), ("tls.key", "server.key")):
            self.write(name, (folder / source).read_bytes())
        return ssl.create_default_context(cafile=str(folder / "ca.crt"))

    def write(self, name: str, content: bytes) -> None:
        new = self.directory / f"..{name}"
        new.write_bytes(content)
        new.replace(self.directory / name)


async def status(port: int, trust: ssl.SSLContext) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"https://127.0.0.1:{port}/v1/models", ssl=trust) as response,
    ):
        return response.status


@pytest.mark.capability("PL-8", "SE-4")
async def test_the_stock_client_streams_over_tls(tmp_path):
    trust = Mounted(tmp_path).issue("one")
    async with (
        Runtime() as runtime,
        a_gateway(runtime, tls_directory=tmp_path / "tls") as gateway,
        openai.DefaultAsyncHttpxClient(verify=trust) as http,
    ):
        client = openai.AsyncOpenAI(base_url=f"https://localhost:{gateway.port}/v1", api_key="none", http_client=http)
        stream = await client.chat.completions.create(model="tiny", messages=[], stream=True)
        words = [part.choices[0].delta.content async for part in stream if part.choices]

    assert "".join(word or "" for word in words) == "Once upon a time."


@pytest.mark.capability("PL-8", "SE-4")
async def test_a_rotated_certificate_is_used_for_new_connections_and_running_streams_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr("slipway_api.served_certificate.CHECK_SECONDS", 0.0)
    mounted = Mounted(tmp_path)
    old = mounted.issue("one")
    held = Runtime().hold()
    held.allow(1)
    async with (
        held as runtime,
        a_gateway(runtime, tls_directory=mounted.directory) as gateway,
        aiohttp.ClientSession() as session,
        session.post(
            f"https://127.0.0.1:{gateway.port}/v1/chat/completions",
            json={"model": "tiny", "messages": [], "stream": True},
            ssl=old,
        ) as running,
    ):
        new = mounted.issue("two")

        assert await status(gateway.port, new) == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await status(gateway.port, old)
        runtime.allow(100)
        assert (await events_of(running))[-1] == "[DONE]"


@pytest.mark.capability("PL-8")
async def test_files_that_do_not_fit_together_change_nothing_until_they_do(tmp_path, monkeypatch):
    monkeypatch.setattr("slipway_api.served_certificate.CHECK_SECONDS", 0.0)
    mounted = Mounted(tmp_path)
    old = mounted.issue("one")
    first_key = (mounted.directory / "tls.key").read_bytes()
    async with Runtime() as runtime, a_gateway(runtime, tls_directory=mounted.directory) as gateway:
        new = mounted.issue("two")
        second_key = (mounted.directory / "tls.key").read_bytes()
        mounted.write("tls.key", first_key)

        assert await status(gateway.port, old) == 200
        assert "slipway_gateway_certificate_valid 0.0" in gateway.metrics.exposition().decode()
        mounted.write("tls.key", second_key)
        assert await status(gateway.port, new) == 200
        assert "slipway_gateway_certificate_valid 1.0" in gateway.metrics.exposition().decode()


async def test_a_client_without_tls_gets_no_answer(tmp_path):
    Mounted(tmp_path).issue("one")
    async with (
        Runtime() as runtime,
        a_gateway(runtime, tls_directory=tmp_path / "tls") as gateway,
        aiohttp.ClientSession() as session,
    ):
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"http://127.0.0.1:{gateway.port}/v1/models")
        async with session.get(f"http://127.0.0.1:{gateway.admin_port}/health") as response:
            assert response.status == 200, "the admin port stays plain: the kubelet asks there"


def test_the_oldest_protocol_is_tls_1_2(tmp_path):
    mounted = Mounted(tmp_path)
    mounted.issue("one")

    assert Certificate(mounted.directory).context.minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.capability("PL-8")
async def test_a_gateway_without_a_usable_certificate_does_not_start(tmp_path):
    with pytest.raises(CertificateError, match="no usable TLS certificate"):
        Gateway(GatewaySettings(static=(("tiny", "http://127.0.0.1:1"),), tls_directory=tmp_path))


def test_the_files_are_looked_at_once_a_second(tmp_path):
    mounted, now = Mounted(tmp_path), 0.0
    mounted.issue("one")
    certificate = Certificate(mounted.directory, clock=lambda: now)
    mounted.issue("two")

    certificate.refresh(CHECK_SECONDS / 2)
    assert certificate.loads == 1
    certificate.refresh(CHECK_SECONDS)
    certificate.refresh(CHECK_SECONDS * 2)
    assert certificate.loads == 2
