"""From the API server to the table: replicas get requests as pods and labels say, API server or not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import msgspec
import openai
import pytest

from slipway_api.names import ANNOTATION_ADAPTERS, ANNOTATION_ENGINE, API_VERSION, STATE_DRAINING, STATE_WARM
from slipway_gateway.fleet import Fleet
from slipway_gateway.gateway import Gateway
from slipway_gateway.kinds import InferenceService, LoRAAdapter
from slipway_gateway.picker.endpoints import NO_LIMITS, Adapter, LatencyLimits, Service
from slipway_gateway.settings import GatewaySettings
from slipway_gateway.watch import Watch, adapter_of, endpoint_of, service_of
from slipway_kube.client import Client
from slipway_kube.objects import Pod
from slipway_kube.resources import INFERENCE_SERVICES, LORA_ADAPTERS, NAMESPACES, PODS
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
        "team/chat", "chat", created=datetime(2026, 1, 1, tzinfo=UTC)
    )


def test_weights_are_those_of_status():
    service = service_of(msgspec.convert(a_service_object(r1=90, r2=10), InferenceService))

    assert (service.served_name, dict(service.weights)) == ("tiny", {"r1": 90, "r2": 10})


def test_handover_and_timeout_are_those_of_the_spec():
    service = service_of(msgspec.convert(a_service_object(), InferenceService))
    body = a_service_object() | {"spec": {"drain": {"handover": False}, "routing": {"requestTimeoutSeconds": 30}}}
    strict = service_of(msgspec.convert(body, InferenceService))

    assert (service.handover, service.request_seconds) == (True, None)
    assert (strict.handover, strict.request_seconds) == (False, 30)


def test_latency_limits_are_those_of_the_slo():
    body = a_service_object() | {"spec": {"slo": {"ttftP95Seconds": "0.5", "itlP95Seconds": "soon"}}}
    limited = service_of(msgspec.convert(body, InferenceService))
    free = service_of(msgspec.convert(a_service_object(), InferenceService))

    assert limited.latency_limits == LatencyLimits(ttft_seconds=0.5, itl_seconds=None)
    assert free.latency_limits == NO_LIMITS


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


class Team:
    """One service and its pods in the fake API server, which gives the service its uid."""

    def __init__(self, server: FakeApiServer) -> None:
        self.server = server
        self.uid = ""
        self.put_service(r1=100)

    def put_service(self, **facts: Any) -> None:
        body = self.server.put(INFERENCE_SERVICES, a_service_object(**facts))
        self.uid = body["metadata"]["uid"]

    def put_pod(self, name: str, **facts: Any) -> None:
        self.server.put(PODS, a_pod_object(name, **{"owner_uid": self.uid} | facts))


def names_in(fleet: Fleet) -> list[str]:
    route = fleet.table.resolve("tiny")
    return [endpoint.name for endpoint in route.endpoints] if route else []


async def test_the_table_follows_pods_and_services():
    async with FakeApiServer() as server, a_watched_fleet(server) as fleet:
        assert fleet.table.resolve("tiny") is None
        team = Team(server)
        team.put_pod("p1")
        await until(lambda: names_in(fleet) == ["team/p1"])
        team.put_pod("p2", ready=False)
        team.put_pod("p2")
        await until(lambda: names_in(fleet) == ["team/p1", "team/p2"])
        team.put_service(served_name="other", r1=100)
        await until(lambda: fleet.table.resolve("other"))
        assert fleet.table.resolve("tiny") is None
        server.delete(INFERENCE_SERVICES, NAMESPACE, "chat")
        await until(lambda: not fleet.table.services)


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
        team = Team(server)
        team.put_pod("p1")
        async with a_watched_fleet(server) as fleet:
            await until(lambda: server.open_watches == 4)
            assert names_in(fleet) == ["team/p1"]
            built = fleet.table.built_routes
            trouble(server)
            for _ in range(20):
                await asyncio.sleep(0.005)
                assert names_in(fleet) == ["team/p1"]
            server.down = False
            await until(lambda: server.open_watches == 4)
            assert names_in(fleet) == ["team/p1"]
            assert fleet.table.built_routes == built, "nothing was taken out in between"
            team.put_pod("p2")
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
        team = Team(server)
        team.put_pod("p2", address="127.0.0.2")
        async with a_watched_fleet(server, draining.port) as fleet, a_served_fleet(fleet) as caller:
            await until(lambda: names_in(fleet) == ["team/p2"])
            draining.allow(1)
            running = await caller.chat(stream=True)
            team.put_pod("p3", address="127.0.0.3")
            team.put_pod("p2", address="127.0.0.2", state=STATE_DRAINING)
            await until(lambda: names_in(fleet) == ["team/p3"])
            for _ in range(20):
                async with caller.chat() as response:
                    assert response.status == 200
            draining.allow(100)

            assert (draining.requests, other.requests) == (1, 20)
            assert text_of(await events_of(running)) == "Once upon a time."


@pytest.mark.capability("RG-2")
async def test_the_gateway_serves_from_its_last_view_while_the_api_server_is_away():
    async with Runtime(address="127.0.0.2") as runtime, FakeApiServer() as server:
        team = Team(server)
        team.put_pod("p2", address="127.0.0.2")
        async with a_watched_fleet(server, runtime.port) as fleet, a_served_fleet(fleet) as caller:
            server.down = True
            for _ in range(5):
                async with caller.chat() as response:
                    assert response.status == 200
            async with caller.session.get(f"{caller.admin_url}/ready") as response:
                assert response.status == 200


@pytest.mark.capability("RD-8")
async def test_a_gateway_that_starts_while_the_api_server_is_away_says_503_and_never_that_a_model_does_not_exist():
    """Chaos C1: clients do not retry a 404, so a restarted gateway lost every request until it had listed."""
    async with Runtime(address="127.0.0.2") as runtime, FakeApiServer() as server, Client(server.connection) as client:
        team = Team(server)
        team.put_pod("p2", address="127.0.0.2")
        server.down = True
        fleet = Fleet()
        task = asyncio.create_task(Watch(client, fleet, serving_port=runtime.port).run())
        async with a_served_fleet(fleet) as caller:
            openai_client = openai.AsyncOpenAI(base_url=f"{caller.url}/v1", api_key="none", max_retries=0)
            with pytest.raises(openai.InternalServerError) as refused:
                await openai_client.chat.completions.create(model="tiny", messages=[])
            assert (refused.value.status_code, refused.value.response.headers["Retry-After"]) == (503, "1")
            for path in ("/v1/models", "/v1/models/tiny"):
                async with caller.session.get(caller.url + path) as response:
                    assert (response.status, response.headers["Retry-After"]) == (503, "1")
            async with caller.session.get(f"{caller.admin_url}/ready") as response:
                assert (response.status, (await response.json())["reason"]) == (503, "Syncing")
            server.down = False
            await until(lambda: fleet.view().synced)
            async with caller.session.get(f"{caller.admin_url}/ready") as response:
                assert response.status == 200
            await openai_client.chat.completions.create(model="tiny", messages=[])
            with pytest.raises(openai.NotFoundError):
                await openai_client.chat.completions.create(model="other", messages=[])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_while_only_services_are_listed_a_model_is_not_ready_and_none_is_unknown():
    """Chaos C1: half a picture is no picture; of two services with one name perhaps only the younger is known."""
    async with FakeApiServer() as server, Client(server.connection) as client:
        Team(server)
        server.fail(method="GET", path="/api/v1/pods", status=500, times=10**6)
        fleet = Fleet()
        task = asyncio.create_task(Watch(client, fleet).run())
        async with a_served_fleet(fleet) as caller:
            await until(lambda: fleet.table.services)
            for model in ("tiny", "other"):
                async with caller.chat(model=model) as response:
                    assert response.status == 503
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def owner(**facts: Any) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": "InferenceService",
        "name": "chat",
        "uid": "u",
        "controller": True,
    } | facts


@pytest.mark.parametrize(
    "owners",
    [
        [],
        [owner(controller=False)],
        [owner(kind="ReplicaSet")],
        [owner(apiVersion="example.com/v1")],
        [owner(name="other")],
    ],
    ids=["none", "not the controller", "another kind", "another group", "another name"],
)
def test_a_pod_that_its_service_does_not_control_gets_nothing(owners):
    """Security: labels alone would let anyone who may create pods receive the prompts of a service."""
    body = a_pod_object("p")
    body["metadata"]["ownerReferences"] = owners

    assert endpoint_of(decoded(body)) is None


@pytest.mark.capability("SE-8")
async def test_the_name_of_an_object_that_does_not_exist_yet_belongs_to_its_namespace_already():
    """review/control-plane.md 1: a full name was open to others until its service was created."""
    async with FakeApiServer() as server:
        server.put(NAMESPACES, {"metadata": {"name": "team-z"}})
        server.put(INFERENCE_SERVICES, a_service_object("thief", served_name="team-z/chat"))
        server.put(INFERENCE_SERVICES, a_service_object("hub", served_name="team-y/chat"))
        async with a_watched_fleet(server) as fleet:
            assert fleet.table.resolve("team-z/chat") is None
            assert fleet.table.resolve("team-y/chat").service.key == "team/hub"
            server.put(NAMESPACES, {"metadata": {"name": "team-y"}})
            await until(lambda: fleet.table.resolve("team-y/chat") is None)


async def test_a_pod_with_the_uid_of_another_service_gets_nothing():
    """Security: a deleted service's pod, or one that names an owner that is not there."""
    async with FakeApiServer() as server, a_watched_fleet(server) as fleet:
        team = Team(server)
        team.put_pod("stranger", owner_uid="made-up")
        team.put_pod("own")
        await until(lambda: fleet.table.endpoint("team/own"))

        assert names_in(fleet) == ["team/own"]


