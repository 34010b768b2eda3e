"""The Ingress and the HTTPRoute in front of the gateway: off by default, valid, and made for streams."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from e2e import definitions
from e2e.cluster.access import Access, CommandError
from tests.chart.test_chart import of_kind, render

pytestmark = pytest.mark.apiserver

INGRESS = ("ingress.enabled=true", "ingress.hosts={llm.example.com,*.llm.example.com}")
ROUTE = ("httpRoute.enabled=true", "httpRoute.parentRefs[0].name=public", "httpRoute.parentRefs[0].namespace=infra")
NGINX = "nginx.ingress.kubernetes.io"

Manifest = dict[str, Any]


@pytest.fixture
def namespace(apiserver: Access) -> str:
    return apiserver.create_namespace()


@pytest.fixture(scope="module")
def with_routes(apiserver: Access) -> Iterator[Access]:
    """The API server with the Gateway API's standard definitions, of its own module."""
    try:
        folder = definitions.fetch(definitions.GATEWAY_API) / "config" / "crd" / "standard"
    except definitions.ModuleNotReachedError as missing:
        pytest.skip(f"the Gateway API's module cannot be fetched: {missing}")
    file = folder / "gateway.networking.k8s.io_httproutes.yaml"
    apiserver.kubectl("apply", "--server-side", "--force-conflicts", "-f", file)
    established = "jsonpath={.status.conditions[?(@.type=='Established')].status}=True"  # also before any condition
    apiserver.kubectl("wait", f"--for={established}", "-f", file, "--timeout=60s")
    yield apiserver
    apiserver.kubectl("delete", "-f", file, "--wait=false")


def entry(access: Access, kind: str, *settings: str) -> Manifest:
    return of_kind(render(access, *settings), kind)["slipway-gateway"]


def store(access: Access, manifest: Manifest, namespace: str) -> Manifest:
    """The object as the API server stores it; a field that it does not know is an error."""
    body = manifest | {"metadata": manifest["metadata"] | {"namespace": namespace}}
    stored: Manifest = json.loads(
        access.kubectl("create", "--validate=strict", "-o", "json", "-f", "-", stdin=json.dumps(body))
    )
    return stored


def test_nothing_is_exposed_by_default(apiserver: Access) -> None:
    assert not {"Ingress", "HTTPRoute"} & {one["kind"] for one in render(apiserver)}


@pytest.mark.parametrize(
    ("setting", "field"), [("ingress.enabled=true", "hosts"), ("httpRoute.enabled=true", "parentRefs")]
)
def test_an_entry_for_every_name_or_for_no_gateway_is_refused(apiserver: Access, setting: str, field: str) -> None:
    """An Ingress without a host answers for every name that reaches the controller."""
    with pytest.raises(CommandError, match=f"{field}.*minItems"):
        render(apiserver, setting)


@pytest.mark.capability("PL-16")
def test_the_api_server_stores_the_ingress_and_its_backend_is_the_gateway(apiserver: Access, namespace: str) -> None:
    settings = ("ingress.className=internal", "ingress.tls.secretName=edge", "gateway.service.port=80")
    issuer = r"ingress.annotations.cert-manager\.io/cluster-issuer=private"
    stored = store(apiserver, entry(apiserver, "Ingress", *INGRESS, *settings, issuer), namespace)

    hosts = ["llm.example.com", "*.llm.example.com"]
    assert stored["spec"]["ingressClassName"] == "internal"
    assert stored["spec"]["tls"] == [{"hosts": hosts, "secretName": "edge"}]
    assert [rule["host"] for rule in stored["spec"]["rules"]] == hosts
    service = of_kind(render(apiserver, *settings), "Service")["slipway-gateway"]
    for rule in stored["spec"]["rules"]:
        (path,) = rule["http"]["paths"]
        assert (path["path"], path["pathType"]) == ("/", "Prefix")
        assert path["backend"]["service"]["name"] == service["metadata"]["name"]
        assert path["backend"]["service"]["port"]["number"] == service["spec"]["ports"][0]["port"] == 80
    assert stored["metadata"]["annotations"] == {"cert-manager.io/cluster-issuer": "private"}


def test_with_nginx_a_silent_stream_lives_longer_than_a_request_and_nothing_is_sent_twice(apiserver: Access) -> None:
    longer = r"ingress.annotations.nginx\.ingress\.kubernetes\.io/proxy-body-size=64m"
    made = entry(apiserver, "Ingress", *INGRESS, "ingress.controller=nginx", "gateway.tls.secretName=cert", longer)

    assert made["metadata"]["annotations"] == {
        f"{NGINX}/proxy-read-timeout": "660",
        f"{NGINX}/proxy-send-timeout": "660",
        f"{NGINX}/proxy-next-upstream": "off",
        f"{NGINX}/backend-protocol": "HTTPS",
        f"{NGINX}/proxy-body-size": "64m",
    }


@pytest.mark.capability("PL-16")
def test_the_api_server_stores_the_http_route_and_no_timeout_ends_a_stream(with_routes: Access, namespace: str) -> None:
    route = entry(with_routes, "HTTPRoute", *ROUTE, "httpRoute.hostnames={llm.example.com}")
    stored = store(with_routes, route, namespace)

    (parent,) = stored["spec"]["parentRefs"]
    assert (parent["kind"], parent["name"], parent["namespace"]) == ("Gateway", "public", "infra")
    assert stored["spec"]["hostnames"] == ["llm.example.com"]
    (rule,) = stored["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}
    (backend,) = rule["backendRefs"]
    assert (backend["kind"], backend["name"], backend["port"]) == ("Service", "slipway-gateway", 8000)
