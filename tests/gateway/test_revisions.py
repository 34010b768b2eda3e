"""Which revision may answer: never one under another's name, and never one that the operator has not admitted."""

import asyncio
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from slipway_gateway.fleet import Fleet
from slipway_gateway.gateway import Gateway
from slipway_gateway.kinds import InferenceService
from slipway_gateway.picker.endpoints import Endpoint, Service, WaitLimits
from slipway_gateway.settings import GatewaySettings
from slipway_gateway.watch import service_of
from tests.gateway.doubles import (
    MODEL,
    Behaviour,
    Caller,
    Runtime,
    a_caller,
    begin_stream,
    chunk,
    event,
    events_of,
    text_of,
    until,
)
from tests.gateway.objects import a_service_object

KEY = "team/chat"


def named(revision: str) -> Behaviour:
    """A runtime that says which revision it runs, in its header and in its text."""

    async def answer(runtime: Runtime, request: web.Request) -> web.StreamResponse:
        headers = {"x-slipway-revision": revision, "x-slipway-model": MODEL}
        if not runtime.bodies[-1].get("stream"):
            return web.json_response({"choices": [], "revision": revision}, headers=headers)
        response = await begin_stream(request, **headers)
        await response.write(event(chunk(revision)) + event(chunk("", finish="stop")) + b"data: [DONE]\n\n")
        return response

    return answer


@asynccontextmanager
async def a_service(*replicas: tuple[str, Runtime], **facts: Any):
    """A gateway in front of replicas, each with the revision that its pod's label names."""
    fleet = Fleet()
    fleet.set_service(KEY, Service(KEY, MODEL, **facts))
    for number, (label, runtime) in enumerate(replicas):
        fleet.set_endpoint(f"p{number}", Endpoint(f"p{number}", KEY, label, runtime.url))
    settings = GatewaySettings(host="127.0.0.1", port=0, admin_port=0, loading_wait_seconds=0.2)
    async with Gateway(settings, fleet) as gateway, a_caller(gateway) as caller:
        yield gateway, caller


async def ask(caller: Caller, **fields: Any) -> tuple[int, str, str]:
    """The status, the revision that the answer's header names, and the one that made it."""
    async with caller.chat(**fields) as response:
        if response.status != 200:
            return response.status, "", (await response.json())["error"]["message"]
        header = response.headers["x-slipway-revision"]
        text = text_of(await events_of(response)) if fields.get("stream") else (await response.json())["revision"]
        return 200, header, text


@pytest.mark.capability("RG-1", "EV-2")
@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_of_another_revision_than_the_label_says_goes_to_nobody(stream: bool):
    async with (
        Runtime(named("v1")) as mislabelled,
        Runtime(named("v2")) as right,
        a_service(("v2", mislabelled), ("v2", right), weights={"v2": 100}) as (gateway, caller),
    ):
        answers = [await ask(caller, stream=stream) for _ in range(20)]
        metrics = gateway.metrics.exposition().decode()
    assert set(answers) == {(200, "v2", "v2")}
    assert mislabelled.requests >= 1, "it was asked, and its answer was not forwarded"
    assert mislabelled.requests < 20, "and it is asked less and less"
    assert 'slipway_gateway_upstream_errors_total{model="tiny",reason="wrong_revision"' in metrics


@pytest.mark.capability("RG-1")
async def test_a_mislabelled_replica_alone_is_503_and_a_pin_changes_nothing():
    async with Runtime(named("v1")) as mislabelled, a_service(("v2", mislabelled)) as (_, caller):
        status, _, message = await ask(caller, stream=True)
        pinned, _, _ = await ask(caller, stream=True, headers={"x-slipway-pin-revision": "v2"})
    assert (status, pinned) == (503, 503)
    assert "v1" not in message


async def test_an_engine_that_names_no_revision_is_believed():
    async with Runtime() as foreign, a_service(("v2", foreign)) as (_, caller), caller.chat(stream=True) as response:
        assert (response.status, response.headers["x-slipway-revision"]) == (200, "v2")


STATUS = {"currentRevision": "r1", "updateRevision": "r2"}
GATES = {"gates": {"smoke": [{"prompt": "2+2=", "mustMatch": "4"}]}}
CANARY = {"strategy": "Canary", "canary": {"steps": []}}


@pytest.mark.capability("EV-2")
@pytest.mark.parametrize(
    ("rollout", "status", "weights", "withheld"),
    [
        ({}, {}, {"r1": 100, "r2": 0}, set()),
        (GATES, {}, {"r1": 100, "r2": 0}, {"r2"}),
        (GATES, {"canary": {"gate": ""}}, {"r1": 100, "r2": 0}, {"r2"}),
        (GATES, {"canary": {"gate": "Passed"}}, {"r1": 100, "r2": 0}, set()),
        (GATES, {}, {"r1": 50, "r2": 50}, set()),
        (GATES, {"currentRevision": "r2"}, {"r2": 0}, set()),
        (GATES, {"currentRevision": ""}, {"r2": 0}, set()),
        (CANARY, {"canary": {"gate": "Passed"}}, {"r1": 100, "r2": 0}, {"r2"}),
        (CANARY, {}, {"r1": 95, "r2": 5}, set()),
        ({"strategy": "BlueGreen"}, {}, {"r1": 100, "r2": 0}, {"r2"}),
        ({}, {"failedRevision": "r2"}, {"r1": 100, "r2": 0}, {"r2"}),
    ],
    ids=[
        "rolling, and the status lags",
        "gates, and no status of them yet",
        "gates that wait",
        "gates that are passed, and the status lags",
        "gates, with a share",
        "gates, promoted",
        "gates, and no other revision has ever served",
        "a canary before its first weight",
        "a canary with a weight",
        "blue-green before the switch",
        "rolled back",
    ],
)
def test_a_revision_is_withheld_until_the_operator_admits_it(rollout, status, weights, withheld):
    body = a_service_object(**weights)
    body["spec"]["rollout"] = rollout
    body["status"] |= STATUS | status

    assert service_of(msgspec.convert(body, InferenceService)).withheld == withheld


@pytest.mark.capability("EV-2", "RG-7")
async def test_while_only_a_withheld_revision_is_ready_requests_wait_for_another_and_then_are_refused():
    async with Runtime(named("r2")) as untested, Runtime(named("r1")) as stable:
        facts = {
            "weights": {"r1": 100, "r2": 0},
            "withheld": frozenset({"r2"}),
            "activation": WaitLimits(10, 1 << 20, 30.0),
        }
        async with a_service(("r2", untested), **facts) as (gateway, caller):
            waiting = asyncio.create_task(ask(caller, stream=True))
            await until(lambda: gateway.fleet.demand.waiting_by_service().get(KEY))
            assert untested.requests == 0
            pinned = await ask(caller, stream=True, headers={"x-slipway-pin-revision": "r2"})
            gateway.fleet.set_endpoint("p9", Endpoint("p9", KEY, "r1", stable.url))
            assert await waiting == (200, "r1", "r1")
            assert pinned == (200, "r2", "r2"), "a client may insist, and does not wait"

        facts |= {"activation": None, "desired_replicas": 1}
        async with a_service(("r2", untested), **facts) as (_, caller):
            status, _, message = await ask(caller, stream=True)
        assert status == 503
        assert "no ready replica" in message
        assert untested.requests == 1, "only the one that insisted"