@pytest.mark.capability("OP-11")
def test_a_pod_names_its_engine_and_one_of_our_runtime_names_none():
    ours = a_pod_object("p1")
    foreign = a_pod_object("p2")
    foreign["metadata"]["annotations"] = {ANNOTATION_ENGINE: "vllm"}
    found = [endpoint_of(msgspec.convert(one, Pod)) for one in (ours, foreign)]

    assert [one.engine for one in found if one is not None] == ["", "vllm"]


async def test_a_changed_served_name_serves_both_names_until_no_old_replica_is_left():
    """Finding 3: it was 404 until the new replicas were ready, and a mix of answers and 404 after."""
    async with (
        FakeApiServer() as server,
        Runtime(address="127.0.0.2") as old,
        Runtime(address="127.0.0.3", port=old.port) as new,
    ):
        team = Team(server)
        team.put_pod("p2", address="127.0.0.2", served_name="tiny")
        async with a_watched_fleet(server, old.port) as fleet, a_served_fleet(fleet) as caller:
            await until(lambda: names_in(fleet) == ["team/p2"])
            team.put_service(served_name="renamed", r1=100)
            await until(lambda: fleet.table.resolve("renamed"))
            for model in ("tiny", "renamed"):
                async with caller.chat(model=model) as response:
                    assert response.status == 200
            assert [body["model"] for body in old.bodies] == ["tiny", "tiny"], "the runtime knows only its own name"
            team.put_pod("p3", address="127.0.0.3", served_name="renamed")
            team.put_pod("p2", address="127.0.0.2", state=STATE_DRAINING)
            await until(lambda: fleet.table.resolve("tiny") is None)
            async with caller.chat(model="renamed") as response:
                assert response.status == 200
            assert new.bodies[-1]["model"] == "renamed"


