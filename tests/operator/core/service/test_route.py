"""Which service serves a name that two ask for: the older one; the status of the younger one says so."""

from datetime import datetime

import pytest

from slipway_api.conditions import ConditionStatus, find_condition
from slipway_api.inference_status import InferenceServiceStatus
from slipway_api.types import ServiceKey
from slipway_operator.core.observed import Namesake
from slipway_operator.core.service.plan import Plan, plan
from tests.builders import T0, a_service, minutes, seen

pytestmark = pytest.mark.capability("OP-2")


def planned(*namesakes: Namesake, name: str = "chat", status: InferenceServiceStatus | None = None) -> Plan:
    service = a_service(name, model={"servedName": "llama"}, created_at=T0, status=status)
    return plan(seen(service, namesakes=namesakes), T0 + minutes(1))


def other(created_at: datetime, name: str = "code", namespace: str = "demo") -> Namesake:
    return Namesake(key=ServiceKey(namespace, name), created_at=created_at)


def test_the_younger_of_two_services_with_one_name_is_told_which_one_has_it():
    made = planned(other(T0 - minutes(5)), other(T0 - minutes(3), "late"))
    condition = find_condition(made.status.conditions, "RouteReady")

    assert (condition.status, condition.reason) == (ConditionStatus.FALSE, "NameConflict")
    assert "InferenceService code is served as 'llama'" in condition.message
    assert "'demo/chat'" in condition.message
    assert [event.message for event in made.events if event.reason == "NameConflict"] == [condition.message]


def test_a_namesake_of_another_namespace_is_told_by_its_full_name():
    made = planned(other(T0 - minutes(5), namespace="team"))

    assert (
        "InferenceService team/code is served as 'llama'"
        in find_condition(made.status.conditions, "RouteReady").message
    )


def test_it_is_told_once_and_no_more_once_the_other_is_gone():
    first = planned(other(T0 - minutes(5)))
    again = planned(other(T0 - minutes(5)), status=first.status)
    alone = planned(status=first.status)

    assert "NameConflict" not in {event.reason for event in again.events}
    assert find_condition(alone.status.conditions, "RouteReady").reason == "NoReadyReplicas"


def test_the_older_one_hears_nothing_of_it():
    made = planned(other(T0 + minutes(5)))

    assert find_condition(made.status.conditions, "RouteReady").reason == "NoReadyReplicas"
    assert "NameConflict" not in {event.reason for event in made.events}


def test_of_two_created_in_one_second_the_namespace_is_compared_before_the_name():
    """Finding 20: the gateway compared `a-b/chat` with `a/chat` as strings and took the other one."""
    service = a_service("chat", model={"servedName": "llama"}, created_at=T0)
    service = service.model_copy(update={"metadata": service.metadata.model_copy(update={"namespace": "a"})})
    made = plan(seen(service, namesakes=(other(T0, "chat", "a-b"),)), T0 + minutes(1))

    assert find_condition(made.status.conditions, "RouteReady").reason != "NameConflict"


@pytest.mark.parametrize(("name", "has_it"), [("abc", True), ("xyz", False)])
def test_of_two_created_in_one_second_the_first_by_name_has_it(name, has_it):
    made = planned(other(T0), name=name)

    assert (find_condition(made.status.conditions, "RouteReady").reason != "NameConflict") == has_it
