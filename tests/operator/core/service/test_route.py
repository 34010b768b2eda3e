"""A service whose served name another object answers: its conditions say so, and what to do."""

from dataclasses import replace

import pytest

from slipway_api.conditions import ConditionStatus, find_condition
from slipway_api.inference_status import InferenceServiceStatus
from slipway_api.model_names import NameConflict
from slipway_operator.core.observed import Failure, GatewayCount
from slipway_operator.core.service.plan import Plan, plan
from tests.builders import DEFAULTS, T0, a_pod, a_service, edited, minutes, promised, seen

pytestmark = pytest.mark.capability("OP-2", "SE-8")

NEAR = NameConflict("llama", key="demo/code")
FAR = NameConflict("llama", key="team/code")
RESERVED = NameConflict("team/llama", namespace="team")


def planned(
    conflict: NameConflict | None = None,
    *,
    ready: bool = False,
    has_tenants: bool = False,
    suspend: bool = False,
    status: InferenceServiceStatus | None = None,
) -> Plan:
    service = a_service(model={"servedName": "llama"}, created_at=T0, status=status, suspend=suspend)
    observed = seen(service, *([a_pod(service=service).slot(0).ready()] if ready else []), name_conflict=conflict)
    return plan(replace(observed, defaults=replace(DEFAULTS, has_tenants=has_tenants)), T0 + minutes(1))


def said(made: Plan, type: str) -> tuple[str, str]:
    condition = find_condition(made.status.conditions, type)
    return (condition.status.value, condition.reason) if condition is not None else ("", "")


def test_a_service_whose_name_is_taken_is_told_which_object_has_it():
    made = planned(NEAR)
    condition = find_condition(made.status.conditions, "RouteReady")

    assert (condition.status, condition.reason) == (ConditionStatus.FALSE, "NameConflict")
    assert "InferenceService code is served as 'llama'" in condition.message
    assert "'demo/chat'" in condition.message
    assert [event.message for event in made.events if event.reason == "NameConflict"] == [condition.message]


def test_an_object_of_another_namespace_is_told_by_its_full_name_and_an_adapter_as_an_adapter():
    assert "InferenceService team/code is" in find_condition(planned(FAR).status.conditions, "RouteReady").message
    adapter = replace(NEAR, kind="LoRAAdapter")
    assert "the older LoRAAdapter code is" in find_condition(planned(adapter).status.conditions, "RouteReady").message


def test_it_is_told_once_and_no_more_once_the_other_is_gone():
    first = planned(NEAR)
    again = planned(NEAR, status=first.status)
    alone = planned(status=first.status)

    assert "NameConflict" not in {event.reason for event in again.events}
    assert said(alone, "RouteReady") == ("False", "NoReadyReplicas")
    assert said(alone, "Stalled") == ("", "")


@pytest.mark.parametrize(
    ("conflict", "has_tenants", "ready", "stalled"),
    [
        (None, False, ("True", "Available"), ("", "")),
        (NEAR, False, ("False", "NameConflict"), ("True", "NameConflict")),
        (NEAR, True, ("False", "NameConflict"), ("True", "NameConflict")),
        (FAR, False, ("False", "NameConflict"), ("True", "NameConflict")),
        (FAR, True, ("True", "NameConflict"), ("", "")),  # to its own tenants the name is this service's
        (RESERVED, True, ("False", "NameConflict"), ("True", "NameConflict")),
    ],
)
def test_the_columns_ready_and_status_show_a_name_that_is_taken(conflict, has_tenants, ready, stalled):
    """review/shipping.md 28: the younger service was Ready=True Available in `kubectl get`."""
    made = planned(conflict, ready=True, has_tenants=has_tenants)

    assert said(made, "Ready") == ready
    assert said(made, "Stalled") == stalled


def test_a_missing_replica_is_told_before_a_name_and_a_suspended_service_is_no_fault():
    assert said(planned(NEAR), "Ready")[1] != "NameConflict"
    assert said(planned(NEAR, suspend=True), "Ready") == ("True", "ScaledToZero")


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

    assert (condition.status, condition.reason) == (ConditionStatus.FALSE, "CannotStart")
    assert "exceeded quota: gpus; raise the quota" in condition.message


QUOTA = Failure(action="CreatePod chat-x-0-0", reason="Forbidden", message="exceeded quota: gpus", at=T0)
CHILD = Failure(action="ApplyChild Service/chat", reason="Forbidden", message="a policy", at=T0)
ZERO = {"autoscaling": {"minReplicas": 0, "maxReplicas": 1, "scaleToZero": {"idleSeconds": 60}}}


@pytest.mark.parametrize(
    ("spec", "desired", "pods", "facts", "cannot_start"),
    [
        ({}, 1, "", {"failures": (QUOTA,)}, True),
        ({}, 1, "cannot_pull", {}, True),
        ({}, 1, "crashing", {}, True),
        ({}, 1, "", {"fault": "spec.runtime.dtype is not valid"}, True),
        ({}, 1, "loading", {}, False),
        ({}, 1, "loading", {"failures": (QUOTA,)}, False),  # one of two is refused, and the other starts
        ({}, 1, "loading", {"failures": (CHILD,)}, False),  # a Service is refused, and the replica starts
        ({}, 1, "ready", {"failures": (QUOTA,)}, False),
        (ZERO, 0, "", {"failures": (CHILD,)}, False),  # a request makes the operator try
    ],
)
@pytest.mark.capability("OP-18")
def test_the_route_says_that_no_replica_can_start_only_if_none_can(spec, desired, pods, facts, cannot_start):
    """review/shipping.md 33. The gateway refuses immediately by this reason, so a wrong one would lose requests."""
    service = promised(a_service(**spec), desired)
    pod = a_pod(service=service)
    pods = [] if not pods else [pod.crashing(restarts=3) if pods == "crashing" else getattr(pod, pods)()]

    status = plan(seen(service, *pods, **facts), T0).status

    assert (find_condition(status.conditions, "RouteReady").reason == "CannotStart") == cannot_start
    assert find_condition(status.conditions, "Stalled") or not cannot_start


@pytest.mark.capability("OP-18")
def test_while_the_stable_revision_starts_a_broken_new_one_does_not_refuse_requests():
    before = promised(a_service(), 1)
    service = edited(before, runtime={"image": "nope"})
    old, new = a_pod(service=before), a_pod(service=service)
    recorded = service.model_copy(update={"status": plan(seen(service, old.ready()), T0).status})

    status = plan(seen(recorded, old.loading(), new.cannot_pull()), T0).status

    assert find_condition(status.conditions, "RouteReady").reason == "NoReadyReplicas"


@pytest.mark.capability("OP-17")
@pytest.mark.parametrize("lacks", [False, True])
def test_a_service_without_its_fallback_serves_and_says_so_once(lacks: bool):
    service = a_service(routing={"fallback": {"service": "small"}}, created_at=T0)
    observed = replace(seen(service, a_pod(service=service).slot(0).ready()), lacks_fallback=lacks)
    first = plan(observed, T0 + minutes(1))
    again = plan(replace(observed, service=service.model_copy(update={"status": first.status})), T0 + minutes(2))
    condition = find_condition(first.status.conditions, "RouteReady")

    assert condition.status is ConditionStatus.TRUE
    assert condition.reason == ("FallbackNotFound" if lacks else "Routed")
    assert ("its fallback demo/small does not exist; create it" in condition.message) is lacks
    assert sum(event.reason == "FallbackNotFound" for event in first.events) == lacks
    assert not [event for event in again.events if event.reason == "FallbackNotFound"]
