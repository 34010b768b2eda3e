"""A source behind a private certificate authority and a proxy: what a replica's environment makes of both, for real."""

import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.pki import Authority
from slipway_operator.core.service.model import model_access
from tests.builders import a_service
from tests.runtime.storage.hub import a_hub
from tests.runtime.storage.origin import Origin, a_model, an_origin

HOST = "models.example.internal"  # no resolver knows it: only the proxy does
FETCH = """
import sys
from pathlib import Path
from slipway_runtime.storage.fetch import FetchError, RetryPolicy, fetch
try:
    print("here", fetch(sys.argv[1], cache=Path(sys.argv[2]), retry=RetryPolicy(attempts=1)))
except FetchError as error:
    sys.exit(f"refused: {error}")
"""


class Proxy:
    """An HTTP proxy: CONNECT to HOST leads to a server that speaks TLS with the authority's certificate."""

    def __init__(self, behind: int, trust: ssl.SSLContext) -> None:
        self.asked: list[str] = []
        self._behind, self._trust = behind, trust
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += client.recv(1)
        self.asked.append(head.split(b"\r\n")[0].decode())
        client.sendall(b"HTTP/1.1 200 connected\r\n\r\n")
        try:
            inside = self._trust.wrap_socket(client, server_side=True)
        except (ssl.SSLError, OSError):
            return  # the client does not trust us
        server = socket.create_connection(("127.0.0.1", self._behind))
        threading.Thread(target=copy, args=(inside, server), daemon=True).start()
        copy(server, inside)


def copy(source: Any, target: Any) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass
    finally:
        for one in (source, target):
            one.close()


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    folder = tmp_path / "pki"
    folder.mkdir()
    Authority(folder, "ca").issue("server", "models", serves=[HOST])
    return folder


def behind_tls(port: int, certificates: Path) -> Proxy:
    trust = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trust.load_cert_chain(certificates / "server.crt", certificates / "server.key")
    return Proxy(port, trust)


@pytest.fixture
def origin() -> Iterator[Origin]:
    with an_origin() as origin:
        origin.files = a_model(1 << 16)
        yield origin


def fetch(uri: str, cache: Path, network: dict[str, Any], certificates: Path) -> subprocess.CompletedProcess[str]:
    """Fetch in a process with the variables that a pod of a service with this network gets."""
    model = a_service(uri="hf://org/model", model={"network": network}).spec.model
    variables = {one["name"]: one["value"] for one in model_access.environment(model)}
    for name in ("SSL_CERT_FILE", "AWS_CA_BUNDLE"):
        if name in variables:
            variables[name] = str(certificates / variables[name].rpartition("/")[2])
    own = {"PATH": os.environ["PATH"], "HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1"}
    return subprocess.run(
        [sys.executable, "-c", FETCH, uri, str(cache)], env=own | variables, capture_output=True, text=True, timeout=60
    )


@pytest.mark.capability("PL-7")
def test_a_private_source_is_reached_through_the_proxy_and_trusted_by_its_own_authority(
    origin: Origin, certificates: Path, tmp_path: Path
):
    proxy = behind_tls(int(origin.url.rpartition(":")[2]), certificates)
    network = {"proxy": proxy.url, "caBundleRef": {"name": "corporate-ca"}}

    done = fetch(f"https://{HOST}/tiny", tmp_path / "cache", network, certificates)
    proxy.close()

    assert done.returncode == 0, done.stderr
    assert origin.sent["/tiny/model.safetensors"] >= len(origin.files["/tiny/model.safetensors"])
    assert {line.split()[1] for line in proxy.asked} == {f"{HOST}:443"}


@pytest.mark.capability("PL-7")
def test_without_the_bundle_the_private_source_is_not_trusted(origin: Origin, certificates: Path, tmp_path: Path):
    proxy = behind_tls(int(origin.url.rpartition(":")[2]), certificates)

    done = fetch(f"https://{HOST}/tiny", tmp_path / "cache", {"proxy": proxy.url}, certificates)
    proxy.close()

    assert done.returncode != 0
    assert origin.sent == {}


@pytest.mark.capability("PL-7")
def test_a_private_hub_is_reached_the_same_way(certificates: Path, tmp_path: Path):
    with a_hub() as hub:
        hub.repositories["org/model"] = {"main": hub_files()}
        proxy = behind_tls(int(hub.url.rpartition(":")[2]), certificates)
        network = {
            "hubEndpoint": f"https://{HOST}",
            "proxy": proxy.url,
            "caBundleRef": {"name": "corporate-ca", "key": "ca.crt"},
        }

        done = fetch("hf://org/model@main", tmp_path / "cache", network, certificates)
        proxy.close()

    assert done.returncode == 0, done.stderr
    assert proxy.asked


def hub_files() -> dict[str, bytes]:
    return {name.removeprefix("/tiny/"): content for name, content in a_model(1 << 16).items()}
