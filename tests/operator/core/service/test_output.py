"""Condition OutputValid: invalid logits of replicas, with number and remedy. review/engine.md F12"""

from dataclasses import replace

import pytest

from slipway_api.conditions import ConditionStatus, ConditionType, EventReason, Reason, find_condition
from slipway_operator.core.observed import Observed
from slipway_operator.core.service.plan import plan
from slipway_operator.core.service.status.output import output_condition
from tests.builders import T0, APod, a_pod, a_service, revision_of, seen

SERVICE = a_service(replicas=2)


def a_fleet(*counts: int) -> Observed:
    """Ready replicas, each with a number of answers with invalid logits."""
    return seen(
        SERVICE, *(with_invalid(a_pod(service=SERVICE).slot(slot), number) for slot, number in enumerate(counts))
    )


def with_invalid(pod: APod, number: int) -> APod:
    says = pod.ready().says()
    assert says.replica.sample is not None
    return says.but(sample=replace(says.replica.sample, invalid_logits=number))


def status_of(observed: Observed):
    status = plan(observed, T0).status
    assert status is not None
    return status


def test_replicas_with_invalid_logits_are_in_a_condition_with_number_and_remedy():
    condition = find_condition(status_of(a_fleet(37, 1)).conditions, ConditionType.OUTPUT_VALID)
    assert condition is not None
    assert (condition.status, condition.reason) == (ConditionStatus.FALSE, Reason.INVALID_LOGITS)
    names = [f"chat-{revision_of(SERVICE).hash[:5]}-{slot}-0" for slot in (0, 1)]
    assert f"{names[0]} (at least 10), {names[1]} (at least 1). All ready replicas are affected" in condition.message
    assert "spec.model.uri" in condition.message
    assert "spec.runtime.dtype" in condition.message


def test_a_single_affected_replica_points_at_its_gpu():
    condition = find_condition(status_of(a_fleet(0, 200)).conditions, ConditionType.OUTPUT_VALID)
    assert condition is not None
    assert "-1-0 (at least 100). Other replicas with the same weights are not affected" in condition.message
    assert "delete the pod" in condition.message


@pytest.mark.parametrize(("number", "changes"), [(38, False), (99, False), (100, True)])
def test_the_status_is_not_written_for_each_answer(number, changes):
    first = status_of(a_fleet(37, 0))
    observed = a_fleet(number, 0)
    again = replace(observed, service=SERVICE.model_copy(update={"status": first}))
    before, after = (find_condition(one.conditions, ConditionType.OUTPUT_VALID) for one in (first, status_of(again)))
    assert (before != after) == changes


def test_the_warning_is_posted_once_and_the_condition_goes_with_the_replica():
    observed = a_fleet(3, 0)
    first = plan(observed, T0)
    assert first.status is not None

    def warnings(actions) -> list:
        return [one for one in actions if getattr(one, "reason", None) == EventReason.INVALID_LOGITS]

    assert len(warnings(first.events)) == 1
    assert warnings(first.events)[0].reason.type == "Warning"
    service = SERVICE.model_copy(update={"status": first.status})
    assert not warnings(plan(replace(observed, service=service), T0).events)
    healthy = replace(a_fleet(0, 0), service=service)
    assert find_condition(status_of(healthy).conditions, ConditionType.OUTPUT_VALID) is None
    assert output_condition([]) is None
