"""Slots, attempts and the replacement of bare pods: one look at a time."""

import pytest

from slipway_api.inference_status import AttemptStatus
from slipway_operator.core.health import Limits, Stage, judge, stage
from slipway_operator.core.observed import Node
from slipway_operator.core.service.replicas.assign import assign, backoff, unhealthy_to_replace
from slipway_operator.core.service.rollout.revision import Revision
from tests.builders import IMAGE, T0, a_pod, minutes, seconds

REVISION = Revision("rrrrr22222", IMAGE)
CORDONED = Node(name="node-1", cordoned=True)
LOST = Node(name="node-1", ready=False, not_ready_since=T0)
BACK = Node(name="node-1", ready_since=T0)


def pod(slot=0, attempt=0):
    return a_pod(REVISION).slot(slot, attempt)


def hung_since(moment, slot=0):
    """It was ready once, and its server runs on."""
    return pod(slot).created(T0 - minutes(60)).loading().but(started=True, unready_since=moment)


def carried(slot, attempt, failures=0, not_before=None):
    return AttemptStatus(revision=REVISION.hash, slot=slot, attempt=attempt, failures=failures, not_before=not_before)


def look(*pods, wanted=1, create_up_to=None, moves=1, attempts=(), taken=frozenset(), nodes=(), now=T0, unhealthy=""):
    by_name = {node.name: node for node in nodes}
    members = judge([one.replica for one in pods], by_name, startup_timeout=minutes(30), now=now)
    return assign(
        members,
        service="chat",
        revision=REVISION,
        create_up_to=wanted if create_up_to is None else create_up_to,
        keep_at_most=wanted,
        moves=moves,
        attempts=attempts,
        taken_names=taken,
        nodes=by_name,
        now=now,
        unhealthy=unhealthy,
    )


def created(result):
    return [(one.slot, one.attempt) for one in result.creations]


def leaving(result):
    return [member.replica.name for member, _ in result.leaving]


@pytest.mark.parametrize(
    ("replica", "nodes", "expected"),
    [
        (pod(), (), Stage.LOADING),
        (pod().ready(), (), Stage.READY),
        (pod().ready().deleted(), (), Stage.TERMINATING),
        (pod().failed(), (), Stage.DEAD),
        (pod().failed().draining(), (), Stage.DEAD),
        (pod().ready().draining(), (), Stage.DRAINING),
        (pod().ready(), (LOST,), Stage.LOST),
        (pod().draining(), (LOST,), Stage.DRAINING),
        (pod().unschedulable(), (), Stage.UNSCHEDULABLE),
        (pod().cannot_pull(), (), Stage.IMAGE_ERROR),
        (pod().crashing(), (), Stage.CRASHING),
        (pod().created(T0 - minutes(30)), (), Stage.OVERDUE),
        (pod().unschedulable().created(T0 - minutes(300)), (), Stage.UNSCHEDULABLE),
        (pod().created(T0 - minutes(300)).but(scheduled_at=T0), (), Stage.LOADING),
        (pod().ready().created(T0 - minutes(300)), (), Stage.READY),
        (pod().loading().created(T0 - minutes(300)).but(started=True, unready_since=T0), (), Stage.UNREADY),
        (hung_since(T0 - seconds(90)), (), Stage.UNHEALTHY),
        (hung_since(T0 - seconds(89)), (), Stage.UNREADY),
        (hung_since(T0 - seconds(90)), (BACK,), Stage.UNREADY),
        (hung_since(T0 - seconds(90)).but(running_since=T0 - minutes(9)), (), Stage.UNHEALTHY),
        (hung_since(T0 - minutes(9)).but(running_since=T0 - minutes(9)), (), Stage.UNREADY),  # loaded for 9 minutes
        (hung_since(T0 - minutes(9)).but(running_since=T0 - minutes(8)), (), Stage.UNREADY),  # restarted, and loaded
        (hung_since(T0 - minutes(40)).but(running_since=T0 - minutes(39)), (), Stage.UNHEALTHY),  # never became ready
        (pod().ready().says(draining=True), (), Stage.UNREADY),
        (pod().ready().deleted(T0 - seconds(30)), (), Stage.STUCK),
    ],
)
def test_stage_of_a_replica(replica, nodes, expected):
    by_name = {node.name: node for node in nodes}
    # The node was lost 30 s before, the pod created at T0 unless it says otherwise.
    limits = Limits(startup_timeout=minutes(30))
    assert stage(replica.replica, by_name, limits, T0 + seconds(30)) is expected


def test_while_most_nodes_look_lost_no_replica_counts_as_lost_or_unhealthy():
    """Finding 5: the fault is more likely between us and them."""
    replica = pod().loading().but(started=True, unready_since=T0).replica
    for disrupted, expected in ((False, Stage.LOST), (True, Stage.UNREADY)):
        limits = Limits(startup_timeout=minutes(30), disrupted=disrupted)
        assert stage(replica, {"node-1": LOST}, limits, T0 + minutes(60)) is expected


