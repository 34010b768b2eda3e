"""Waiting pods that are replaced: too old, built by another version, or returned and of no use; one at a time."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway_api.runtime_api import ReadyReason
from slipway_api.warm_pool_conditions import PoolEvent
from slipway_operator.core.actions import CreatePod, DeletePod, GiveModelBack
from slipway_operator.core.observed import Sample
from slipway_operator.core.warm_pool.plan import PoolPlan, plan
from slipway_operator.core.warm_pool.recycle import BOOT_WITHIN, GIVE_BACK_WITHIN
from tests.builders import T0, minutes, seconds
from tests.operator.core.warm_pool.pools import APoolPod, a_pool, a_waiting_pod, seen


def deleted(made: PoolPlan) -> list[str]:
    return [action.name for action in made.actions if isinstance(action, DeletePod)]


def asked(made: PoolPlan) -> list[str]:
    return [action.name for action in made.actions if isinstance(action, GiveModelBack)]


def recycled(made: PoolPlan) -> list[str]:
    return [event.message for event in made.events if event.reason is PoolEvent.POD_RECYCLED]


def built_otherwise(pod: APoolPod) -> APoolPod:
    return APoolPod(replace(pod.facts, template="older"))


@pytest.mark.capability("AS-5")
def test_an_old_pod_is_replaced_when_all_others_can_be_claimed_the_oldest_first():
    pool = a_pool(size=2, recycleAfterSeconds=600)
    young = a_waiting_pod(0).booted().but(created_at=T0 + seconds(60))
    old = a_waiting_pod(1).booted()

    made = plan(seen(pool, young, old), T0 + minutes(10))

    assert deleted(made) == ["pool-warm-1"]
    assert recycled(made) == ["pool-warm-1 is replaced: it is older than 600s"]
    early = plan(seen(pool, young, old), T0 + minutes(9))
    assert (deleted(early), early.requeue_after) == ([], 60.0), "time alone makes it old"
    waits = plan(seen(pool, young, a_waiting_pod(2)), T0 + minutes(30))
    assert deleted(waits) == [], "a pod is missing already"
    few = plan(seen(pool, young), T0 + minutes(30))
    assert deleted(few) == [], "and must be started first"


@pytest.mark.capability("AS-5")
def test_pods_of_another_version_of_the_operator_are_replaced_one_at_a_time_and_then_no_more():
    pool = a_pool(size=3)
    pods = [built_otherwise(a_waiting_pod(number).booted()) for number in range(3)]

    first = plan(seen(pool, *pods), T0)
    assert deleted(first) == ["pool-warm-0"]
    assert recycled(first) == ["pool-warm-0 is replaced: this version of the operator builds other pods"]
    starting = plan(seen(pool, a_waiting_pod(3), *pods[1:]), T0)
    assert deleted(starting) == []
    second = plan(seen(pool, a_waiting_pod(3).booted(), *pods[1:]), T0)
    assert deleted(second) == ["pool-warm-1"]
    assert deleted(plan(seen(pool, *(a_waiting_pod(one).booted() for one in (3, 4, 5))), T0)) == []


@pytest.mark.capability("AS-5")
def test_a_pod_that_another_admin_token_was_derived_for_is_built_the_same():
    pool = a_pool(size=1)
    made = plan(seen(pool), T0)
    (create,) = (one for one in made.actions if isinstance(one, CreatePod))
    annotations = create.manifest["metadata"]["annotations"]
    again = a_waiting_pod(0).booted()
    assert annotations["slipway.dev/warm-template"] == again.facts.template


@pytest.mark.capability("AS-5")
def test_a_returned_pod_is_asked_for_its_model_until_it_has_none_and_counts_as_starting():
    pool = a_pool(size=1)
    pod = a_waiting_pod(0).returned()

    made = plan(seen(pool, pod, booted_before=frozenset()), T0 + seconds(1))
    assert (asked(made), deleted(made), made.requeue_after) == (["pool-warm-0"], [], 2.0)
    assert made.status is not None
    assert (made.status.ready, made.status.warming) == (0, 1)
    gone = pod.but(sample=Sample(at=T0 + seconds(3), kv_usage=0, running=0, waiting=0, starting="Booting"))
    assert asked(plan(seen(pool, gone), T0 + seconds(4))) == []

    back = plan(seen(pool, pod.booted(T0 + seconds(9)), booted_before=frozenset()), T0 + seconds(9))
    assert asked(back) == []
    assert [(event.reason, event.message) for event in back.events] == [
        (PoolEvent.POD_RETURNED, "pool-warm-0 can be claimed again: 1 of 1")
    ]


@pytest.mark.capability("AS-5")
@pytest.mark.parametrize(
    ("starting", "after", "why"),
    [
        ("", GIVE_BACK_WITHIN, "it has not given its model back within 60s"),
        (None, GIVE_BACK_WITHIN, "it has not given its model back within 60s"),
        ("Booting", BOOT_WITHIN, "it cannot be claimed 300s after its return"),
        (ReadyReason.MEMORY_NOT_FREED.value, timedelta(), "the model of its last service has left memory in use"),
    ],
)
def test_a_returned_pod_that_cannot_be_claimed_again_is_replaced(starting, after, why):
    pool = a_pool(size=1)
    pod = a_waiting_pod(0).returned()
    sample = None if starting is None else replace(pod.facts.replica.sample, starting=starting)
    pod = pod.but(sample=sample)

    made = plan(seen(pool, pod), T0 + after)

    assert recycled(made) == [f"pool-warm-0 is replaced: {why}"]
    assert deleted(made) == ["pool-warm-0"]
    if after:
        assert deleted(plan(seen(pool, pod), T0 + after - seconds(1))) == []


@pytest.mark.capability("AS-5")
@given(
    st.lists(st.tuples(st.sampled_from(["booted", "starting", "returned", "older"]), st.integers(0, 1200)), max_size=6),
    st.integers(0, 4),
    st.integers(0, 1200),
)
def test_whatever_is_recycled_at_most_one_claimable_pod_goes_for_its_age(pods, size, now):
    made_of = {
        "booted": lambda pod: pod.booted(),
        "starting": lambda pod: pod,
        "returned": lambda pod: pod.returned(),
        "older": lambda pod: built_otherwise(pod.booted()),
    }
    built = [
        made_of[kind](a_waiting_pod(number)).but(created_at=T0 - seconds(age))
        for number, (kind, age) in enumerate(pods)
    ]
    pool = a_pool(size=size, recycleAfterSeconds=600)

    made = plan(seen(pool, *built), T0 + seconds(now))

    claimable = {pod.facts.name for pod in built if pod.facts.is_booted}
    surplus = max(0, len(built) - size)
    assert len(claimable & set(deleted(made))) <= surplus + 1
    if len(claimable) < size:
        assert len(claimable & set(deleted(made))) <= surplus, "a pod is missing: none goes for its age"
