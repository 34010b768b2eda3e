"""Every write that the API server refuses is reported, with the person who can help."""

import pytest

from slipway_api.conditions import find_condition
from slipway_operator.core.observed import Failure
from slipway_operator.core.service.plan import plan
from tests.builders import T0, a_pod, a_service, edited, minutes, promised, seen

# (reason of the API server, its sentence, reason of Stalled, a part of the remedy); review/operator-users.md 3
REFUSED = [
    ("Forbidden", 'pods "c" is forbidden: exceeded quota: gpus, used: 8', "QuotaExceeded", "raise the quota"),
    (
        "Forbidden",
        'pods "c" is forbidden: failed quota: q: must specify limits.cpu for: server; limits.memory for: server',
        "QuotaExceeded",
        "set spec.resources.limits.cpu",
    ),
    (
        "Forbidden",
        'pods "c" is forbidden: no PriorityClass with name nope was found',
        "InvalidSpec",
        "create the PriorityClass nope, or change spec.availability.priorityClassName or spec.template.spec.",
    ),
    (
        "Forbidden",
        'pods "c" is forbidden: error looking up service account a/nope: serviceaccount "nope" not found',
        "InvalidSpec",
        "create the ServiceAccount nope, or change spec.template.spec.serviceAccountName",
    ),
    (
        "Forbidden",
        'pods "c" is forbidden: pod rejected: RuntimeClass "nope" not found',
        "InvalidSpec",
        "create the RuntimeClass nope, or change spec.template.spec.runtimeClassName",
    ),
    (
        "Forbidden",
        'pods "c" is forbidden: maximum memory usage per Container is 1Gi, but limit is 2Gi',
        "InvalidSpec",
        "change spec.resources",
    ),
    ("Invalid", "Pod is invalid: spec.nodeSelector: bad", "InvalidSpec", "bad"),
    ("BadRequest", "strict decoding error", "InvalidSpec", "strict"),
    (
        "Forbidden",
        'admission webhook "policy.example.com" denied the request: no latest',
        "Refused",
        "change the spec as the policy requires",
    ),
    ("", 'admission webhook "w" denied the request without explanation', "Refused", "policy"),
    (
        "Forbidden",
        'pods is forbidden: User "system:serviceaccount:s:operator" cannot create resource "pods"',
        "Refused",
        "grant the operator's ServiceAccount this right",
    ),
    ("Forbidden", "unable to create new content in namespace a because it is being terminated", "Refused", "deleted"),
    ("Forbidden", 'pods "c" is forbidden: violates PodSecurity "restricted:latest"', "Refused", "pod-security"),
    ("418", "short and stout", "Refused", "a person has to change"),
    ("MethodNotAllowed", "a proxy in between", "Refused", "a person has to change"),
]
TRANSIENT = ["InternalError", "503", "ServerTimeout", "TooManyRequests", "NoAnswer", "Conflict"]


def failed(reason: str, message: str, action: str = "CreatePod chat-x-0-0") -> tuple[Failure, ...]:
    return (Failure(action=action, reason=reason, message=message, at=T0),)


@pytest.mark.capability("OP-18")
@pytest.mark.parametrize(("reason", "message", "expected", "remedy"), REFUSED)
def test_a_refused_write_is_stalled_with_one_event_of_the_same_reason(reason, message, expected, remedy):
    service = promised(a_service(), 1)

    first = plan(seen(service, failures=failed(reason, message)), T0)
    again = plan(
        seen(service.model_copy(update={"status": first.status}), failures=failed(reason, message)), T0 + minutes(1)
    )

    stalled, ready = (find_condition(first.status.conditions, type) for type in ("Stalled", "Ready"))
    assert (stalled.reason, ready.reason, ready.status) == (expected, expected, "False")
    assert message in stalled.message
    assert remedy in stalled.message
    warnings = [event for event in first.events if event.reason.type == "Warning"]
    assert [(event.reason.value, event.message) for event in warnings] == [(expected, stalled.message)]
    assert not [event for event in again.events if event.reason.type == "Warning"]


@pytest.mark.capability("OP-18")
@pytest.mark.parametrize(("reason", "message", "expected", "remedy"), REFUSED)
def test_a_refused_write_is_stalled_also_while_the_old_revision_serves(reason, message, expected, remedy):
    before = promised(a_service(), 1)
    service = edited(before, runtime={"maxModelLen": 99})
    old = a_pod(service=before).ready()
    recorded = service.model_copy(update={"status": plan(seen(service, old), T0).status})

    status = plan(seen(recorded, old, failures=failed(reason, message)), T0).status

    stalled, ready = (find_condition(status.conditions, type) for type in ("Stalled", "Ready"))
    assert (stalled.reason, ready.status) == (expected, "True")


@pytest.mark.parametrize("action", ["ApplyChild Service chat", "DeletePod chat-x-0-0", "AnnotatePod chat-x-0-0"])
def test_a_refusal_is_stalled_whatever_was_written(action):
    """Also while all replicas serve: a Service that may not be made is missed by those who use it."""
    service = promised(a_service(), 1)

    made = plan(seen(service, a_pod(service=service).ready(), failures=failed("Forbidden", "no", action)), T0)

    stalled = find_condition(made.status.conditions, "Stalled")
    assert stalled.reason == "Refused"
    assert action in stalled.message


@pytest.mark.capability("OP-18")
@pytest.mark.parametrize("reason", TRANSIENT)
def test_an_answer_that_did_not_come_this_time_is_named_and_not_stalled(reason):
    """review/operator-users.md 15: a POST without an answer was in the log only."""
    service = promised(a_service(), 1)

    status = plan(seen(service, failures=failed(reason, "Server disconnected")), T0).status

    assert find_condition(status.conditions, "Stalled") is None
    for type in ("Ready", "Reconciling"):
        assert "Server disconnected" in find_condition(status.conditions, type).message
