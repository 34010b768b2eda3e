"""An address that a client names reaches public hosts only, and none of the credentials of the process."""

import http.server
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.pki import Authority
from slipway_runtime import serve
from slipway_runtime.command_line import parse_arguments, serve_settings
from slipway_runtime.settings import BootAdapter, RuntimeSettings
from slipway_runtime.storage import public_network
from slipway_runtime.storage.address import Access, S3Model, lies_under
from slipway_runtime.storage.fetch import FetchError, RetryPolicy, fetch
from slipway_runtime.storage.source import Interrupted
from slipway_runtime.storage.web import Web
from tests.runtime.storage.hub import a_hub
from tests.runtime.storage.origin import Origin, a_model, an_origin
from tests.runtime.storage.test_private_network import hub_files

pytestmark = pytest.mark.capability("SE-2")

HOST = "models.example.com"
SECRETS = {
    "HF_TOKEN": "hf_s3cret",
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "s3cret",
    "AWS_SESSION_TOKEN": "session",
    "HTTP_BEARER_TOKEN": "bearer",
}


@pytest.fixture
def origin() -> Iterator[Origin]:
    with an_origin() as origin:
        origin.files = a_model(1 << 16)
        yield origin


class Resolver:
    """A name server for HOST that gives each of its answers once, the last one for ever; 127.0.0.1 counts as public."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
        self.asked: list[str] = []
        self._answers = list(answers)
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self.resolve)
        monkeypatch.setattr(public_network, "is_public", lambda address: address == "127.0.0.1")

    def resolve(self, host: Any, port: Any, *rest: Any, **more: Any) -> Any:
        if host != HOST:
            return self._real(host, port, *rest, **more)
        self.asked.append(host)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return self._real(answer, port, *rest, **more)


def test_the_address_that_was_checked_is_the_one_that_is_connected_to(origin: Origin, monkeypatch: pytest.MonkeyPatch):
    """DNS rebinding: the second answer of a name server leads inwards, and nobody asks for it."""
    resolver = Resolver(monkeypatch, "127.0.0.1", "127.0.0.2")
    web = Web({}, public_only=True)

    head = web.head(f"{origin.url.replace('127.0.0.1', HOST)}/tiny/config.json")
    web.close()

    assert head is not None
    assert head.size == len(origin.files["/tiny/config.json"])
    assert len(resolver.asked) == 1


def test_a_name_with_one_private_address_is_refused(origin: Origin, monkeypatch: pytest.MonkeyPatch):
    Resolver(monkeypatch, "127.0.0.2")
    with pytest.raises(FetchError, match=f"{HOST} is an address of a private network"):
        Web({}, public_only=True).head(f"{origin.url.replace('127.0.0.1', HOST)}/tiny/config.json")

    assert not origin.asked


@pytest.mark.parametrize(("certified", "is_trusted"), [(HOST, True), ("other.example.com", False)])
def test_the_certificate_is_checked_for_the_name_and_not_for_the_address(
    certified: str, is_trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hosts: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hosts.append(self.headers["Host"])
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    Authority(tmp_path, "ca").issue("server", "models", serves=[certified])
    trust = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trust.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.socket = trust.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.crt"))
    Resolver(monkeypatch, "127.0.0.1")
    url = f"https://{HOST}:{server.server_address[1]}/file"
    try:
        if is_trusted:
            assert Web({}, public_only=True).head(url) is not None
            assert hosts == [url.split("/")[2]]
        else:
            with pytest.raises(Interrupted):
                Web({}, public_only=True).head(url)
            assert hosts == []
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("uri", "folder", "lies"),
    [
        ("hf://org/name@rev", "hf://org/name", True),
        ("hf://org/name", "hf://org/name@rev", True),
        ("hf://org/other", "hf://org/name", False),
        ("hf://org/name-too", "hf://org/name", False),
        ("hf://org/name", "hf://org", True),
        ("hf://organisation/name", "hf://org", False),
        ("s3://bucket/adapters/a", "s3://bucket/adapters/", True),
        ("s3://bucket/adapters-of-others/a", "s3://bucket/adapters", False),
        ("s3://bucket/adapters/../secret", "s3://bucket/adapters", False),
        ("s3://bucket/adapters/%2E%2e/secret", "s3://bucket/adapters", False),
        ("s3://bucket/a", "s3://bucket", True),
        ("s3://bucket-2/a", "s3://bucket", False),
        ("https://host/models/a", "https://host/models", True),
        ("http://host/models/a", "https://host/models", False),
        ("https://host/other", "https://host/models", False),
        ("hf://org/name", "", False),
    ],
)
def test_which_addresses_lie_under_another(uri: str, folder: str, lies: bool):
    assert lies_under(uri, [folder]) is lies


def access_of(settings: RuntimeSettings, uri: str, monkeypatch: pytest.MonkeyPatch, *, from_client: bool) -> Access:
    """The access with which an adapter at this address is fetched."""
    found: list[Access] = []
    with monkeypatch.context() as patch:
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        patch.setattr(serve, "fetch", lambda _uri, *, access, **_: found.append(access))
        serve._fetch_adapter(settings, uri, from_client, {})
    return found[0]


@pytest.mark.parametrize("uri", ["hf://org/adapter", "s3://bucket/adapter", "https://host/adapter"])
def test_a_client_reads_without_credentials_what_the_command_line_does_not_name(
    uri: str, monkeypatch: pytest.MonkeyPatch
):
    arguments = parse_arguments(["serve", "hf://base/model", "--credentials-for", uri])
    unnamed = RuntimeSettings(model_uri="hf://base/model")
    named = [
        replace(unnamed, model_uri=uri),
        replace(unnamed, adapters=(BootAdapter("a", uri),)),
        serve_settings(arguments, {}),
    ]

    stranger = access_of(unnamed, f"{uri}", monkeypatch, from_client=True)
    friends = [access_of(settings, uri, monkeypatch, from_client=True) for settings in named]
    operator = access_of(unnamed, uri, monkeypatch, from_client=False)

    assert stranger.anonymous
    assert not any((stranger.hub_token, stranger.s3_key, stranger.s3_secret, stranger.s3_session))
    assert stranger.bearer_for(uri) == ""
    for one in (*friends, operator):
        assert not one.anonymous
        assert (one.hub_token, one.s3_key) == ("hf_s3cret", "key")
    assert all(one.bearer_for(uri) == ("bearer" if "https" in uri else "") for one in friends)


def test_without_credentials_the_hub_gets_no_token_of_the_machine_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_TOKEN", "hf_s3cret")
    with a_hub() as hub:
        hub.repositories["org/model"] = {"main": hub_files()}
        sha = hub.sha("org/model", "main")
        for access in (Access(hub_endpoint=hub.url).without_credentials(), Access(hub_endpoint=hub.url)):
            hub.tokens.clear()
            fetch(f"hf://org/model@{sha}", cache=tmp_path, access=access, retry=RetryPolicy(attempts=1))
            assert {bool(token) for token in hub.tokens} == {not access.anonymous}


def test_without_credentials_the_store_is_asked_anonymously(monkeypatch: pytest.MonkeyPatch):
    import s3fs

    from slipway_runtime.storage.s3 import S3Source

    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(s3fs, "S3FileSystem", lambda **how: asked.append(how))
    access = Access.of({"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "s3cret"})
    for one in (access, access.without_credentials()):
        S3Source(S3Model("bucket", "adapters"), one)

    assert [(how["anon"], how["key"], how["secret"]) for how in asked] == [(False, "key", "s3cret"), (True, None, None)]


@pytest.mark.parametrize(
    ("hosts", "url", "is_sent"),
    [
        ("host", "https://host/a", True),
        ("host", "http://host/a", False),
        ("host:8443", "https://host:8443/a", True),
        ("host:8443", "https://host/a", False),
        ("http://host", "http://host/a", True),
        ("http://host", "https://host/a", False),
        (" https://host/ , other", "https://host/a", True),
        ("host", "https://host.example/a", False),
    ],
)
def test_a_token_for_a_host_goes_over_https_unless_http_is_named(hosts: str, url: str, is_sent: bool):
    access = Access.of({"HTTP_BEARER_TOKEN": "s3cret", "HTTP_BEARER_HOSTS": hosts})

    assert access.bearer_for(url) == ("s3cret" if is_sent else "")
    assert Access(bearer_token="s3cret").with_hosts_of("https://host/a").bearer_for("http://host/a") == ""


def test_a_download_that_takes_too_long_is_given_up(origin: Origin, tmp_path: Path):
    with pytest.raises(FetchError, match="that is too slow"):
        fetch(f"{origin.url}/tiny", cache=tmp_path, access=Access(), at_most_seconds=-1.0)
