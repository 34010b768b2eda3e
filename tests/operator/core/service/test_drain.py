"""The drain protocol, one look at a time."""

import pytest

from slipway_operator.core.actions import DeletePod, DrainPod
from slipway_operator.core.service.replicas.drain import DrainRules, drain_replica
from tests.builders import T0, a_pod, seconds

RULES = DrainRules(timeout=seconds(300), propagation=seconds(5))


def look(pod, *, after=0):
    return drain_replica(pod.replica, RULES, T0 + seconds(after), reason="scaling down")


def test_a_ready_replica_leaves_the_route_first():
    steps = look(a_pod().ready())
    (action,) = steps.actions
    assert action == DrainPod(
        name=action.name,
        uid=action.uid,
        started=T0,
        timeout_seconds=300,
        refuse_after_seconds=5,
        reason="scaling down",
        marked=False,
    )
    assert [event.reason for event in steps.events] == ["ReplicaDraining"]
    assert steps.again_at == T0 + seconds(5)


def test_waits_until_every_router_knows_even_if_nothing_runs():
    pod = a_pod().draining().says(draining=True, at=T0 + seconds(1))
    steps = look(pod, after=4)
    assert (steps.actions, steps.again_at) == ((), T0 + seconds(5))


def test_waits_for_what_runs():
    pod = a_pod().draining().says(draining=True, running=1, at=T0 + seconds(20))
    assert look(pod, after=20).actions == ()
    waiting = a_pod().draining().says(draining=True, waiting=1, at=T0 + seconds(20))
    assert look(waiting, after=20).actions == ()


def test_deletes_with_a_grace_of_its_own_once_nothing_runs_or_waits():
    pod = a_pod().draining().says(draining=True, at=T0 + seconds(6))
    (action,) = look(pod, after=6).actions
    assert isinstance(action, DeletePod)
    assert action.grace_seconds == 30
    assert [event.reason for event in look(pod, after=6).events] == ["ReplicaDrained"]


@pytest.mark.parametrize(
    "pod",
    [
        a_pod().draining().silent(),
        a_pod().draining().says(at=T0 - seconds(1)),
        a_pod().draining().says(at=T0 + seconds(9)),
    ],
    ids=["never answered", "said nothing since", "restarted and forgot"],
)
def test_asks_again_while_the_replica_does_not_say_that_it_drains(pod):
    (action,) = look(pod, after=10).actions
    assert action.marked, "the label stands: nothing is written again"
    assert (action.started, action.timeout_seconds) == (T0, 290)


def test_gives_up_after_the_timeout_and_says_what_was_left():
    pod = a_pod().draining().says(draining=True, running=2, at=T0 + seconds(299))
    steps = look(pod, after=300)
    assert isinstance(steps.actions[0], DeletePod)
    (event,) = steps.events
    assert event.reason == "DrainTimedOut"
    assert event.reason.type == "Warning"
    assert "2 unfinished requests" in event.message


def test_the_clock_is_on_the_pod_so_a_new_operator_does_not_start_it_over():
    pod = a_pod().draining(since=T0 - seconds(299)).says(draining=True, running=1, at=T0)
    assert look(pod, after=0).actions == ()
    assert isinstance(look(pod, after=1).actions[0], DeletePod)


def test_a_replica_that_never_served_is_deleted_at_once_but_may_still_drain_by_itself():
    (action,) = look(a_pod().loading()).actions
    assert isinstance(action, DeletePod)
    assert action.grace_seconds == 330


def test_a_replica_that_is_not_ready_but_still_streams_is_drained():
    (action,) = look(a_pod().loading().streams(2)).actions
    assert isinstance(action, DrainPod)


def test_what_has_ended_is_deleted_and_what_is_being_deleted_is_left_alone():
    assert isinstance(look(a_pod().failed()).actions[0], DeletePod)
    assert look(a_pod().ready().deleted()).actions == ()


@pytest.mark.capability("OP-18")
def test_a_refused_token_is_not_told_as_silence():
    """review/operator-users.md 14, review/shipping.md 4."""
    steps = look(a_pod().draining().but(refuses_token=True), after=300)

    (event,) = steps.events
    assert "refuses the operator's token (401): was the Secret slipway-admin-master replaced?" in event.message
    assert "does not answer" not in event.message