@pytest.mark.capability("DD-1")
def test_every_wanted_replica_gets_the_lowest_free_slot():
    assert created(look(wanted=3)) == [(0, 0), (1, 0), (2, 0)]
    assert created(look(pod(1).ready(), wanted=3)) == [(0, 0), (2, 0)]


def test_a_slot_that_still_drains_is_not_reused():
    assert created(look(pod(0).ready(), pod(1).ready().draining(), wanted=2)) == [(2, 0)]


def test_the_next_attempt_is_recorded_before_it_is_created_and_before_the_dead_one_goes():
    dead = pod().failed("Error")
    first = look(dead)
    assert (created(first), leaving(first), first.must_record) == ([], [], True)
    (status,) = first.attempts
    assert (status.slot, status.attempt, status.failures) == (0, 1, 1)
    assert status.not_before == T0 + seconds(10)

    second = look(dead, attempts=first.attempts)
    assert (created(second), leaving(second), second.must_record) == ([], ["chat-rrrrr-0-0"], False)
    assert second.attempts == first.attempts, "the failure counts once"
    assert second.again_at == status.not_before

    third = look(attempts=first.attempts, now=T0 + seconds(10))
    assert created(third) == [(0, 1)]


def test_a_failure_counts_though_its_slot_has_to_wait_for_room():
    """During a rollout the room may be needed elsewhere; the slot's next replica still comes after a pause."""
    dead = pod().failed("Error")
    first = look(dead, create_up_to=0)
    assert (created(first), leaving(first), first.must_record) == ([], [], True)
    (status,) = first.attempts
    assert (status.attempt, status.failures, status.not_before) == (1, 1, T0 + seconds(10))

    second = look(dead, create_up_to=0, attempts=first.attempts)
    assert (leaving(second), second.attempts) == (["chat-rrrrr-0-0"], first.attempts)
    third = look(attempts=first.attempts, create_up_to=0, now=T0 + seconds(20))
    assert (created(third), third.attempts) == ([], first.attempts)
    assert created(look(attempts=first.attempts, now=T0 + seconds(20))) == [(0, 1)]


@pytest.mark.parametrize("reason", ["Error", "Evicted", "UnexpectedAdmissionError", "OutOfcpu", "OutOfnvidia.com/gpu"])
def test_no_end_is_followed_by_a_new_replica_at_once(reason):
    """Finding 6: a node whose device plugin refuses every pod is not offered one each second."""
    ended = pod().failed(reason)
    first = look(ended)
    assert (first.attempts[0].failures, first.attempts[0].not_before) == (1, T0 + seconds(10))
    assert created(look(ended, attempts=first.attempts)) == []
    again = look(pod(0, 1).failed(reason), attempts=first.attempts, now=T0 + seconds(11))
    assert (again.attempts[0].failures, again.attempts[0].not_before) == (2, T0 + seconds(31))


def test_a_replica_deleted_by_hand_is_replaced_while_it_still_terminates():
    going = pod().ready().deleted()
    first = look(going)
    assert first.must_record
    assert created(look(going, attempts=first.attempts)) == [(0, 1)]


def test_an_operator_that_died_between_record_and_creation_is_continued():
    assert created(look(attempts=(carried(0, 4, failures=2),))) == [(0, 4)]


@pytest.mark.parametrize(("failures", "expected"), [(0, 0), (1, 10), (2, 20), (3, 40), (5, 160), (6, 300), (1000, 300)])
def test_backoff_doubles_up_to_five_minutes(failures, expected):
    assert backoff(failures) == seconds(expected)


def test_a_crash_loop_is_left_to_the_kubelet_for_a_while_and_then_replaced():
    assert look(pod().crashing(4)).attempts == ()
    first = look(pod().crashing(5))
    assert (first.attempts[0].attempt, first.attempts[0].failures) == (1, 1)
    assert leaving(look(pod().crashing(5), attempts=first.attempts)) == ["chat-rrrrr-0-0"]


def test_of_two_on_one_slot_the_one_on_a_cordoned_node_goes_once_the_other_is_ready():
    older = pod(0, 0).ready()
    assert leaving(look(older, pod(0, 1).on("node-2").loading(), nodes=(CORDONED,))) == []
    assert leaving(look(older, pod(0, 1).on("node-2").ready(), nodes=(CORDONED,))) == ["chat-rrrrr-0-0"]


@pytest.mark.parametrize("replacement", [pod(0, 1).loading(), pod(0, 1).unschedulable(), pod(0, 1).ready()])
def test_a_replica_that_is_well_again_keeps_its_slot_and_its_cache(replacement):
    """Finding 5: the replacement is cancelled, ready or not."""
    assert leaving(look(pod(0, 0).ready(), replacement)) == ["chat-rrrrr-0-1"]


def unhealthy(slot):
    return hung_since(T0 - minutes(3), slot)


def test_an_unhealthy_replica_is_replaced_as_a_failure():
    """Chaos C2: a hung engine is healed."""
    hung = unhealthy(0)
    first = look(hung, unhealthy=hung.replica.uid)
    assert (first.attempts[0].attempt, first.attempts[0].failures, leaving(first)) == (1, 1, [])
    assert [event.reason for event in first.events] == ["ReplicaReplaced"]
    assert leaving(look(hung, attempts=first.attempts, unhealthy=hung.replica.uid)) == ["chat-rrrrr-0-0"]
    assert look(hung).attempts == (), "another one is being replaced"


