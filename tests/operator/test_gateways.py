"""The operator's polls of gateways, against real gateways on loopback."""

import asyncio
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import aiohttp
import pytest

from slipway_api import names
from slipway_api.admin_token import admin_token
from slipway_api.gateway_api import DemandReport
from slipway_api.types import ServiceKey
from slipway_gateway.fleet import STATIC_NAMESPACE, static_fleet
from slipway_gateway.gateway import Gateway
from slipway_gateway.settings import GatewaySettings
from slipway_kube.informer import Change
from slipway_kube.objects import ContainerState, ContainerStatus, Metadata, Pod, PodStatus, Running
from slipway_operator.inputs.demand import FRESH, Changed
from slipway_operator.inputs.gateways import Gateways, watch_pods
from slipway_operator.keepalive import KeptConnections
from slipway_operator.replica_client import Address
from tests.fakes import FakeApiServer
from tests.gateway.doubles import MODEL, Runtime, a_caller, events_of, until

SERVICE = ServiceKey(STATIC_NAMESPACE, MODEL)
SYSTEM = "slipway-system"
KEY = b"a-key-for-tests"


class Operator:
    """The operator's end: where each gateway's admin port is, and what was reported."""

    def __init__(self) -> None:
        self.ports: dict[str, int] = {}
        self.changes: list[Changed] = []
        self.connections = KeptConnections()
        self.tokens = [admin_token(b"a-new-key", SYSTEM, "x")]
        self.gateways = Gateways(
            self.dial,
            lambda namespace, pod: [*self.tokens, admin_token(KEY, namespace, pod)],
            on_change=self.changes.append,
            now=lambda: datetime.now(UTC),
        )

    async def dial(self, method, replica, path, headers, body):
        return await self.connections.request(method, "127.0.0.1", self.ports[replica.pod], path, headers, body)

    def add(self, name: str, gateway: Gateway) -> None:
        self.ports[name] = gateway.admin_port
        self.gateways.watch(Address(SYSTEM, name, "127.0.0.1"), is_required=True)


@asynccontextmanager
async def an_operator():
    operator = Operator()
    running = asyncio.create_task(operator.gateways.run())
    try:
        yield operator
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        operator.connections.close()


@asynccontextmanager
async def a_gateway_of_the_cluster(tmp_path, name: str, runtime: Runtime):
    """A gateway whose admin port wants the token of its pod."""
    (tmp_path / "current").write_bytes(KEY)
    settings = GatewaySettings(
        port=0, admin_port=0, host="127.0.0.1", namespace=SYSTEM, pod_name=name, key_directory=tmp_path
    )
    gateway = Gateway(settings, static_fleet([(MODEL, runtime.url)]))
    gateway.admin._tokens = gateway._tokens  # with a fleet given the gateway needs no token; in a cluster it does
    async with gateway:
        yield gateway


@pytest.mark.capability("AS-9", "EV-1")
async def test_demand_and_outcomes_of_two_gateways_are_added_up(tmp_path):
    async with (
        Runtime().hold() as runtime,
        a_gateway_of_the_cluster(tmp_path, "g1", runtime) as one,
        a_gateway_of_the_cluster(tmp_path, "g2", runtime) as two,
        a_caller(one) as first,
        a_caller(two) as second,
        an_operator() as operator,
    ):
        began = datetime.now(UTC)
        operator.add("g1", one)
        operator.add("g2", two)
        await until(lambda: (found := operator.gateways.demand(SERVICE)) and found.complete)
        assert operator.gateways.demand(SERVICE).idle_since is None

        calls = [asyncio.create_task(caller.chat(stream=True).__aenter__()) for caller in (first, second)]
        await until(lambda: operator.gateways.demand(SERVICE).open_requests == 2)
        assert operator.changes == [Changed(SERVICE, has_grown=True)] * 2

        runtime.allow(100)
        for call in calls:
            await events_of(await call)
        await until(lambda: operator.gateways.outcomes_since(SERVICE)(began).get("static"))
        await until(lambda: operator.gateways.outcomes_since(SERVICE)(began)["static"].requests == 2)
        outcomes = operator.gateways.outcomes_since(SERVICE)(began)["static"]
        assert (outcomes.errors, outcomes.output_tokens, sum(outcomes.ttft)) == (0, 10, 2)


@pytest.mark.capability("AS-9")
async def test_a_gateway_that_does_not_answer_makes_the_demand_incomplete_and_delays_no_other(tmp_path):
    async with (
        Runtime() as runtime,
        a_gateway_of_the_cluster(tmp_path, "g1", runtime) as gateway,
        a_caller(gateway) as caller,
        an_operator() as operator,
    ):
        operator.ports["dead"] = 1  # nothing listens there
        operator.gateways.watch(Address(SYSTEM, "dead", "127.0.0.1"), is_required=True)
        operator.add("g1", gateway)
        await until(lambda: operator.gateways.demand(SERVICE) is not None)
        assert not operator.gateways.demand(SERVICE).complete

        async with caller.chat(stream=True) as response:
            await events_of(response)
        await until(lambda: operator.gateways.demand(SERVICE).idle_since is not None)
        operator.gateways.forget("dead")
        assert operator.gateways.demand(SERVICE).complete


async def test_without_the_pods_token_a_gateway_tells_nothing(tmp_path):
    async with (
        Runtime() as runtime,
        a_gateway_of_the_cluster(tmp_path, "g1", runtime) as gateway,
        aiohttp.ClientSession() as session,
    ):
        for path in (names.PATH_DEMAND, names.PATH_OUTCOMES):
            async with session.get(f"http://127.0.0.1:{gateway.admin_port}{path}") as response:
                assert response.status == 401


def test_the_gateways_are_the_running_pods_with_their_labels():
    operator = Operator()
    informer = watch_pods(operator.gateways, FakeApiServer().client(), namespace=SYSTEM, selector="a=b")

    def a_pod(name: str, *, runs: bool) -> Pod:
        state = ContainerState(running=Running()) if runs else ContainerState()
        status = PodStatus(pod_ip="10.0.0.1", container_statuses=(ContainerStatus(name="gateway", state=state),))
        return Pod(metadata=Metadata(name=name, namespace=SYSTEM), status=status)

    running, crashing = a_pod("g1", runs=True), a_pod("g2", runs=False)
    informer._notify(Change.ADDED, None, running)
    informer._notify(Change.ADDED, None, crashing)
    assert set(operator.gateways._targets) == {"g1"}
    informer._notify(Change.DELETED, running, None)
    assert operator.gateways._targets == {}


@pytest.mark.capability("OP-18")
async def test_the_last_gateway_that_goes_and_the_first_that_comes_are_noticed():
    """review/shipping.md 3. In virtual time: the clock is a number, the table gets its reports directly."""
    now = [datetime(2026, 1, 1, tzinfo=UTC)]
    gateways = Gateways(None, lambda _namespace, _pod: [], on_change=lambda _change: None, now=lambda: now[0])
    assert gateways.count() is None, "it does not lead"
    gateways._began = now[0]
    assert gateways.count() is None, "it has just begun to ask"

    now[0] += FRESH
    assert gateways.count().answering == 0
    gateways._demand.receive("g1", DemandReport(boot_id="b", version=1, services=()), now[0])
    assert gateways.count().answering == 1
    now[0] += FRESH
    assert gateways.count().answering == 0, "it fell silent"
