"""`kubectl slipway why` joins the accounts of a real gateway and a real runtime with the operator's decisions."""

import base64
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from typer.testing import CliRunner

from bench.servers import MODEL_NAME, Server, a_gateway, a_runtime
from slipway_api import internal_tls, names
from slipway_api.admin_token import admin_token
from slipway_cli.cluster import Cluster, ClusterError
from slipway_cli.main import app
from slipway_cli.traces import BadInputError
from slipway_cli.why import join_account

pytestmark = pytest.mark.timeout(180)

SYSTEM = "slipway-system"
SECRET = "a bear called Quillington"
GATEWAY_KEY, OLD_MASTER, MASTER = b"key of the gateway", b"master before the rotation", b"master"


def a_pod(name: str, component: str, volume: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": SYSTEM, "labels": {"app.kubernetes.io/component": component}},
        "spec": {"containers": [], "volumes": [{"name": volume, "secret": {"secretName": volume}}]},
    }


@dataclass
class ApiServer:
    """What `why` reads of an API server; it passes requests for admin ports on to real processes, as `pods/proxy`."""

    ports: dict[str, tuple[str, str]] = field(default_factory=dict)  # namespace/pod -> base URL, token
    objects: dict[str, Any] = field(default_factory=dict)  # path -> body
    speak_tls: set[str] = field(default_factory=set)  # pods
    url: str = ""

    def answer(self, path: str, token: str) -> tuple[int, bytes]:
        parts = urlsplit(path)
        place, is_proxied, rest = parts.path.partition(f":{names.ADMIN_PORT}/proxy")
        if is_proxied:
            _, _, _, _, namespace, _, target = place.split("/")
            pod = target.removeprefix("https:")
            if target.startswith("https:") != (pod in self.speak_tls):
                return 503, b'{"message": "tls: first record does not look like a TLS handshake"}'
            url, expected = self.ports[f"{namespace}/{pod}"]
            if token != expected:
                return 401, b'{"message": "wrong token"}'
            try:
                with urllib.request.urlopen(f"{url}{rest}?{parts.query}") as response:
                    return response.status, response.read()
            except urllib.error.HTTPError as error:
                return error.code, error.read()
        if parts.path in self.objects:
            return 200, json.dumps(self.objects[parts.path]).encode()
        return 404, b'{"message": "not found"}'


@contextmanager
def serving(api: ApiServer) -> Iterator[ApiServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = api.answer(self.path, self.headers.get(names.HEADER_ADMIN_TOKEN, ""))
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    api.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield api
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def runtime() -> Iterator[Server]:
    with a_runtime("--revision", "r1") as server:
        yield server


@pytest.fixture(scope="module")
def gateway(runtime: Server) -> Iterator[Server]:
    with a_gateway((MODEL_NAME, runtime.url)) as server:
        yield server


@pytest.fixture
def api(runtime: Server, gateway: Server) -> Iterator[ApiServer]:
    pods = f"/api/v1/namespaces/{SYSTEM}/pods"
    secrets = f"/api/v1/namespaces/{SYSTEM}/secrets"
    found = ApiServer(
        ports={
            f"{SYSTEM}/gateway-a": (gateway.admin_url, admin_token(GATEWAY_KEY, SYSTEM, "gateway-a")),
            # A pod from before the rotation of the master.
            "static/tiny-0": (runtime.admin_url, admin_token(OLD_MASTER, "static", "tiny-0", "n0")),
        },
        objects={
            pods: {"items": [a_pod("gateway-a", "gateway", "gateway-key"), a_pod("op", "operator", "admin-master")]},
            f"{secrets}/gateway-key": {"data": {"current": base64.b64encode(GATEWAY_KEY).decode()}},
            f"{secrets}/admin-master": {
                "data": {
                    "current": base64.b64encode(MASTER).decode(),
                    "previous": base64.b64encode(OLD_MASTER).decode(),
                }
            },
            "/api/v1/namespaces/static/pods/tiny-0": {
                "metadata": {
                    "name": "tiny-0",
                    "namespace": "static",
                    "annotations": {names.ANNOTATION_ADMIN_NONCE: "n0"},
                },
                "spec": {"containers": []},
            },
            f"/apis/{names.GROUP}/{names.VERSION}/namespaces/static/inferenceservices/tiny": {
                "status": {
                    "autoscaling": {
                        "history": [
                            {"time": "2099-01-01T00:00:00Z", "from": 2, "to": 3, "reason": "of the future"},
                            {"time": "2020-01-02T00:00:00Z", "from": 1, "to": 2, "reason": "KVCacheUtilization 0.93"},
                            {"time": "2020-01-01T00:00:00Z", "from": 0, "to": 1, "reason": "the first request"},
                        ]
                    }
                }
            },
        },
    )
    with serving(found):
        yield found


def why(api: ApiServer, folder: Path, request_id: str, *more: str):
    file = folder / "kubeconfig"
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [context],
        "clusters": [{"name": "c", "cluster": {"server": api.url}}],
        "users": [{"name": "u", "user": {}}],
    }
    file.write_text(yaml.safe_dump(config))
    try:
        return CliRunner().invoke(app, ["--kubeconfig", str(file), "why", request_id, *more])
    finally:
        Cluster.kubeconfig = None


