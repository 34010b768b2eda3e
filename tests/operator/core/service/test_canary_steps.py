"""The arithmetic of a canary, step by step: replicas, weights, gates, and which revision is rolled to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway_api import names
from slipway_api.inference_status import CanaryStatus
from slipway_api.rollout_spec import Canary, Gates
from slipway_operator.core.actions import SmokeResult
from slipway_operator.core.health import judge
from slipway_operator.core.observed import Outcomes
from slipway_operator.core.service.rollout import canary
from slipway_operator.core.service.rollout import steps as rollout
from slipway_operator.core.service.rollout.canary import Replicas
from slipway_operator.core.service.rollout.gates import check_gates
from slipway_operator.core.service.rollout.revision import Revision
from slipway_operator.core.service.rollout.target import choose_target
from tests.builders import T0, a_pod, a_service, minutes, seconds
from tests.operator.core.service.test_analysis import outcomes

STEPS = [{"mirrorPercent": 10}, {"setWeight": 20}, {"pauseSeconds": 60}, {"analyze": {}}, {"setWeight": 100}]
RULES = {"intervalSeconds": 30, "minRequests": 100, "failureLimit": 2}
RUNNING = Canary.model_validate({"steps": STEPS, "analysis": RULES})


@pytest.mark.capability("EV-1")
@pytest.mark.parametrize(
    ("weight", "desired", "expected"),
    [
        (0, 3, (1, 3)),
        (5, 3, (1, 3)),
        (25, 4, (1, 3)),
        (33, 3, (1, 3)),
        (34, 3, (2, 2)),
        (50, 3, (2, 2)),
        (50, 4, (2, 2)),
        (99, 3, (3, 1)),
        (100, 3, (3, 0)),
        (5, 1, (1, 1)),
        (100, 1, (1, 0)),
        (1, 100, (1, 99)),
        (50, 0, (0, 0)),
    ],
)
def test_replicas_follow_the_weight(weight, desired, expected):
    assert canary.replicas_for(weight, desired) == expected


@given(weight=st.integers(0, 100), desired=st.integers(1, 1000))
def test_both_sets_together_are_at_most_one_more_than_desired_and_carry_their_weight(weight, desired):
    new, stable = canary.replicas_for(weight, desired)
    assert desired <= new + stable <= desired + 1
    assert canary.given_weight(weight, Replicas(desired=desired, canary=new, stable=stable)) == weight


@pytest.mark.parametrize(
    ("asked", "desired", "ready", "given_to_it"),
    [(5, 3, 0, 0), (5, 3, 1, 5), (50, 4, 1, 25), (50, 4, 2, 50), (100, 3, 2, 66), (100, 3, 3, 100), (100, 0, 0, 0)],
)
def test_traffic_follows_the_canaries_that_are_ready(asked, desired, ready, given_to_it):
    replicas = Replicas(desired=desired, canary=ready, stable=1)
    assert canary.given_weight(asked, replicas) == given_to_it


@pytest.mark.parametrize(("step", "expected"), [(0, 0), (1, 20), (2, 20), (3, 20), (4, 100), (5, 100)])
def test_a_weight_holds_until_the_next_one(step, expected):
    assert canary.asked_weight(RUNNING, step) == expected


def look(step, *, ready=1, age=0, answers=None, paused=False, promoted=False, **status):
    before = CanaryStatus(step=step, started_time=T0, **status)
    return canary.advance(
        RUNNING,
        before,
        revision="new",
        stable="old",
        replicas=Replicas(desired=5, canary=ready, stable=5),
        outcomes_since=(lambda since: answers) if answers is not None else None,
        paused_by="spec.rollout.paused" if paused else "",
        is_promoted=promoted,
        now=T0 + seconds(age),
    )


GOOD = {"old": outcomes(), "new": outcomes()}
BAD = {"old": outcomes(), "new": outcomes(errors=500)}
FEW = {"old": outcomes(), "new": outcomes(requests=20)}
NONE: dict[str, Outcomes] = {}


@pytest.mark.capability("EV-1", "EV-2", "EV-3")
@pytest.mark.parametrize(
    ("facts", "step", "weight", "reason"),
    [
        ({"step": 0, "ready": 0}, 0, 0, "Analyzing"),
        ({"step": 0, "ready": 0, "age": 9999}, 0, 0, "Analyzing"),
        ({"step": 0}, 2, 20, "Analyzing"),  # mirroring is on, and the weight is reached at once: then the pause
        ({"step": 0, "paused": True}, 0, 0, "Analyzing"),
        ({"step": 1, "ready": 0}, 1, 0, "Analyzing"),
        ({"step": 1, "paused": True}, 1, 20, "Analyzing"),
        ({"step": 2, "age": 59, "weight": 20, "answers": GOOD}, 2, 20, "Analyzing"),
        ({"step": 2, "age": 60, "weight": 20, "answers": GOOD}, 3, 20, "Analyzing"),
        ({"step": 2, "age": 60, "weight": 20, "ready": 0}, 2, 0, "Analyzing"),
        ({"step": 2, "age": 60, "weight": 20, "paused": True}, 2, 20, "Analyzing"),
        ({"step": 2, "age": 40, "weight": 20, "answers": BAD}, 2, 20, "Failed"),
        ({"step": 3, "age": 29, "weight": 20, "answers": GOOD}, 3, 20, "Analyzing"),
        ({"step": 3, "age": 30, "weight": 20, "answers": GOOD}, 4, 20, "Analyzing"),
        ({"step": 3, "age": 30, "weight": 20, "answers": GOOD, "ready": 5}, 5, 100, "Passed"),
        ({"step": 3, "age": 30, "weight": 20, "answers": GOOD, "paused": True}, 3, 20, "Analyzing"),
        ({"step": 3, "age": 30, "weight": 20, "answers": FEW}, 3, 20, "Inconclusive"),
        ({"step": 3, "age": 99999, "weight": 20, "answers": FEW}, 3, 20, "Inconclusive"),
        ({"step": 3, "age": 30, "weight": 20, "answers": NONE}, 3, 20, "Inconclusive"),
        ({"step": 3, "age": 30, "weight": 20, "answers": None}, 3, 20, "Inconclusive"),
        ({"step": 3, "age": 30, "weight": 20, "answers": BAD}, 3, 20, "Failed"),
        ({"step": 4, "age": 1, "weight": 20, "ready": 3}, 4, 60, "Analyzing"),
        ({"step": 4, "age": 1, "weight": 80, "ready": 5}, 5, 100, "Passed"),
        ({"step": 5, "age": 1, "weight": 100, "ready": 5}, 5, 100, "Passed"),
        ({"step": 9, "age": 1, "weight": 20, "ready": 5}, 5, 100, "Passed"),  # the steps were cut meanwhile
        ({"step": 1, "promoted": True, "ready": 2}, 5, 40, "Passed"),
        ({"step": 3, "age": 30, "weight": 20, "answers": BAD, "promoted": True, "ready": 5}, 5, 100, "Passed"),
    ],
)
def test_one_look_at_a_canary(facts, step, weight, reason):
    progress = look(**facts)
    assert progress.status
    assert progress.condition
    assert (progress.status.step, progress.status.weight, progress.condition[1].value) == (step, weight, reason)


@pytest.mark.capability("EV-2")
@pytest.mark.parametrize(
    ("facts", "fails"),
    [
        ({"failures": 1, "failed_time": T0 + seconds(10), "age": 40}, True),
        ({"failures": 1, "failed_time": T0 + seconds(11), "age": 40}, False),  # within one interval: counted once
        ({"failures": 0, "age": 40}, False),
        ({"failures": 1, "failed_time": T0 + seconds(10), "age": 40, "answers": GOOD}, False),
        ({"failures": 1, "failed_time": T0 + seconds(10), "age": 40, "answers": None}, False),
    ],
)
def test_failures_count_once_an_interval_until_the_limit(facts, fails):
    progress = look(2, **({"weight": 20, "answers": BAD} | facts))
    assert bool(progress.failed_because) is fails
    if fails:
        assert "ErrorRate 50 % against 0 %" in progress.failed_because
        assert progress.status.weight == 0


@pytest.mark.parametrize(("step", "ready", "expected"), [(0, 0, 0), (0, 1, 10), (1, 1, 0), (4, 1, 0)])
def test_requests_are_mirrored_until_the_first_weight(step, ready, expected):
    assert look(step, ready=ready, paused=True).mirror_percent == expected


# --- gates ------------------------------------------------------------------------------------------------------------

SMOKE = Gates.model_validate({"smoke": [{"prompt": "2+2=", "mustMatch": "4"}, {"prompt": "3+3=", "mustMatch": "6"}]})
POD = a_pod("new").ready()
UID = POD.replica.uid


@pytest.mark.capability("EV-4")
@pytest.mark.parametrize(
    ("gates", "pods", "results", "passed", "failed", "asks"),
    [
        (None, [], {}, True, "", 0),
        (Gates(), [], {}, True, "", 0),
        (SMOKE, [], {}, False, "", 0),
        (SMOKE, [a_pod("new").loading()], {}, False, "", 0),
        (SMOKE, [POD], {}, False, "", 1),
        (SMOKE, [POD], {"another": SmokeResult(at=T0, is_passed=True)}, False, "", 1),
        (SMOKE, [POD], {UID: SmokeResult(at=T0, is_passed=True)}, True, "", 0),
        (SMOKE, [POD], {UID: SmokeResult(at=T0, wrong=2)}, False, "smoke test 2 of 2", 0),
        (SMOKE, [POD], {UID: SmokeResult(at=T0, errors=1, error="HTTP 500")}, False, "", 0),
        (SMOKE, [POD], {UID: SmokeResult(at=T0 - seconds(5), errors=1, error="HTTP 500")}, False, "", 1),
        (SMOKE, [POD], {UID: SmokeResult(at=T0, errors=5, error="HTTP 500")}, False, "no answer 5 times: HTTP 500", 0),
    ],
)
def test_gates(gates, pods, results, passed, failed, asks):
    members = judge([pod.replica for pod in pods], {}, startup_timeout=minutes(30), now=T0)
    state = check_gates(gates, members, revision="new", model="chat", was_passed=False, results=results, now=T0)
    assert state.is_passed is passed
    assert failed in state.failed_because
    assert bool(state.failed_because) is bool(failed)
    assert len(state.actions) == asks


def test_the_action_shows_no_prompt():
    members = judge([POD.replica], {}, startup_timeout=minutes(30), now=T0)
    (ask,) = check_gates(SMOKE, members, revision="new", model="chat", was_passed=False, results={}, now=T0).actions
    assert "2+2" not in repr(ask)


# --- which revision ---------------------------------------------------------------------------------------------------


@pytest.mark.capability("EV-3", "OP-13")
@pytest.mark.parametrize(
    ("asked", "current", "failed", "annotations", "expected"),
    [
        ("c", "b", "", {}, ("c", "b", "", False)),
        ("b", "b", "", {}, ("b", None, "", False)),
        ("c", "b", "", {"promote": "c"}, ("c", "b", "", True)),
        ("c", "b", "", {"promote": "b"}, ("c", "b", "", False)),
        ("c", "b", "", {"abort": "c"}, ("b", None, "c", False)),
        ("c", "b", "", {"abort": "b"}, ("c", "b", "", False)),
        ("b", "b", "", {"abort": "b"}, ("b", None, "", False)),  # it serves already
        ("c", "b", "c", {}, ("b", None, "c", False)),
        ("c", "b", "c", {"promote": "c"}, ("c", "b", "", True)),
        ("c", "b", "a", {}, ("c", "b", "", False)),  # the spec asks for another one now
        ("c", "b", "", {"rollback-to": "a"}, ("a", "b", "c", False)),
        ("b", "b", "", {"rollback-to": "a"}, ("a", "b", "b", False)),
        ("b", "a", "b", {"rollback-to": "a"}, ("a", None, "b", False)),
        ("b", "a", "b", {}, ("a", None, "b", False)),
        ("c", "a", "b", {"rollback-to": "a"}, ("c", "a", "b", False)),  # stale: the spec was changed since
        ("c", "b", "", {"rollback-to": "x"}, ("c", "b", "", False)),
        ("c", "b", "", {"rollback-to": "c"}, ("c", "b", "", False)),
        ("c", "b", "", {"promote": "c", "abort": "c"}, ("b", None, "c", False)),  # the safer of the two
    ],
)
def test_which_revision_replicas_are_rolled_to(asked, current, failed, annotations, expected):
    known = [{"name": hash, "hash": hash, "served": hash != "c"} for hash in "cba"]
    service = a_service(status={"currentRevision": current, "failedRevision": failed, "revisions": known})
    keys = {f"{names.GROUP}/{key}": value for key, value in annotations.items()}
    service = service.model_copy(update={"metadata": service.metadata.model_copy(update={"annotations": keys})})
    stored = [Revision(hash, "image", service.spec) for hash in "abc"]
    target = choose_target(service, Revision(asked, "image", service.spec), stored, {})
    stable = target.stable.hash if target.stable else None
    assert (target.revision.hash, stable, target.failed, target.is_promoted) == expected


@pytest.mark.parametrize(
    ("pods", "weight", "expected"),
    [
        ({"old": 3, "new": 1}, 20, {"old": 80, "new": 20}),
        ({"old": 3, "new": 0}, 20, {"old": 100, "new": 0}),
        ({"old": 0, "new": 1}, 20, {"old": 0, "new": 100}),
        ({"old": 0, "new": 1}, 0, {"old": 100, "new": 0}),  # not before its gates
        ({"old": 3, "new": 1, "older": 2}, 20, {"old": 80, "new": 20, "older": 0}),
        ({"old": 0, "new": 0}, 20, {"old": 80, "new": 20}),
    ],
)
def test_the_split_between_two_revisions(pods, weight, expected):
    ready = [a_pod(hash).slot(slot).ready().replica for hash, count in pods.items() for slot in range(count)]
    members = judge(ready, {}, startup_timeout=minutes(30), now=T0)
    between = rollout.Revisions(update="new", stable="old", is_stored=True)
    assert rollout.split_weights(members, list(pods), between, weight=weight, recorded={}) == expected


@pytest.mark.parametrize(
    ("pods", "weight", "recorded", "expected"),
    [
        ({"old": 0, "new": 0, "canary": 2}, 0, {"old": 0, "canary": 100}, {"old": 0, "new": 0, "canary": 100}),
        ({"old": 0, "new": 1, "canary": 2}, 0, {"old": 0, "canary": 100}, {"old": 0, "new": 0, "canary": 100}),
        ({"old": 1, "new": 0, "canary": 2}, 0, {"old": 0, "canary": 100}, {"old": 100, "new": 0, "canary": 0}),
        ({"old": 0, "new": 0, "canary": 2}, 0, {"old": 100, "canary": 0}, {"old": 100, "new": 0, "canary": 0}),
    ],
    ids=["only it serves", "the new one has not passed its gates", "the stable one is back", "it never had any"],
)
def test_a_third_revision_keeps_its_traffic_while_neither_of_the_two_can_serve(pods, weight, recorded, expected):
    """review/control-plane.md 17: the spec is edited again while a canary serves for a lost stable revision."""
    ready = [a_pod(hash).slot(slot).ready().replica for hash, count in pods.items() for slot in range(count)]
    members = judge(ready, {}, startup_timeout=minutes(30), now=T0)
    between = rollout.Revisions(update="new", stable="old", is_stored=True)

    assert rollout.split_weights(members, list(pods), between, weight=weight, recorded=recorded) == expected


@pytest.mark.parametrize(
    ("pods", "recorded", "expected"),
    [
        ({"old": 1, "new": 9}, {"old": 10, "new": 90}, {"old": 100, "new": 0}),
        ({"old": 0, "new": 3}, {"old": 0, "new": 100}, {"old": 0, "new": 100}),  # until one of the old is ready
        ({"old": 0, "new": 1}, {"old": 100, "new": 0}, {"old": 100, "new": 0}),  # it never had any
    ],
)
def test_the_way_back(pods, recorded, expected):
    ready = [a_pod(hash).slot(slot).ready().replica for hash, count in pods.items() for slot in range(count)]
    members = judge(ready, {}, startup_timeout=minutes(30), now=T0)
    assert rollout.returned_weights(members, recorded, target="old") == expected
