"""Conditions keep the time of their last transition; event reasons know whether they are warnings."""

from datetime import UTC, datetime, timedelta

import pytest

from slipway_api.conditions import (
    PENDING,
    Condition,
    ConditionStatus,
    ConditionType,
    EventReason,
    Reason,
    find_condition,
    remove_condition,
    set_condition,
)
from slipway_api.inference_status import InferenceServiceStatus
from slipway_api.lora_adapter import LoRAAdapterStatus
from slipway_api.warm_pool import WarmPoolStatus

T0 = datetime(2026, 1, 1, tzinfo=UTC)


def ready(conditions=(), status=True, reason=Reason.AVAILABLE, message="3 of 3", generation=1, after_seconds=0):
    now = T0 + timedelta(seconds=after_seconds)
    return set_condition(conditions, ConditionType.READY, status, reason, message, generation=generation, now=now)


def test_a_new_condition_says_since_when():
    (condition,) = ready()

    assert condition.status is ConditionStatus.TRUE
    assert condition.last_transition_time == T0
    assert condition.observed_generation == 1


def test_the_time_stays_while_only_the_words_change():
    (condition,) = ready(ready(), reason=Reason.DEGRADED, message="2 of 3", generation=2, after_seconds=60)

    assert (condition.reason, condition.message, condition.observed_generation) == ("Degraded", "2 of 3", 2)
    assert condition.last_transition_time == T0


def test_the_time_moves_when_the_status_flips():
    (condition,) = ready(ready(), status=False, reason=Reason.NO_READY_REPLICAS, after_seconds=60)

    assert condition.last_transition_time == T0 + timedelta(seconds=60)


def test_setting_the_same_again_changes_nothing():
    once = ready()

    assert ready(once, after_seconds=60) == once


def test_conditions_keep_their_order_and_can_go():
    both = set_condition(
        ready(), ConditionType.STALLED, True, Reason.INVALID_SPEC, "no", generation=1, now=T0 + timedelta(seconds=1)
    )
    flipped = ready(both, status=ConditionStatus.UNKNOWN, reason=Reason.LOADING)

    assert [condition.type for condition in flipped] == ["Ready", "Stalled"]
    assert find_condition(remove_condition(flipped, ConditionType.STALLED), ConditionType.STALLED) is None
    assert find_condition(flipped, ConditionType.STALLED) is not None


def test_a_condition_looks_like_any_other_in_kubernetes():
    (condition,) = ready()

    assert condition.to_json() == {
        "type": "Ready",
        "status": "True",
        "observedGeneration": 1,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
        "reason": "Available",
        "message": "3 of 3",
    }
    assert Condition.model_validate(condition.to_json()) == condition


def test_events_know_whether_they_warn():
    assert EventReason.SCALED_UP.type == "Normal"
    assert EventReason.DRAIN_TIMED_OUT.type == "Warning"
    assert {reason.type for reason in EventReason} == {"Normal", "Warning"}


@pytest.mark.parametrize("kind", [InferenceServiceStatus, LoRAAdapterStatus, WarmPoolStatus])
def test_to_the_operator_an_object_that_it_has_not_seen_has_no_conditions(kind):
    (written,) = ready()

    assert kind.model_validate({"conditions": [dict(PENDING)]}).conditions == ()
    assert kind.model_validate({"conditions": [written.to_json()]}).conditions == (written,)
