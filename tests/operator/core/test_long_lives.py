"""Hours of virtual time in a hostile cluster: the laws hold whatever comes and goes, and the service comes to rest.

The cluster jumps from one moment at which something is due to the next, so an hour costs as much as what happens in
it. The laws of `laws.py` are checked at every such moment: no ready replica is asked to go while it is needed, no slot
has more than two live replicas, nor two for longer than a start and a drain take.
"""

import random
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.builders import T0
from tests.operator.core.test_properties import FAULTS, LIMITS, STEPS, assert_at_rest, calm_down, happen, make

pytestmark = pytest.mark.capability("RD-10")

HOSTILE = (
    *("flap", "flap", "lose node", "recover node", "lose zone", "recover zone", "device plugin refuses"),
    *("device plugin works", "silence", "speak", "answer late", "caches lag", "hang", "evict", "edit", "load"),
    *("cordon", "uncordon", "kill operator"),
)
PAUSES = st.integers(1, 1800)


def live_long(world, life):
    """Each step of this life, and the quiet time after it."""
    for kind, number, pause in life:
        happen(world, kind, number)
        world.skip(pause)


@pytest.mark.parametrize("replicas", [3, None], ids=["fixed", "autoscaled"])
@pytest.mark.parametrize("seed", range(6))
def test_after_hours_of_faults_the_service_is_what_the_spec_wants(seed, replicas):
    chance = random.Random(seed)
    life = [(chance.choice(HOSTILE), chance.randint(1, 6), round(chance.expovariate(1 / 200))) for _ in range(70)]
    world = make(chance.choice([(1, 0), (0, 1), (2, 1)]), replicas=replicas)
    world.reconcile()
    live_long(world, life)
    assert world.now - T0 > timedelta(hours=2)
    calm_down(world)
    assert_at_rest(world)


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    limits=LIMITS,
    replicas=st.one_of(st.none(), st.integers(1, 4)),
    life=st.lists(st.tuples(FAULTS, st.integers(0, 7), PAUSES), min_size=8, max_size=25),
)
def test_no_order_of_faults_over_hours_breaks_a_law(limits, replicas, life):
    world = make(limits, replicas=replicas)
    world.reconcile()
    live_long(world, life)
    calm_down(world)
    assert_at_rest(world)


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(limits=LIMITS, replicas=st.integers(1, 4), life=st.lists(STEPS, min_size=1, max_size=8))
def test_time_that_is_skipped_changes_nothing(limits, replicas, life):
    """The same life second by second has the same log, to the second."""
    logs = []
    for passes in ("run", "skip"):
        world = make(limits, replicas=replicas)
        world.reconcile()
        for kind, number in life:
            happen(world, kind, number)
            getattr(world, passes)(200)
        logs.append(world.log)
    assert logs[0] == logs[1]