@pytest.mark.capability("RD-8", "RD-9")
async def test_requests_without_a_first_byte_move_when_their_hung_replica_becomes_unready():
    """Chaos C2: they waited up to 69 s, though healthy replicas stood by."""
    async with (
        FakeApiServer() as server,
        Runtime(address="127.0.0.2").hold() as hung,
        Runtime(address="127.0.0.3", port=hung.port) as other,
    ):
        team = Team(server)
        team.put_pod("p2", address="127.0.0.2")
        async with a_watched_fleet(server, hung.port) as fleet, a_served_fleet(fleet) as caller:
            await until(lambda: names_in(fleet) == ["team/p2"])
            waiting = [asyncio.create_task(caller.chat(stream=stream).__aenter__()) for stream in (True, False) * 30]
            await until(lambda: hung.requests == 60)
            team.put_pod("p3", address="127.0.0.3")
            await until(lambda: len(names_in(fleet)) == 2)
            team.put_pod("p2", address="127.0.0.2", ready=False)
            responses = await asyncio.gather(*waiting)

            assert [response.status for response in responses] == [200] * 60
            assert other.requests == 60


async def test_requests_stay_with_a_replica_that_drains_or_that_is_the_only_one():
    """A draining replica answers what it has accepted; one that is merely unready may come back."""
    for leaving, others in (({"state": STATE_DRAINING}, True), ({"ready": False}, False)):
        async with (
            FakeApiServer() as server,
            Runtime(address="127.0.0.2").hold() as busy,
            Runtime(address="127.0.0.3", port=busy.port) as other,
        ):
            team = Team(server)
            team.put_pod("p2", address="127.0.0.2")
            async with a_watched_fleet(server, busy.port) as fleet, a_served_fleet(fleet) as caller:
                await until(lambda fleet=fleet: names_in(fleet) == ["team/p2"])
                waiting = asyncio.create_task(caller.chat().__aenter__())
                await until(lambda busy=busy: busy.requests == 1)
                if others:
                    team.put_pod("p3", address="127.0.0.3")
                    await until(lambda fleet=fleet: len(names_in(fleet)) == 2)
                team.put_pod("p2", address="127.0.0.2", **leaving)
                await until(lambda fleet=fleet: "team/p2" not in names_in(fleet))
                busy.allow(100)

                assert (await waiting).status == 200
                assert (busy.requests, other.requests) == (1, 0)


