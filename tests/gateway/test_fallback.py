"""Requests that their own service cannot answer in time go to its fallback; an overloaded service gives less."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from slipway_gateway.fleet import Fleet
from slipway_gateway.gateway import Gateway
from slipway_gateway.kinds import InferenceService
from slipway_gateway.overload import Ladder, Step
from slipway_gateway.picker.endpoints import Adapter, Endpoint, Service, WaitLimits
from slipway_gateway.settings import GatewaySettings
from slipway_gateway.tenants import digest_of
from slipway_gateway.watch import service_of
from tests.gateway.doubles import (
    Caller,
    Runtime,
    a_caller,
    answer_whole,
    be_draining,
    be_full,
    events_of,
    hang_up,
    text_of,
    until,
)
from tests.gateway.objects import a_service_object

BIG, SMALL, TINY = "team/big", "team/small", "team/tiny"


@asynccontextmanager
async def services(*, settings: dict[str, Any] | None = None, facts: dict[str, Any] | None = None, **runtimes: Any):
    """A gateway in front of services of these names; each falls back to the next, the last one to the first."""
    fleet, names = Fleet(), list(runtimes)
    for name, following in zip(names, [*names[1:], names[0]], strict=True):
        more = {"fallback": f"team/{following}", "fallback_seconds": 30.0} | ((facts or {}) if name == names[0] else {})
        fleet.set_service(f"team/{name}", Service(f"team/{name}", name, **more))
        if (runtime := runtimes[name]) is not None:
            fleet.set_endpoint(f"{name}-0", Endpoint(f"{name}-0", f"team/{name}", "r1", runtime.url))
    options = {"host": "127.0.0.1", "port": 0, "admin_port": 0} | (settings or {})
    async with Gateway(GatewaySettings(**options), fleet) as gateway, a_caller(gateway) as caller:
        yield gateway, caller


async def ask(caller: Caller, model: str = "big", **fields: Any) -> tuple[int, str, str, str]:
    """Status, the model that was asked first, the model that answered, and the text or the error."""
    async with caller.chat(model=model, **{"stream": True} | fields) as response:
        headers = response.headers
        said = text_of(await events_of(response)) if response.status == 200 else await response.text()
        return response.status, headers.get("x-slipway-fallback-from", ""), headers.get("x-slipway-model", ""), said


def counted(gateway: Gateway, metric: str) -> dict[tuple[str, ...], float]:
    found = getattr(gateway.metrics, metric).collect()[0].samples
    return {tuple(one.labels.values()): one.value for one in found if one.name.endswith("_total") and one.value}


@pytest.mark.capability("RG-9")
@pytest.mark.parametrize(
    ("trouble", "reason"), [(be_full, "failed"), (be_draining, "failed"), (None, "refused")], ids=["429", "503", "none"]
)
async def test_what_its_own_service_refuses_the_fallback_answers_and_says_so(trouble, reason):
    async with AsyncExitStack() as stack:
        big = await stack.enter_async_context(Runtime(trouble)) if trouble is not None else None
        small = await stack.enter_async_context(Runtime(words=["small"]))
        gateway, caller = await stack.enter_async_context(services(big=big, small=small))
        assert await ask(caller) == (200, "big", "small", "small")
        assert small.bodies[0]["model"] == "small", "the fallback is asked by its own name"
        assert counted(gateway, "fallbacks") == {(BIG, SMALL, reason): 1}
        assert await ask(caller, "small") == (200, "", "small", "small"), "who asks for it gets no header"


@pytest.mark.capability("RG-9")
async def test_a_stream_that_does_not_begin_in_time_moves_and_its_replica_is_not_blamed():
    async with Runtime() as big, Runtime(words=["small"]) as small:
        facts = {"fallback_seconds": 0.1}
        async with services(facts=facts, big=big.hold(), small=small) as (gateway, caller):
            assert await ask(caller) == (200, "big", "small", "small")
            await big.cancelled.wait()
            assert counted(gateway, "fallbacks") == {(BIG, SMALL, "slow"): 1}
            assert counted(gateway, "upstream_errors") == {}
            assert not gateway.fleet.is_ejected(gateway.fleet.table.endpoint("big-0"))


@pytest.mark.capability("RG-9")
async def test_an_answer_in_one_piece_takes_the_time_that_it_takes():
    """Its first byte is its last: after `afterSeconds` nobody knows how far it is."""
    async with (
        Runtime(answer_whole) as big,
        Runtime() as small,
        services(facts={"fallback_seconds": 0.05}, big=big.hold(), small=small) as (_, caller),
    ):
        asking = asyncio.create_task(caller.chat(model="big").__aenter__())
        await until(lambda: big.requests)
        done, _ = await asyncio.wait({asking}, timeout=0.3)
        assert not done
        big.allow(1)
        response = await asking
        assert (response.status, small.requests) == (200, 0)
        assert "x-slipway-fallback-from" not in response.headers


@pytest.mark.capability("RG-9", "RG-7")
async def test_a_request_that_wakes_a_service_waits_for_it_only_as_long_as_the_fallback_says():
    async with Runtime(words=["small"]) as small:
        facts = {"fallback_seconds": 0.2, "activation": WaitLimits(10, 1 << 20, 600.0)}
        async with services(facts=facts, big=None, small=small) as (gateway, caller):
            asking = asyncio.create_task(ask(caller))
            await until(lambda: gateway.fleet.demand.waiting_by_service().get(BIG))
            assert await asking == (200, "big", "small", "small")
            assert counted(gateway, "fallbacks") == {(BIG, SMALL, "waiting"): 1}
            assert not gateway.fleet.demand.waiting_by_service().get(BIG), "it does not wait there any more"


@pytest.mark.capability("RG-9")
async def test_the_chain_goes_on_and_never_in_a_circle():
    async with (
        Runtime(be_full) as big,
        Runtime(be_full) as small,
        Runtime(words=["tiny"]) as tiny,
        services(big=big, small=small, tiny=tiny) as (_, caller),
    ):
        assert await ask(caller) == (200, "big", "tiny", "tiny")
        tiny.behaviour = be_full
        status, asked, _, said = await ask(caller)
        assert (status, asked) == (429, "big"), "the last one's refusal, with its time to come back"
        assert "full" in said
        assert (big.requests, small.requests, tiny.requests) == (2, 2, 2)


@pytest.mark.capability("RG-9")
async def test_what_asks_for_exactly_this_and_what_may_crash_replicas_stays():
    async with Runtime(be_full) as big, Runtime() as small, services(big=big, small=small) as (gateway, caller):
        gateway.fleet.set_adapter("team/voice", Adapter("team/voice", "voice", BIG))
        pinned = await ask(caller, headers={"x-slipway-pin-revision": "r1"})
        adapter = await ask(caller, "voice")
        gateway.fleet.set_endpoint("big-1", Endpoint("big-1", BIG, "r1", big.url))
        big.behaviour = hang_up
        poison = await ask(caller)
        assert [pinned[0], adapter[0], poison[0]] == [429, 503, 502]
        assert small.requests == 0


@pytest.mark.capability("RG-9", "SE-1")
async def test_a_tenant_is_sent_only_where_it_may_go(tmp_path):
    (tmp_path / "keys").mkdir()
    tenants = [
        {"name": "all", "keys": ["all"], "models": ["*"]},
        {"name": "one", "keys": ["one"], "models": ["big"]},
    ]
    for tenant in tenants:
        (tmp_path / "keys" / tenant["name"]).write_text(digest_of(f"sk-{tenant['name']}"))
    (tmp_path / "tenants.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    settings = {"tenants_file": tmp_path / "tenants.yaml", "keys_directory": tmp_path / "keys"}
    async with (
        Runtime(be_full) as big,
        Runtime(words=["small"]) as small,
        services(settings=settings, big=big, small=small) as (_, caller),
    ):
        everywhere = await ask(caller, headers={"Authorization": "Bearer sk-all"})
        only_big = await ask(caller, headers={"Authorization": "Bearer sk-one"})
    assert everywhere == (200, "big", "small", "small")
    assert only_big[0] == 429
    assert small.requests == 1


@pytest.mark.capability("RG-9")
def test_the_fallback_is_a_service_of_the_same_namespace():
    body = a_service_object()
    body["spec"]["routing"] = {"fallback": {"service": "small", "afterSeconds": 7}}
    service = service_of(msgspec.convert(body, InferenceService))

    assert (service.fallback, service.fallback_seconds) == ("team/small", 7)
    assert service_of(msgspec.convert(a_service_object(), InferenceService)).fallback == ""


# --- the degrade ladder ---------------------------------------------------------------------------------------------


@pytest.mark.capability("RD-6")
@given(st.integers(0, 50), st.lists(st.integers(0, 500), max_size=6), st.integers(0, 500))
def test_more_waiting_requests_never_degrade_less(limit, waiting, more):
    ladder = Ladder(limit)
    assert ladder.step(waiting) <= ladder.step([one + more for one in waiting])
    assert Ladder(0).step(waiting) is Step.NONE
    if limit and waiting:
        assert (ladder.step(waiting) is Step.NONE) == (sum(waiting) < limit * len(waiting))


@pytest.mark.capability("RD-6")
@pytest.mark.parametrize(
    ("waiting", "low", "limit", "model"),
    [(1, 200, None, "big"), (2, 429, None, "big"), (4, 429, 32, "big"), (8, 429, 32, "small")],
    ids=["not yet", "sheds low priority", "shortens answers", "uses the fallback"],
)
async def test_an_overloaded_service_sheds_then_shortens_then_falls_back_and_each_step_shows(
    tmp_path, waiting, low, limit, model
):
    (tmp_path / "keys").mkdir()
    tenants = [{"name": name, "keys": [name], "models": ["*"], "priority": p} for name, p in (("low", -5), ("high", 0))]
    for tenant in tenants:
        (tmp_path / "keys" / str(tenant["name"])).write_text(digest_of(f"sk-{tenant['name']}"))
    (tmp_path / "tenants.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    settings = {"tenants_file": tmp_path / "tenants.yaml", "keys_directory": tmp_path / "keys"}
    settings |= {"degrade_waiting": 2, "degrade_max_tokens": 32}
    headers = {"Authorization": "Bearer sk-high"}
    async with (
        Runtime() as big,
        Runtime(words=["small"]) as small,
        services(settings=settings, big=big.hold(), small=small) as (gateway, caller),
    ):
        endpoint = gateway.fleet.table.endpoint("big-0")
        # `waiting` requests of other gateways wait at the replica, as it said beside its last answer.
        gateway.fleet.record_load(endpoint, f"TEXT named_metrics.num_requests_waiting={waiting}")
        big.allow(1000)
        async with caller.chat(model="big", stream=True, max_tokens=900, headers=headers) as response:
            await response.read()
            named = response.headers.get("x-slipway-degraded", "")
            assert (response.status, response.headers["x-slipway-model"]) == (200, model)
        refused = {"Authorization": "Bearer sk-low"}
        async with caller.chat(model="big", stream=True, max_tokens=900, headers=refused) as response:
            shed = response.headers.get("x-slipway-degraded", "")
            assert response.status == low
            assert (response.headers.get("Retry-After") is not None) == (low == 429)
        steps = counted(gateway, "degraded")
    asked = (small if model == "small" else big).bodies[0]
    assert asked["max_tokens"] == (limit or 900)
    assert named == (f"max_tokens={limit}" if limit else "")
    assert shed == ("shed" if low == 429 else "")
    expected = {(BIG, "shed"): float(low == 429), (BIG, "capped"): float(limit is not None)}
    expected |= {(BIG, "fallback"): float(model == "small")}
    assert steps == {name: value for name, value in expected.items() if value}
