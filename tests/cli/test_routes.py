"""The split of a service as objects of the Gateway API: what they say, and that a real API server takes them."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster.access import Access
from slipway_api.inference_service import InferenceService
from slipway_cli.routes import NotExportedError, Options, export_routes
from tests.cli.test_on_apiserver import CRDS, ROLLING, SERVICE, STABLE, UPDATE, run

MODULES = {
    "sigs.k8s.io/gateway-api@v1.5.1": "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",
    "sigs.k8s.io/gateway-api-inference-extension@v1.6.0": (
        "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml"
    ),
}
NAMESPACE = "routes-tests"


def a_service(*weights: tuple[str, int], **spec: object) -> InferenceService:
    return InferenceService.model_validate(
        {
            "metadata": {"name": "chat", "namespace": "ns", "uid": "u1"},
            "spec": {"model": {"uri": "hf://org/model@1", "servedName": "chat-large"}, **spec},
            "status": {"revisions": [{"name": one[:5], "hash": one, "weight": weight} for one, weight in weights]},
        }
    )


@pytest.mark.capability("RG-10")
def test_each_revision_with_traffic_is_a_pool_with_its_weight():
    service = a_service((STABLE, 90), (UPDATE, 10), ("old0000000", 0))
    *pools, route = export_routes(service, Options("infra/public", ("chat.example.com",), ("chat-epp", 9002)))

    assert [pool["kind"] for pool in pools] == ["InferencePool", "InferencePool"]
    assert pools[1]["spec"]["selector"]["matchLabels"] == {
        "slipway.dev/service": "chat",
        "slipway.dev/revision": UPDATE,
        "slipway.dev/state": "serving",
    }
    assert route["spec"]["parentRefs"] == [{"name": "public", "namespace": "infra"}]
    (rule,) = route["spec"]["rules"]
    assert [(one["kind"], one["name"], one["weight"]) for one in rule["backendRefs"]] == [
        ("InferencePool", "chat-stabl", 90),
        ("InferencePool", "chat-updat", 10),
    ]
    assert rule["timeouts"] == {"request": "600s"}
    assert all(one["metadata"]["ownerReferences"][0]["uid"] == "u1" for one in (*pools, route))


@pytest.mark.capability("RG-10")
def test_without_a_picker_the_backends_are_services_and_a_header_may_name_the_model():
    pool, route = export_routes(a_service((STABLE, 100)), Options("public", model_header="x-gateway-model-name"))

    assert (pool["apiVersion"], pool["kind"]) == ("v1", "Service")
    (match,) = route["spec"]["rules"][0]["matches"]
    assert match["headers"] == [{"type": "Exact", "name": "x-gateway-model-name", "value": "chat-large"}]
    assert "hostnames" not in route["spec"]


@pytest.mark.parametrize(
    ("service", "says"),
    [
        (a_service(), "no revision"),
        (a_service((STABLE, 100), routing={"directAccess": "GatewayOnly"}), "directAccess"),
    ],
)
def test_what_cannot_be_called_around_the_gateway_is_refused(service, says):
    with pytest.raises(NotExportedError, match=says):
        export_routes(service, Options("public"))


def published_crd(module: str, path: str, cache: Path) -> str:
    """A CustomResourceDefinition as its project publishes it, out of the module's archive."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("needs go, to fetch the published definitions")
    environment = {"GOFLAGS": "-mod=mod", "GOTOOLCHAIN": "local", "GOWORK": "off"}
    command = [go, "mod", "download", "-json", module]
    made = subprocess.run(
        command, cwd=cache, env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False
    )
    if made.returncode:
        pytest.skip(f"{module} cannot be fetched: {(made.stderr or made.stdout)[-200:]}")
    return (Path(json.loads(made.stdout)["Dir"]) / path).read_text()


@pytest.fixture(scope="module")
def api(apiserver: Access, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Access]:
    apiserver.serve_kinds(CRDS)
    published = tmp_path_factory.mktemp("published")
    for number, (module, path) in enumerate(MODULES.items()):
        (published / f"{number}.yaml").write_text(published_crd(module, path, published))
    apiserver.serve_kinds(published)
    apiserver.kubectl("create", "namespace", NAMESPACE)
    metadata = {"name": "chat", "namespace": NAMESPACE}
    apiserver.kubectl("apply", "-f", "-", stdin=json.dumps(SERVICE | {"metadata": metadata}))
    status = json.dumps({"status": ROLLING})
    apiserver.kubectl("patch", "infsvc", "chat", "-n", NAMESPACE, "--subresource=status", "--type=merge", "-p", status)
    yield apiserver
    apiserver.kubectl("delete", "namespace", NAMESPACE, "--wait=false")
    apiserver.kubectl("delete", "-f", published, "--wait=false")


@pytest.mark.apiserver
@pytest.mark.capability("RG-10")
@pytest.mark.parametrize("picker", [[], ["--endpoint-picker", "chat-epp:9002"]], ids=["services", "pools"])
def test_a_real_api_server_with_the_published_schemas_takes_the_objects(api: Access, picker: list[str]):
    where = ("--gateway", "infra/public", "--hostname", "chat.example.com", "-n", NAMESPACE)
    printed = run(api, "routes", "chat", *where, *picker)
    assert printed.returncode == 0, printed.stderr

    api.kubectl("apply", "--server-side", "--validate=strict", "-f", "-", stdin=printed.stdout)

    route = json.loads(api.kubectl("get", "httproute", "chat", "-n", NAMESPACE, "-o", "json"))
    (rule,) = route["spec"]["rules"]
    kind = "InferencePool" if picker else "Service"
    assert [(one["kind"], one["weight"]) for one in rule["backendRefs"]] == [(kind, 10), (kind, 90)]
    again = run(api, "routes", "chat", "--gateway", "public", "--endpoint-picker", "no-port", "-n", NAMESPACE)
    assert (again.returncode, again.stderr) == (1, "error: --endpoint-picker must be SERVICE:PORT, not no-port\n")
