"""Replicas that die, restart, refuse, stay silent and come back: the adapter ends up where it should be, at rest."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from slipway_api.adapter_conditions import CONDITIONS, EVENTS
from slipway_operator.core.actions import Failure
from slipway_operator.core.adapter.observed import AdapterObserved, Base, Rival
from slipway_operator.core.adapter.plan import plan
from tests.builders import T0
from tests.operator.core.adapter.simulation import Simulation
from tests.operator.core.adapter.test_steps import an_adapter

REFUSED = Failure(action="AddFinalizer", reason="Forbidden", message="a policy", at=T0)
REFUSALS = [
    "DownloadFailed",
    "DigestMismatch",
    "CredentialsInvalid",
    "RankTooLarge",
    "CapacityExceeded",
    "EngineRejected",
]


class Life(RuleBasedStateMachine):
    """A random life of one adapter and its replicas, which then comes to rest."""

    @initialize(replicas=st.integers(1, 4), some=st.booleans())
    def begin(self, replicas: int, some: bool) -> None:
        placement = {"mode": "Replicas", "replicas": 2} if some else {"mode": "All"}
        self.world = Simulation(an_adapter(placement=placement), replicas)
        self.versions = 0

    @rule(seconds=st.integers(1, 40))
    def time_passes(self, seconds: int) -> None:
        self.world.run(seconds)

    @rule()
    def replica_comes(self) -> None:
        if len(self.world.replicas) < 6:
            self.world.add()

    @precondition(lambda self: len(self.world.replicas) > 1)
    @rule(number=st.integers(0, 9))
    def replica_goes(self, number: int) -> None:
        self.world.remove(self.pick(number))

    @rule(number=st.integers(0, 9))
    def container_restarts(self, number: int) -> None:
        self.world.restart(self.pick(number))

    @rule(number=st.integers(0, 9), ready=st.booleans())
    def readiness_flaps(self, number: int, ready: bool) -> None:
        self.world.set_ready(self.pick(number), ready)

    @rule(number=st.integers(0, 9), answers=st.booleans())
    def admin_port_is_silent(self, number: int, answers: bool) -> None:
        self.world.replicas[self.pick(number)].answers = answers

    @rule(number=st.integers(0, 9), reason=st.sampled_from(["", *REFUSALS]))
    def replica_refuses(self, number: int, reason: str) -> None:
        self.world.replicas[self.pick(number)].refuses = reason

    @rule()
    def operator_restarts(self) -> None:
        self.world.restart_operator()

    @rule()
    def source_changes(self) -> None:
        self.versions += 1
        self.world.edit(source={"uri": f"file:///sailor-{self.versions}"})

    def pick(self, number: int) -> str:
        names = sorted(self.world.replicas)
        return names[number % len(names)]

    def teardown(self) -> None:
        """All faults end: the adapter is where it should be, nothing is written any more, and it can be deleted."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for name, one in world.replicas.items():
            one.answers, one.refuses = True, ""
            world.set_ready(name, True)
        world.edit(source={"uri": "file:///last"})
        world.run(700)
        assert world.adapter is not None
        mode = world.adapter.spec.placement
        wanted = min(mode.replicas or len(world.replicas), len(world.replicas))
        assert len(world.serving) == wanted, (world.serving, world.adapter.status)
        for name in world.serving:
            assert set(world.replicas[name].has) == {"sailor"}
            assert world.replicas[name].has["sailor"].uri == "file:///last"
        assert {name for name, one in world.replicas.items() if one.has} == world.serving
        assert world.adapter.status.loaded == f"{wanted}/{wanted}"
        writes, calls = world.writes, world.calls
        world.run(600)
        assert (world.writes, world.calls) == (writes, calls), "at rest"
        for one in world.replicas.values():
            one.answers = False
        world.delete()
        world.run(90)
        assert world.adapter is None, "a deletion ends, whatever the replicas do"


LifeOfAnAdapter = pytest.mark.capability("ML-2", "ML-4")(Life.TestCase)
LifeOfAnAdapter.settings = settings(max_examples=40, stateful_step_count=25)


@pytest.mark.capability("ML-2")
def test_a_restarted_container_has_its_adapter_again_within_seconds():
    """aibrix#236: found by the restart, not by the next slow look."""
    world = Simulation(an_adapter(), 3)
    world.run(30)
    world.restart("chat-2")
    world.run(10)

    assert "sailor" in world.replicas["chat-2"].has
    assert world.serving == {"chat-1", "chat-2", "chat-3"}


def an_evicted_adapter() -> Simulation:
    """In mode OnDemand: loaded by a request, then idle on a replica with more adapters than fit."""
    world = Simulation(an_adapter(placement={"mode": "OnDemand"}), 1)
    world.room, world.waiting = 1, 1
    world.run(10)
    world.waiting = 0
    [one] = world.replicas.values()
    assert one.routed
    one.has["sailor"] = one.has["sailor"].model_copy(update={"idle_seconds": 400.0})
    one.has["other"] = one.has["sailor"].model_copy(update={"name": "other"})
    world.run(300)
    assert not one.routed
    assert set(one.has) == {"other"}
    return world


@pytest.mark.capability("OP-6")
def test_what_an_operator_says_of_adapters_is_what_is_documented():
    told: set[tuple[str, str, str]] = set()
    posted: set[str] = set()

    def keep(world: Simulation) -> None:
        nonlocal told, posted
        told |= world.told
        posted |= {event.reason.value for event in world.events}

    for reason in REFUSALS:
        world = Simulation(an_adapter(), 2)
        for one in world.replicas.values():
            one.refuses = reason
        world.run(5000)
        keep(world)
    world = Simulation(an_adapter(), 2)
    world.run(30)
    world.edit(source={"uri": "file:///next"})
    world.run(30)
    next(iter(world.replicas.values())).refuses = "DownloadFailed"
    world.edit(source={"uri": "file:///third"})
    world.run(30)
    for name in world.replicas:
        world.set_ready(name, False)
    world.run(60)
    world.replicas.clear()
    world.wake()
    world.run(5)
    world.base_is_there = False
    world.wake()
    world.run(5)
    world.rival = Rival(kind="LoRAAdapter", name="older", served_name="sailor")
    world.wake()
    world.run(5)
    world.delete()
    world.run(5)
    keep(world)
    keep(an_evicted_adapter())
    base = Base(name="chat", uid="u", desired=1, has_room=False)
    for failures in ((), (REFUSED,)):
        made = plan(AdapterObserved(adapter=an_adapter(), base=base, failures=failures), T0)
        told |= {(one.type, one.status.value, one.reason) for one in made.status.conditions}
        posted |= {one.reason.value for one in made.events}

    assert {(kind.value, status.value, reason.value) for kind, status, reason, _ in CONDITIONS} == told
    assert {reason.value for reason in EVENTS} == posted
