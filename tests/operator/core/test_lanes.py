"""A refused action stops its own lane of a plan, and no other."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway_api import names
from slipway_api.conditions import EventReason
from slipway_kube.errors import Forbidden
from slipway_operator.controller.executor import ACTIONS_PER_PASS, Execution, Executor, Result
from slipway_operator.controller.kinds import Key, Memory, StoredObject
from slipway_operator.core.actions import (
    Action,
    AddFinalizer,
    AnnotatePod,
    ApplyChild,
    CreatePod,
    CreateRevision,
    DeletePod,
    Event,
    events_of,
)
from slipway_operator.core.lanes import in_order, lane_of, waits_for
from slipway_operator.metrics import OperatorMetrics

pytestmark = pytest.mark.capability("OP-16")

KEY = Key("InferenceService", "team", "chat")
STORED = StoredObject("uid", 1, {"metadata": {"generation": 1, "resourceVersion": "1"}})
REVISIONS = st.sampled_from(["aaaaa", "bbbbb"])
CHILDREN = st.sampled_from(["Service/chat", "PodDisruptionBudget/chat", "NetworkPolicy/chat-replicas"])


def labelled(revision: str) -> dict[str, Any]:
    return {"metadata": {"labels": {names.LABEL_REVISION: revision}}}


def event_of(name: str) -> tuple[Event, ...]:
    return (Event(reason=EventReason.REPLICA_CREATED, action="Create", message=name),)


def create(revision: str, slot: int) -> CreatePod:
    name = f"chat-{revision}-{slot}"
    return CreatePod(name=name, manifest=labelled(revision), reason="", events=event_of(f"pod {name}"))


ACTIONS = st.one_of(
    st.just(AddFinalizer(finalizer="f", reason="", events=event_of("finalizer"))),
    st.builds(create, REVISIONS, st.integers(0, 3)),
    REVISIONS.map(
        lambda one: CreateRevision(name=one, manifest=labelled(one), reason="", events=event_of(f"record {one}"))
    ),
    CHILDREN.map(lambda one: ApplyChild(key=one, manifest={}, digest="d", reason="", events=event_of(one))),
    st.integers(0, 3).map(
        lambda one: DeletePod(name=f"old-{one}", uid="u", grace_seconds=1, reason="", events=event_of(f"old-{one}"))
    ),
    st.integers(0, 3).map(
        lambda one: AnnotatePod(
            name=f"old-{one}",
            uid="u",
            annotations={},
            reason="",
            after="PodDisruptionBudget/chat" if one % 2 else "",
            events=event_of(f"annotation {one}"),
        )
    ),
)
PLANS = st.lists(ACTIONS, min_size=1, max_size=ACTIONS_PER_PASS, unique_by=lambda one: (type(one), str(one)))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Refusing(Executor):
    """Executes nothing, and refuses the chosen actions."""

    def __init__(self, refused: set[int], clock: Clock) -> None:
        nothing: Any = SimpleNamespace()
        super().__init__(
            nothing, nothing, nothing, nothing, nothing, nothing, {}, {}, lambda *_: None, OperatorMetrics(),
            monotonic=clock, uniform=lambda _, most: most,
        )  # fmt: skip
        self.refused = refused
        self.tried: list[int] = []

    async def _do(self, key: Key, stored: StoredObject, action: Action, memory: Memory, execution: Execution) -> Result:
        self.tried.append(id(action))
        if id(action) in self.refused:
            raise Forbidden(403, "exceeded quota", reason="Forbidden")
        return Result.DONE


@settings(max_examples=200, deadline=None)
@given(plan=PLANS, chosen=st.integers(0, 100))
def test_every_action_of_another_lane_is_carried_out_and_only_their_events_are_posted(plan, chosen):
    """review/control-plane.md 4."""
    refused = plan[chosen % len(plan)]
    if isinstance(refused, AddFinalizer):
        return  # everything that creates waits for it; see below
    stopped = {lane_of(refused)}
    for _ in range(3):
        stopped |= {lane_of(one) for one in plan if waits_for(one) & stopped}
    memory, executor = Memory(), Refusing({id(refused)}, Clock())

    execution = asyncio.run(executor.execute(KEY, STORED, plan, memory))

    done = {id(one) for one in execution.done}
    missed = [one for one in plan if id(one) not in done and lane_of(one) not in stopped]
    assert missed == []
    assert id(refused) not in done
    assert [one.action for one in execution.refused] == [one.action for one in memory.failures]
    assert len(execution.refused) == 1
    assert refused.events[0] not in events_of(execution.done)


@settings(max_examples=100, deadline=None)
@given(plan=PLANS)
def test_each_action_comes_after_the_lanes_that_it_waits_for(plan):
    ordered = list(in_order(plan))
    assert sorted(map(id, ordered)) == sorted(map(id, plan))
    for position, action in enumerate(ordered):
        assert not waits_for(action) & {lane_of(later) for later in ordered[position + 1 :]}


def test_nothing_is_created_before_the_finalizer_but_replicas_are_still_removed():
    finalizer = AddFinalizer(finalizer="f", reason="")
    plan = [create("aaaaa", 0), finalizer, DeletePod(name="old", uid="u", grace_seconds=1, reason="")]
    execution = asyncio.run(Refusing({id(finalizer)}, Clock()).execute(KEY, STORED, plan, Memory()))
    assert [type(one) for one in execution.done] == [DeletePod]


def test_no_replica_is_created_of_a_revision_that_cannot_be_stored_but_others_are():
    record = CreateRevision(name="chat-bbbbb", manifest=labelled("bbbbb"), reason="")
    plan = [create("aaaaa", 0), create("bbbbb", 0), record]
    execution = asyncio.run(Refusing({id(record)}, Clock()).execute(KEY, STORED, plan, Memory()))
    assert execution.done == [plan[0]]


def test_each_lane_rests_by_itself_and_longer_after_each_refusal():
    pod, child = create("aaaaa", 0), ApplyChild(key="Service/chat", manifest={}, digest="d", reason="")
    clock, memory = Clock(), Memory()
    executor = Refusing({id(pod)}, clock)
    moments = []
    for second in range(40):
        clock.now = float(second)
        executor.tried = []
        asyncio.run(executor.execute(KEY, STORED, [pod, child], memory))
        assert id(child) in executor.tried
        if id(pod) in executor.tried:
            moments.append(second)
    assert moments == [0, 1, 2, 4, 8, 16, 32]
    executor.refused = set()
    clock.now = 100.0
    asyncio.run(executor.execute(KEY, STORED, [pod, child], memory))
    assert memory.failures == ()