def an_adapter_object(name: str = "support", base: str = "chat", *, reason: str = "", **spec: Any) -> dict[str, Any]:
    conditions = [{"type": "Stalled", "status": "True", "reason": reason}] if reason else []
    return {
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"baseRef": {"name": base}} | spec,
        "status": {"conditions": conditions},
    }


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (an_adapter_object(), Adapter("team/support", "support", "team/chat")),
        (an_adapter_object(adapterName="helper"), Adapter("team/support", "helper", "team/chat")),
        (
            an_adapter_object(alias={"name": "best", "weight": 10}),
            Adapter("team/support", "support", "team/chat", alias="best", alias_weight=10),
        ),
        (
            an_adapter_object(reason="RankTooLarge"),
            Adapter("team/support", "support", "team/chat", stalled="RankTooLarge"),
        ),
        (
            an_adapter_object(placement={"mode": "OnDemand"}),
            Adapter("team/support", "support", "team/chat", on_demand=True),
        ),
        (
            an_adapter_object(placement={"mode": "OnDemand"}, reason="RankTooLarge"),
            Adapter("team/support", "support", "team/chat", stalled="RankTooLarge"),
        ),
        (an_adapter_object(reason="NameConflict"), None),
        (an_adapter_object(base=""), None),
    ],
)
@pytest.mark.capability("ML-8")
def test_an_adapter_is_routed_by_its_names_unless_its_name_is_anothers(body, expected):
    assert adapter_of(msgspec.convert(body, LoRAAdapter)) == expected


@pytest.mark.capability("ML-8")
async def test_adapters_are_routed_to_the_pods_that_list_them_and_shown_with_their_base():
    async with Runtime() as runtime, FakeApiServer() as server:
        team = Team(server)
        async with a_watched_fleet(server, runtime.port) as fleet, a_served_fleet(fleet) as caller:
            server.put(LORA_ADAPTERS, an_adapter_object())
            await until(lambda: fleet.table.resolve("support"))
            team.put_pod("p1", address="127.0.0.1")
            await until(lambda: fleet.table.endpoint("team/p1"))
            async with caller.chat(model="support") as response:
                assert response.status == 503
                assert int(response.headers["Retry-After"]) > 0
                assert "has loaded the adapter support" in (await response.json())["error"]["message"]
            pod = a_pod_object("p1", owner_uid=team.uid)
            pod["metadata"]["annotations"] = {ANNOTATION_ADAPTERS: "other,support"}
            server.put(PODS, pod | {"status": pod["status"] | {"podIP": "127.0.0.1"}})
            await until(lambda: fleet.table.resolve("support").endpoints)
            for model in ("support", "team/support"):
                async with caller.chat(model=model, stream=True) as response:
                    assert (response.status, response.headers["x-slipway-adapter"]) == (200, "support")
                    await response.read()
            assert [body["model"] for body in runtime.bodies] == ["support", "support"]
            async with caller.session.get(f"{caller.url}/v1/models") as response:
                models = {one["id"]: one["parent"] for one in (await response.json())["data"]}
            assert models == {"tiny": None, "support": "tiny"}