@pytest.mark.capability("SE-10", "UX-1")
def test_ports_that_speak_tls_are_read_by_https(api: ApiServer, gateway: Server, tmp_path: Path):
    asked = urllib.request.Request(
        f"{gateway.url}/v1/completions",
        json.dumps({"model": MODEL_NAME, "prompt": "Once", "max_tokens": 2}).encode(),
        {"Content-Type": "application/json", "X-Request-Id": "by-tls"},
    )
    with urllib.request.urlopen(asked) as answer:
        assert answer.status == 200
    api.speak_tls = {"gateway-a", "tiny-0"}
    failed = why(api, tmp_path, "by-tls")
    assert failed.exit_code != 0, "a pod without the volume is called in plain text"

    pods = f"/api/v1/namespaces/{SYSTEM}/pods"
    certificate = {"name": internal_tls.VOLUME, "secret": {"secretName": "any"}}
    api.objects[pods]["items"][0]["spec"]["volumes"].append(certificate)
    api.objects["/api/v1/namespaces/static/pods/tiny-0"]["spec"]["volumes"] = [certificate]
    (account,) = json.loads(why(api, tmp_path, "by-tls", "-o", "json").output)
    assert account["missing"] == []


def chat(gateway: Server, request_id: str, **more: Any) -> int:
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": f"Tell me of {SECRET}. " * 20}]}
    request = urllib.request.Request(
        f"{gateway.url}/v1/chat/completions",
        json.dumps(body | {"max_tokens": 8} | more).encode(),
        {"Content-Type": "application/json", names.HEADER_REQUEST_ID: request_id},
    )
    try:
        with urllib.request.urlopen(request) as response:
            response.read()
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.capability("OB-12")
def test_one_account_joins_gateway_replica_and_operator(api: ApiServer, gateway: Server, tmp_path: Path):
    chat(gateway, "warm-the-cache")
    assert chat(gateway, "req-1", stream=True) == 200

    table, plain = why(api, tmp_path, "req-1"), why(api, tmp_path, "req-1", "-o", "json")

    assert table.exit_code == 0, table.output
    (account,) = json.loads(plain.output)
    texts = {
        part: [one["text"] for one in account["steps"] if one["part"].startswith(part)]
        for part in ("gateway", "replica", "operator")
    }
    # On a busy machine one step more: a wait of milliseconds for a ready replica.
    (sent,) = [text for text in texts["gateway"] if "sent to static/tiny-0" in text]
    assert "the only replica" in sent
    assert "status 200" in texts["gateway"][-1]
    assert "queued for" in texts["replica"][0]
    prefill, decode = texts["replica"][1:]
    cached = int(prefill.rpartition(" of them from the prefix cache")[0].rpartition(" ")[2])
    assert cached > 0, "the same prompt was sent twice"
    assert "8 tokens" in decode or "it ended with stop" in decode
    assert texts["operator"] == ["Replicas: 1 → 2; KVCacheUtilization 0.93"], "the last decision before it, no other"
    assert account["missing"] == []
    moments = [one["at"] for one in account["steps"] if one["at"] is not None and one["part"].startswith("replica")]
    assert moments == sorted(moments)
    assert SECRET not in table.output + plain.output


@pytest.mark.capability("OB-12")
def test_a_refused_request_has_an_account_too(api: ApiServer, gateway: Server, tmp_path: Path):
    assert chat(gateway, "req-400", max_tokens=-1) == 400

    result = why(api, tmp_path, "req-400")

    assert result.exit_code == 0
    assert "status 400" in result.output


@pytest.mark.capability("OB-12")
def test_an_unknown_request_is_one_sentence(api: ApiServer, tmp_path: Path):
    result = why(api, tmp_path, "nobody-sent-this")

    assert isinstance(result.exception, ClusterError)
    assert str(result.exception).startswith("no gateway has an account of nobody-sent-this: ")


@pytest.mark.parametrize("hostile", ["x" * 129, "a b", "id?x=1", "<script>", "ü"])
def test_hostile_ids_are_refused_by_every_part(
    hostile: str, api: ApiServer, gateway: Server, runtime: Server, tmp_path
):
    result = why(api, tmp_path, hostile)

    assert isinstance(result.exception, BadInputError)
    quoted = urllib.request.quote(hostile)
    for server in (gateway, runtime):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{server.admin_url}{names.PATH_REQUESTS}?id={quoted}")
        assert refused.value.code == 400
        assert hostile not in refused.value.read().decode()


