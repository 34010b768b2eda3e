"""Mode OnDemand: loaded by the first request, kept while there is room, dropped when idle for others."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway_api.lora_adapter import AdapterPodStatus, PodState
from slipway_api.runtime_api import AdapterInfo
from slipway_operator.core.adapter.calls import ListAdapters, UnrouteAdapter
from slipway_operator.core.adapter.observed import AdapterObserved, AdapterPod, Listing, OnDemandAdapter
from slipway_operator.core.adapter.on_demand import FRESH, choose, leaving_adapters
from slipway_operator.core.adapter.plan import plan
from tests.builders import T0
from tests.operator.core.adapter.simulation import Simulation
from tests.operator.core.adapter.test_steps import an_adapter, seen

NOW = T0 + timedelta(minutes=10)
ON_DEMAND = {"placement": {"mode": "OnDemand"}}
LONG = 1000.0


def a_replica(name: str, most: int = 2, age: float = 1.0, **idle: float | None) -> AdapterPod:
    """A ready replica with these adapters, each idle for so many seconds; it has routed them."""
    known = {
        one: AdapterInfo(
            name=one, state="host", digest="d", version=an_adapter().version, uri="u", idle_seconds=seconds
        )
        for one, seconds in idle.items()
    }
    at = NOW - timedelta(seconds=age)
    listing = Listing(at=at, boot_id="b", restarts=0, adapters=known, max_cpu_adapters=most)
    return AdapterPod(name=name, uid=name, ready=True, listing=listing, routed="sailor" in idle)


def a_fleet(*pods: AdapterPod, waiting: int = 0, others: Any = (), **facts: Any) -> AdapterObserved:
    own = OnDemandAdapter(name="sailor", waiting=waiting)
    return seen(*pods, adapter=an_adapter(**ON_DEMAND), on_demand=(own, *others), **facts)


def chosen(observed: AdapterObserved, entries: Any = None) -> list[str]:
    return [pod.name for pod in choose(observed, entries or {}, NOW).chosen]


FAILED = {"a": AdapterPodStatus(name="a", state=PodState.FAILED, attempts=1)}
TABLE: list[tuple[str, AdapterObserved, Any, list[str]]] = [
    ("no request waits", a_fleet(a_replica("a"), a_replica("b")), {}, []),
    ("a request waits and one has no room", a_fleet(a_replica("a", 1, x=0.0), a_replica("b"), waiting=1), {}, ["b"]),
    ("a replica has it", a_fleet(a_replica("a"), a_replica("b", sailor=LONG)), {}, ["b"]),
    ("it failed there", a_fleet(a_replica("a"), a_replica("b")), FAILED, ["a"]),
    ("a load is under way", a_fleet(a_replica("a"), replace(a_replica("b"), busy=True)), {}, ["b"]),
    (
        "the one that has it is silent",
        a_fleet(replace(a_replica("b", sailor=LONG), silent_since=NOW), a_replica("a"), waiting=1),
        {},
        ["a"],
    ),
]


@pytest.mark.capability("ML-2")
@pytest.mark.parametrize(("observed", "entries", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_which_replica_should_have_an_adapter_on_demand(observed, entries, expected):
    assert chosen(observed, entries) == expected


@given(waiting=st.integers(0, 3), holders=st.sets(st.sampled_from("abcd")), full=st.sets(st.sampled_from("abcd")))
def test_at_most_one_replica_has_it_and_one_does_while_requests_wait(waiting, holders, full):
    pods = [
        a_replica(one, most=1 if one in full else 5, **({"sailor": 0.0} if one in holders else {"x": 0.0}))
        for one in "abcd"
    ]
    found = chosen(a_fleet(*pods, waiting=waiting))

    assert len(found) == (1 if waiting or holders else 0)
    assert not holders or set(found) <= holders, "it is not loaded twice"


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"idle": {"a": LONG, "b": LONG - 1, "c": LONG - 2}}, ["a"]),
        ({"idle": {"a": LONG, "b": LONG + 1, "c": 0.0}, "priority": {"b": 1}}, ["a"]),
        ({"idle": {"a": 1.0, "b": 2.0, "c": 0.0}}, []),
        ({"idle": {"a": LONG, "b": 0.0}}, []),
        ({"idle": {"a": LONG, "b": LONG, "c": 0.0}, "pinned": {"a"}}, ["b"]),
        ({"idle": {"a": LONG, "b": 50.0, "c": 0.0}, "waiting": {"a": 1}}, ["b"]),
        ({"idle": {"a": LONG, "b": 0.0, "c": None}}, ["a"]),
        ({"idle": {"other": LONG, "b": 40.0, "c": 0.0}, "modes": "bc"}, ["b"]),
    ],
)
def test_which_adapters_leave_a_replica_that_has_more_than_fit(facts, expected):
    idle = facts["idle"]
    peers = tuple(
        OnDemandAdapter(
            name=one,
            priority=facts.get("priority", {}).get(one, 0),
            pinned=one in facts.get("pinned", ()),
            waiting=facts.get("waiting", {}).get(one, 0),
        )
        for one in facts.get("modes", idle)
    )
    pod = a_replica("p", **idle)
    assert pod.listing is not None

    assert list(leaving_adapters(a_fleet(pod, others=peers), pod.listing, NOW)) == expected


def test_a_list_that_is_too_old_is_asked_for_again_before_an_adapter_leaves():
    stale = a_replica("p", most=1, age=FRESH.total_seconds() + 1, sailor=LONG, other=0.0)
    fresh = a_replica("p", most=1, age=1, sailor=LONG, other=0.0)

    asked = plan(a_fleet(stale), NOW)
    assert [type(one) for one in asked.actions] == [ListAdapters]
    assert "AdapterEvicted" not in {event.reason for event in asked.events}
    left = plan(a_fleet(fresh), NOW)
    assert [type(one) for one in left.actions] == [UnrouteAdapter]
    [event] = left.events
    assert event.reason == "AdapterEvicted"
    assert event.message == "p has 2 adapters, memory for 1; sailor (priority 0) was idle for 1001 s"


def test_requests_bring_an_adapter_back_that_has_begun_to_leave():
    leaving = a_replica("p", most=1, sailor=LONG, other=0.0)

    assert chosen(a_fleet(leaving, unrouted={"p": NOW})) == []
    assert chosen(a_fleet(leaving, unrouted={"p": NOW}, waiting=1)) == ["p"]


@pytest.mark.capability("ML-2")
def test_an_adapter_on_demand_is_loaded_by_the_first_request_stays_and_survives_the_operators_restart():
    world = Simulation(an_adapter(**ON_DEMAND))
    world.run(20)
    assert world.adapter is not None
    assert (world.serving, world.calls) == (set(), 0)
    ready = {one.type: (one.status.value, one.reason) for one in world.adapter.status.conditions}["Ready"]
    assert ready == ("True", "OnDemand")

    world.waiting = 1
    world.wake()
    world.run(10)
    [first] = world.serving
    world.waiting = 0
    world.wake()
    world.run(300)
    assert world.serving == {first}
    writes = world.writes

    world.restart_operator()
    world.run(300)
    assert (world.serving, world.writes) == ({first}, writes)

    world.remove(first)
    world.run(60)
    assert world.serving == set(), "no other replica loads it before a request asks for it"
