"""The real `slipway-gateway` process with the chart's rights, against a real API server; the tests play operator."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from bench.servers import Server, a_gateway
from e2e.cluster.access import Access
from e2e.cluster.launch import Cluster
from slipway_api import names
from slipway_api.admin_token import admin_token
from tests.chart.rights import apply_rights, kubeconfig_of
from tests.gateway.doubles import Runtime
from tests.gateway.objects import a_pod_object, a_service_object

pytestmark = pytest.mark.apiserver

CHECKOUT = Path(__file__).resolve().parents[2]
SYSTEM = "slipway-system"
ACCOUNT = f"system:serviceaccount:{SYSTEM}:slipway-gateway"
ADDRESS = "127.0.8.1"  # any loopback address will do for a pod that the test itself serves
POD_NAME = "slipway-gateway-test"


@pytest.fixture(scope="module")
def gateway(apiserver: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A gateway with nothing but the token of the chart's ServiceAccount."""
    apiserver.serve_kinds(CHECKOUT / "crds")
    apply_rights(apiserver, "gateway", SYSTEM)
    folder = tmp_path_factory.mktemp("gateway")
    kubeconfig = kubeconfig_of(apiserver, "slipway-gateway", SYSTEM, folder)
    (folder / "current").write_text("a-key-for-tests\n")
    environment = {
        "KUBECONFIG": str(kubeconfig),
        "SLIPWAY_NAMESPACE": SYSTEM,
        "POD_NAME": POD_NAME,
        "SLIPWAY_GATEWAY_KEY_DIR": str(folder),
        "SLIPWAY_PROPAGATION_SECONDS": "0",
    }
    with a_gateway(environment=environment) as server:
        yield server


class Team:
    """One namespace with one service, and a user who calls it."""

    def __init__(self, access: Access, gateway: Server, session: aiohttp.ClientSession) -> None:
        self.access, self.gateway, self.session = access, gateway, session
        self.namespace = access.create_namespace()
        self.model = f"tiny-{self.namespace}"
        self.uid = ""

    def serve(self, **weights: int) -> None:
        body = a_service_object(namespace=self.namespace, served_name=self.model, **weights)
        path = f"/apis/{names.API_VERSION}/namespaces/{self.namespace}/inferenceservices"
        head = {"apiVersion": names.API_VERSION, "kind": "InferenceService"}
        created = self.access.api("POST", path, head | {"metadata": body["metadata"], "spec": body["spec"]})
        self.uid = created["metadata"]["uid"]
        self.access.api("PATCH", f"{path}/chat/status", {"status": body["status"]})

    def run_pod(self, name: str, address: str) -> None:
        body = a_pod_object(name, namespace=self.namespace, address=address, owner_uid=self.uid)
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        self.access.api("POST", path, {"metadata": body["metadata"], "spec": body["spec"]})
        self.access.api("PATCH", f"{path}/{name}/status", {"status": body["status"]})

    def label(self, name: str, state: str) -> None:
        change = {"metadata": {"labels": {names.LABEL_STATE: state}}}
        self.access.api("PATCH", f"/api/v1/namespaces/{self.namespace}/pods/{name}", change)

    async def status_of_chat(self, model: str = "") -> int:
        body = {"model": model or self.model, "messages": []}
        async with self.session.post(f"{self.gateway.url}/v1/chat/completions", json=body) as response:
            await response.read()
            return response.status

    async def until(self, status: int) -> None:
        while await self.status_of_chat() != status:  # noqa: ASYNC110  what is waited for travels through two other processes
            await asyncio.sleep(0.05)


@pytest.fixture
async def team(apiserver: Cluster, gateway: Server):
    async with aiohttp.ClientSession() as session:
        yield Team(apiserver, gateway, session)


@pytest.mark.capability("SE-3")
async def test_the_gateway_stays_within_the_rights_of_the_chart(apiserver: Cluster, gateway: Server):
    # Before the outage below: an API server that has just started refuses everybody until it knows its roles.
    calls = [entry for entry in apiserver.audit() if entry["user"]["username"] == ACCOUNT]

    assert calls
    assert {call["verb"] for call in calls} <= {"get", "list", "watch"}
    assert not [call for call in calls if call.get("responseStatus", {}).get("code") == 403]


@pytest.mark.capability("RG-2")
async def test_routing_follows_the_operators_labels_and_an_outage_of_the_api_server_changes_nothing(
    apiserver: Cluster, team: Team
):
    assert await team.status_of_chat() == 404
    async with Runtime(address=ADDRESS, port=names.SERVING_PORT) as runtime:
        team.serve(r1=100)
        await team.until(503)
        team.run_pod("chat-r1-0-0", ADDRESS)
        await team.until(200)
        assert await team.status_of_chat(f"{team.namespace}/chat") == 200

        apiserver.stop_apiserver()
        try:
            assert [await team.status_of_chat() for _ in range(5)] == [200] * 5
        finally:
            apiserver.start_apiserver()

        team.label("chat-r1-0-0", names.STATE_DRAINING)
        await team.until(503)
        asked = runtime.requests
        assert [await team.status_of_chat() for _ in range(5)] == [503] * 5
        assert runtime.requests == asked, "nothing is sent to a draining replica"


@pytest.mark.capability("SE-3")
async def test_the_look_inside_wants_the_pods_token(gateway: Server):
    right = admin_token(b"a-key-for-tests", SYSTEM, POD_NAME)
    look: Callable[[str], dict] = lambda token: {names.HEADER_ADMIN_TOKEN: token}  # noqa: E731
    async with aiohttp.ClientSession() as session:
        for headers, status in [({}, 401), (look("wrong"), 401), (look(right), 200)]:
            async with session.get(f"{gateway.admin_url}/debug/routes", headers=headers) as response:
                assert response.status == status
