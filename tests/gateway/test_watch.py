"""From the API server to the table: who is sent requests follows pods and labels, and survives the API server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from slipway_api.names import STATE_DRAINING, STATE_WARM
from slipway_gateway.fleet import Fleet
from slipway_gateway.gateway import Gateway
from slipway_gateway.picker.endpoints import Service
from slipway_gateway.settings import GatewaySettings
from slipway_gateway.watch import InferenceService, Watch, endpoint_of, service_of
from slipway_kube.client import Client
from slipway_kube.objects import Pod
from slipway_kube.resources import INFERENCE_SERVICES, PODS
from tests.fakes import FakeApiServer
from tests.gateway.doubles import Caller, Runtime, a_caller, events_of, text_of, until
from tests.gateway.objects import NAMESPACE, a_pod_object, a_service_object


def decoded(body: dict) -> Pod:
    return msgspec.convert(body, Pod)


def test_a_ready_serving_pod_with_an_address_is_an_endpoint():
    endpoint = endpoint_of(decoded(a_pod_object("chat-r1-0-0", address="10.0.0.7")))

    assert endpoint is not None
    assert (endpoint.name, endpoint.service) == ("team/chat-r1-0-0", "team/chat")
    assert (endpoint.revision, endpoint.url) == ("r1", "http://10.0.0.7:8000")


def test_an_ipv6_address_is_bracketed():
    endpoint = endpoint_of(decoded(a_pod_object("p", address="fd00::7")))

    assert endpoint is not None
    assert endpoint.url == "http://[fd00::7]:8000"


@pytest.mark.capability("RG-2")
@pytest.mark.parametrize(
    "facts",
    [{"ready": False}, {"state": STATE_DRAINING}, {"state": STATE_WARM}, {"state": ""}, {"address": ""}],
    ids=lambda facts: str(facts),
)
def test_a_pod_that_is_not_ready_or_not_serving_gets_nothing(facts):
    assert endpoint_of(decoded(a_pod_object("p", **facts))) is None


@pytest.mark.capability("RG-2")
def test_a_pod_that_is_being_deleted_gets_nothing_though_still_ready():
    body = a_pod_object("p")
    body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"

    assert endpoint_of(decoded(body)) is None


def test_before_its_first_status_a_service_is_called_by_its_own_name():
    body = {"metadata": {"name": "chat", "namespace": "team", "creationTimestamp": "2026-01-01T02:00:00+02:00"}}

    assert service_of(msgspec.convert(body, InferenceService)) == Service(
        "team/chat", "chat", created="2026-01-01T00:00:00+00:00"
    )


def test_weights_are_those_of_status():
    service = service_of(msgspec.convert(a_service_object(r1=90, r2=10), InferenceService))

    assert (service.served_name, dict(service.weights)) == ("tiny", {"r1": 90, "r2": 10})


@asynccontextmanager
async def a_watched_fleet(server: FakeApiServer, port: int = 8000) -> AsyncIterator[Fleet]:
    fleet = Fleet()
    async with Client(server.connection) as client:
        watch = Watch(client, fleet, serving_port=port)
        task = asyncio.create_task(watch.run())
        await until(lambda: fleet.view().synced)
        yield fleet
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def names_in(fleet: Fleet) -> list[str]:
    route = fleet.table.resolve("tiny")
    return [endpoint.name for endpoint in route.endpoints] if route else []


async def test_the_table_follows_pods_and_services():
    async with FakeApiServer() as server, a_watched_fleet(server) as fleet:
        assert fleet.table.resolve("tiny") is None
        server.put(PODS, a_pod_object("p1"))
        server.put(INFERENCE_SERVICES, a_service_object(r1=100))
        await until(lambda: names_in(fleet) == ["team/p1"])
        server.put(PODS, a_pod_object("p2", ready=False))
        server.put(PODS, a_pod_object("p2"))
        await until(lambda: names_in(fleet) == ["team/p1", "team/p2"])
        server.put(INFERENCE_SERVICES, a_service_object(served_name="other", r1=100))
        await until(lambda: fleet.table.resolve("other"))
        assert fleet.table.resolve("tiny") is None
        server.delete(INFERENCE_SERVICES, NAMESPACE, "chat")
        await until(lambda: not fleet.table.routes)


def go_down(server: FakeApiServer) -> None:
    server.down = True


def forget_history(server: FakeApiServer) -> None:
    server.compact()
    server.drop_watches()


def answer_with_an_error(server: FakeApiServer) -> None:
    server.fail(method="GET", status=500)
    server.drop_watches()


@pytest.mark.capability("RG-2")
@pytest.mark.parametrize("trouble", [go_down, forget_history, answer_with_an_error, FakeApiServer.drop_watches])
async def test_nothing_the_api_server_does_short_of_saying_so_empties_the_table(trouble):
    async with FakeApiServer() as server:
        server.put(PODS, a_pod_object("p1"))
        server.put(INFERENCE_SERVICES, a_service_object(r1=100))
        async with a_watched_fleet(server) as fleet:
            await until(lambda: server.open_watches == 2)
            tables = []
            fleet_table = fleet.table
            trouble(server)
            for _ in range(20):
                await asyncio.sleep(0.005)
                tables.append(fleet.table)
            server.down = False
            await until(lambda: server.open_watches == 2)
            assert all(table is fleet_table for table in tables)
            server.put(PODS, a_pod_object("p2"))
            await until(lambda: len(names_in(fleet)) == 2)


@asynccontextmanager
async def a_served_fleet(fleet: Fleet) -> AsyncIterator[Caller]:
    settings = GatewaySettings(host="127.0.0.1", port=0, admin_port=0, propagation_seconds=0)
    async with Gateway(settings, fleet) as gateway, a_caller(gateway) as caller:
        yield caller


@pytest.mark.capability("RG-2")
async def test_from_the_moment_a_pod_is_labelled_draining_it_gets_no_request_and_finishes_those_it_has():
    async with (
        FakeApiServer() as server,
        Runtime(address="127.0.0.2").hold() as draining,
        Runtime(address="127.0.0.3", port=draining.port) as other,
    ):
        server.put(PODS, a_pod_object("p2", address="127.0.0.2"))
        server.put(INFERENCE_SERVICES, a_service_object(r1=100))
        async with a_watched_fleet(server, draining.port) as fleet, a_served_fleet(fleet) as caller:
            await until(lambda: names_in(fleet) == ["team/p2"])
            draining.allow(1)
            running = await caller.chat(stream=True)
            server.put(PODS, a_pod_object("p3", address="127.0.0.3"))
            server.put(PODS, a_pod_object("p2", address="127.0.0.2", state=STATE_DRAINING))
            await until(lambda: names_in(fleet) == ["team/p3"])
            for _ in range(20):
                async with caller.chat() as response:
                    assert response.status == 200
            draining.allow(100)

            assert (draining.asked, other.asked) == (1, 20)
            assert text_of(await events_of(running)) == "Once upon a time."


@pytest.mark.capability("RG-2")
async def test_the_gateway_serves_from_its_last_view_while_the_api_server_is_away():
    async with Runtime(address="127.0.0.2") as runtime, FakeApiServer() as server:
        server.put(PODS, a_pod_object("p2", address="127.0.0.2"))
        server.put(INFERENCE_SERVICES, a_service_object(r1=100))
        async with a_watched_fleet(server, runtime.port) as fleet, a_served_fleet(fleet) as caller:
            server.down = True
            for _ in range(5):
                async with caller.chat() as response:
                    assert response.status == 200
            async with caller.session.get(f"{caller.admin_url}/ready") as response:
                assert response.status == 200


async def test_the_gateway_is_not_ready_before_it_has_seen_everything_once():
    async with FakeApiServer() as server, Client(server.connection) as client:
        server.down = True
        fleet = Fleet()
        watch = Watch(client, fleet)
        task = asyncio.create_task(watch.run())
        async with a_served_fleet(fleet) as caller:
            async with caller.session.get(f"{caller.admin_url}/ready") as response:
                assert (response.status, (await response.json())["reason"]) == (503, "Syncing")
            server.down = False
            await until(lambda: fleet.view().synced)
            async with caller.session.get(f"{caller.admin_url}/ready") as response:
                assert response.status == 200
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