@pytest.mark.capability("OB-12")
def test_a_part_that_cannot_be_read_is_named(api: ApiServer, gateway: Server, tmp_path: Path):
    chat(gateway, "req-2")
    del api.objects[f"/api/v1/namespaces/{SYSTEM}/secrets/admin-master"]

    result = why(api, tmp_path, "req-2", "-o", "json")

    (account,) = json.loads(result.output)
    assert account["missing"] == [
        "The replica static/tiny-0 could not be read: Secret slipway-system/admin-master: not found."
    ]
    assert any(one["part"].startswith("gateway") for one in account["steps"])


@pytest.mark.capability("OB-12")
def test_a_foreign_engine_has_no_part(api: ApiServer, gateway: Server, tmp_path: Path):
    """An engine's agent answers 404 for this path, as the admin port of the gateway does for an unknown one."""
    chat(gateway, "req-3")
    token = admin_token(MASTER, "static", "tiny-0", "n0")
    api.ports["static/tiny-0"] = (f"{gateway.admin_url}/no-such-part", token)

    (account,) = json.loads(why(api, tmp_path, "req-3", "-o", "json").output)

    assert account["missing"] == [
        "The engine of static/tiny-0 keeps no accounts of requests; only Slipway's runtime does."
    ]


@pytest.mark.capability("OB-12")
def test_a_replica_that_is_gone_is_named(api: ApiServer, gateway: Server, tmp_path: Path):
    chat(gateway, "req-4")
    del api.objects["/api/v1/namespaces/static/pods/tiny-0"]

    (account,) = json.loads(why(api, tmp_path, "req-4", "-o", "json").output)

    assert account["missing"] == ["The replica static/tiny-0 no longer exists, and its account is gone with it."]


def a_request(*attempts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "requestId": "r", "path": "/v1/chat/completions", "startedAt": "2026-01-01T00:00:00+00:00", "isOpen": False,
        "model": "chat", "service": "team/chat", "adapter": "", "revision": "r1", "endpoint": "team/chat-1",
        "tenant": "search", "stream": True, "status": 200, "finish": "stop", "error": "", "tenantLimit": "",
        "degraded": "", "fallbackFrom": "", "handovers": 0, "inputTokens": 5, "cachedTokens": 0, "outputTokens": 7,
        "isEstimated": False, "readAt": 0.001, "admittedAt": 2.5, "firstByteAt": 3.0, "endedAt": 9.0,
        "ageSeconds": 9.0, "attempts": list(attempts), **more,
    }  # fmt: skip


def an_attempt(endpoint: str, kind: str = "first", at: float = 2.5, **more: Any) -> dict[str, Any]:
    return {
        "kind": kind, "endpoint": endpoint, "revision": "r1", "at": at, "pickedFor": "only", "cause": "",
        "failure": "", "considered": [], **more,
    }  # fmt: skip


@pytest.mark.capability("OB-12")
def test_waits_scores_and_handovers_are_told_in_their_order():
    best = {"score": 0.93, "matchedTokens": 512, "loadTokens": 9, "kvUsage": 0.4, "isHome": True}
    other = {"score": 0.11, "matchedTokens": 0, "loadTokens": 0, "kvUsage": None, "isHome": False}
    scored = [{"endpoint": "team/chat-0", **best}, {"endpoint": "team/chat-1", **other}]
    request = a_request(
        an_attempt("team/chat-0", pickedFor="best_score", considered=scored, failure="connection lost"),
        an_attempt("team/chat-1", "handover", 5.0, cause="lost"),
        handovers=1,
    )
    during = {"time": "2026-01-01T00:00:04Z", "from": 2, "to": 3, "reason": "queue"}

    account = join_account("gw", request, {}, [during])

    assert [one.text for one in account.steps] == [
        "The whole request was read after 1.0 ms.",
        "It waited 2.50 s for a ready replica.",
        "It was sent to team/chat-0 (revision r1): its score 0.93 was the best of 2 compared replicas; "
        "about 512 tokens of the prompt were sent there before.",
        "The attempt at team/chat-0 failed: connection lost.",
        "The stream broke off (lost) and continued on team/chat-1 (revision r1): "
        "it was the only replica that could take it.",
        "The first byte came after 3.00 s.",
        "It ended with status 200, stop; 5 tokens in, 7 out.",
        "Replicas: 2 → 3; queue",
    ]
    assert account.considered == scored


def test_the_routes_of_a_gateway_are_read_with_its_token(api: ApiServer, tmp_path: Path):
    """The bundle's routes were never collected: the client of Kubernetes 37 takes other arguments."""
    why(api, tmp_path, "anything")  # writes the kubeconfig
    Cluster.kubeconfig = str(tmp_path / "kubeconfig")
    try:
        cluster = Cluster()
        (pod,) = [one for one in cluster.installation_pods(SYSTEM) if one["metadata"]["name"] == "gateway-a"]
        assert [one["model"] for one in cluster.gateway_routes(pod)["services"]] == [MODEL_NAME]
    finally:
        Cluster.kubeconfig = None
