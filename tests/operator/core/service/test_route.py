"""Which service serves a name that two ask for: the older one; the status of the younger one says so."""

from dataclasses import replace
from datetime import datetime

import pytest

from slipway_api.conditions import ConditionStatus, find_condition
from slipway_api.inference_status import InferenceServiceStatus
from slipway_api.types import ServiceKey
from slipway_operator.core.observed import Failure, GatewayCount, Namesake
from slipway_operator.core.service.plan import Plan, plan
from tests.builders import T0, a_pod, a_service, minutes, promised, seen

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


@pytest.mark.capability("OP-18")
def test_without_a_gateway_the_route_is_not_ready_and_one_event_names_the_command():
    """review/shipping.md 3: RouteReady said that the gateway serves it, while there was none."""
    service = promised(a_service(), 1)
    pod = a_pod(service=service).ready()
    none = GatewayCount(answering=0, running=2, namespace="slipway-system", selector="a=b")

    made = plan(replace(seen(service, pod), gateways=none), T0)
    later = service.model_copy(update={"status": made.status})
    again = plan(replace(seen(later, pod), gateways=none), T0 + minutes(1))
    back = plan(replace(seen(later, pod), gateways=replace(none, answering=1)), T0 + minutes(2))

    condition = find_condition(made.status.conditions, "RouteReady")
    assert (condition.status, condition.reason) == (ConditionStatus.FALSE, "NoGateway")
    assert "0 of 2 running gateways answer" in condition.message
    assert "kubectl get pods -n slipway-system -l a=b" in condition.message
    assert [one.message for one in made.events if one.reason == "NoGateway"] == [condition.message]
    assert "NoGateway" not in {one.reason for one in again.events}
    assert find_condition(back.status.conditions, "RouteReady").reason == "Routed"


@pytest.mark.capability("OP-18")
def test_a_service_at_zero_whose_replicas_are_refused_does_not_say_that_it_holds_requests():
    """review/shipping.md 33: requests waited for a replica that could not come."""
    zero = {"minReplicas": 0, "maxReplicas": 1, "scaleToZero": {"idleSeconds": 60}}
    service = promised(a_service(autoscaling=zero), 1)
    refused = Failure(action="CreatePod chat-x-0-0", reason="Forbidden", message="exceeded quota: gpus", at=T0)

    condition = find_condition(plan(seen(service, failures=(refused,)), T0).status.conditions, "RouteReady")

    assert (condition.status, condition.reason) == (ConditionStatus.FALSE, "NoReadyReplicas")
    assert "exceeded quota: gpus; raise the quota" in condition.message