def test_unhealthy_replicas_are_replaced_one_at_a_time():
    """Chaos C2."""

    def chosen(*pods, attempts=()):
        members = judge([one.replica for one in pods], {}, startup_timeout=minutes(30), now=T0)
        return unhealthy_to_replace(members, attempts)

    first = unhealthy(0).replica.uid
    assert chosen(unhealthy(0), unhealthy(1)) == first
    begun = (carried(0, 1),)
    assert chosen(unhealthy(0), unhealthy(1), attempts=begun) == first
    assert chosen(unhealthy(1), attempts=begun) == "", "its replacement waits for its time"
    assert chosen(pod(0, 1).loading(), unhealthy(1), attempts=begun) == "", "its replacement starts"
    assert chosen(pod(0, 1).ready(), unhealthy(1), attempts=begun) == unhealthy(1).replica.uid
    assert chosen(pod(0).ready()) == ""


def test_a_lost_replica_is_replaced_and_kept_until_the_new_one_serves():
    lost = pod().ready()
    now = T0 + seconds(30)
    first = look(lost, nodes=(LOST,), now=now)
    assert (first.attempts[0].attempt, first.attempts[0].failures, leaving(first)) == (1, 0, [])
    young = pod(0, 1).on("node-2")
    assert leaving(look(lost, young.loading(), nodes=(LOST,), now=now, attempts=first.attempts)) == []
    assert leaving(look(lost, young.ready(), nodes=(LOST,), now=now, attempts=first.attempts)) == ["chat-rrrrr-0-0"]


def test_a_lost_replica_that_is_not_needed_any_more_is_removed():
    lost, other = pod(0).ready(), pod(1).ready().on("node-2")
    assert leaving(look(lost, other, wanted=1, nodes=(LOST,), now=T0 + seconds(30))) == ["chat-rrrrr-0-0"]


def test_as_many_replicas_leave_cordoned_nodes_at_once_as_there_is_surge():
    both = (pod(0).ready(), pod(1).ready())
    result = look(*both, wanted=2, moves=1, nodes=(CORDONED,))
    assert [(one.slot, one.attempt) for one in result.attempts] == [(0, 1)]
    assert created(look(*both, wanted=2, moves=1, nodes=(CORDONED,), attempts=result.attempts)) == [(0, 1)]
    assert look(*both, wanted=2, moves=0, nodes=(CORDONED,)).attempts == ()


@pytest.mark.capability("AS-6")
def test_victims_are_those_that_serve_the_least():
    pods = [
        pod(0).ready().streams(5),
        pod(1).ready().streams(2),
        pod(2).ready().streams(2).created(T0 + seconds(1)),
        pod(3).loading(),
        pod(4).ready().silent(),
    ]
    assert leaving(look(*pods, wanted=4)) == ["chat-rrrrr-3-0"]
    assert leaving(look(*pods, wanted=3)) == ["chat-rrrrr-3-0", "chat-rrrrr-2-0"], "between equals the newest"
    assert leaving(look(*pods, wanted=1))[-1] == "chat-rrrrr-0-0", "one that does not say what it serves goes last"


def test_a_victim_that_the_caches_do_not_show_yet_is_chosen_again():
    """Finding 11: the runtime says that it drains before the watch brings the label."""
    told = pod(0).ready().says(running=9, draining=True)
    assert leaving(look(told, pod(1).ready().streams(0), wanted=1)) == ["chat-rrrrr-0-0"]


def test_says_why_a_victim_was_chosen():
    (_, reason), *_ = look(pod(0).ready().streams(3), pod(1).ready().streams(4), wanted=1).leaving
    assert reason == "scaling down, and it serves the fewest requests (3)"


def test_a_foreign_pod_with_the_name_moves_us_to_the_next_attempt():
    taken = frozenset({"chat-rrrrr-0-0", "chat-rrrrr-0-1"})
    first = look(taken=taken)
    assert [event.reason for event in first.events] == ["NameConflict"] * 2
    assert first.attempts[0].attempt == 2
    second = look(taken=taken, attempts=first.attempts)
    assert (created(second), second.events) == ([(0, 2)], ())


def test_what_was_remembered_of_a_slot_that_is_not_wanted_any_more_is_forgotten():
    assert look(pod(0).ready(), wanted=1, attempts=(carried(0, 1), carried(1, 3, failures=3))).attempts == ()


def test_failures_are_remembered_until_the_replica_has_been_ready_for_ten_minutes():
    attempts = (carried(0, 1, failures=2),)
    ready = pod(0, 1).ready(since=T0)
    assert look(ready, attempts=attempts, now=T0 + minutes(9)).attempts == attempts
    assert look(ready, attempts=attempts, now=T0 + minutes(9)).again_at == T0 + minutes(10)
    assert look(ready, attempts=attempts, now=T0 + minutes(10)).attempts == ()
