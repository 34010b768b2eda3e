"""Law: whatever the API server refuses, of whatever kind and with whatever code, a person is told once; OP-18.

review/operator-users.md 3: the cause was chosen by the code 422, and a WarmPool or adapter said nothing at all.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from slipway_api import adapter_conditions, vocabulary, warm_pool_conditions
from slipway_api.causes import Helper
from slipway_api.conditions import find_condition
from slipway_operator.core.actions import NO_ANSWER, Failure
from slipway_operator.core.adapter.observed import AdapterObserved, Base
from slipway_operator.core.adapter.plan import plan as plan_adapter
from slipway_operator.core.service.plan import plan as plan_service
from slipway_operator.core.warm_pool.plan import plan as plan_pool
from tests.builders import T0, a_service, promised, seen
from tests.operator.core.adapter.test_steps import a_pod, an_adapter
from tests.operator.core.warm_pool.pools import a_pool
from tests.operator.core.warm_pool.pools import seen as seen_pool

pytestmark = pytest.mark.capability("OP-18")

# Reasons of the API server's Status by HTTP code, and codes of a proxy in between, which have none.
LASTING = ["BadRequest", "Unauthorized", "Forbidden", "NotFound", "MethodNotAllowed", "NotAcceptable"]
LASTING += ["RequestEntityTooLarge", "UnsupportedMediaType", "Invalid", "", "400", "402", "403", "404", "418", "422"]
TRANSIENT = ["InternalError", "ServiceUnavailable", "ServerTimeout", "Timeout", "TooManyRequests", NO_ANSWER]
TRANSIENT += ["Conflict", "Expired", "500", "502", "503", "504"]
SENTENCES = ["exceeded quota: gpus", 'admission webhook "w" denied the request', "no", "is being terminated"]


def of_a_service(failure: Failure, status: Any) -> Any:
    service = promised(a_service(), 1)
    return plan_service(seen(service if status is None else with_status(service, status), failures=(failure,)), T0)


def of_a_pool(failure: Failure, status: Any) -> Any:
    return plan_pool(seen_pool(a_pool(size=1, status=status), failures=(failure,)), T0)


def of_an_adapter(failure: Failure, status: Any, *, has_finalizer: bool = True) -> Any:
    adapter = an_adapter()
    if not has_finalizer:
        metadata = adapter.metadata.model_copy(update={"finalizers": ()})
        adapter = adapter.model_copy(update={"metadata": metadata})
    adapter = adapter if status is None else with_status(adapter, status)
    base = Base(name="chat", uid="u", desired=1, has_room=True)
    return plan_adapter(AdapterObserved(adapter=adapter, base=base, failures=(failure,)), T0)


def of_a_new_adapter(failure: Failure, status: Any) -> Any:
    return of_an_adapter(failure, status, has_finalizer=False)


def with_status(resource: Any, status: Any) -> Any:
    return resource.model_copy(update={"status": status})


KINDS: list[Callable[[Failure, Any], Any]] = [of_a_service, of_a_pool, of_an_adapter, of_a_new_adapter]


@pytest.mark.parametrize("passes_over", KINDS)
@pytest.mark.parametrize("reason", LASTING)
def test_a_refusal_is_stalled_and_not_ready_with_one_event_of_its_reason(passes_over, reason):
    for sentence in SENTENCES:
        failure = Failure(action="CreatePod a-0", reason=reason, message=sentence, at=T0)

        first = passes_over(failure, None)
        again = passes_over(failure, first.status)

        stalled, ready = (find_condition(first.status.conditions, type) for type in ("Stalled", "Ready"))
        assert (ready.status, ready.reason) == ("False", stalled.reason)
        assert sentence in stalled.message
        warnings = [one for one in first.events if one.reason.type == "Warning"]
        assert [(one.reason.value, one.message) for one in warnings] == [(stalled.reason, stalled.message)]
        assert not [one for one in again.events if one.reason.type == "Warning"]


@pytest.mark.parametrize("passes_over", KINDS)
@pytest.mark.parametrize("reason", TRANSIENT)
def test_an_api_server_that_could_not_answer_this_time_stalls_nothing(passes_over, reason):
    made = passes_over(Failure(action="CreatePod a-0", reason=reason, message="later", at=T0), None)

    assert made.status is None or find_condition(made.status.conditions, "Stalled") is None


@pytest.mark.parametrize("tables", [vocabulary, warm_pool_conditions, adapter_conditions])
def test_every_cause_that_stalls_names_who_can_help_and_the_remedy(tables):
    """The tables of the reference pages: whoever has to act has a remedy, and nobody else has one."""
    for row in tables.CONDITIONS:
        helper, remedy = row.cause.helper, row.cause.remedy
        assert (helper is Helper.NOBODY) == (remedy == ""), row
        if row.type.value == "Stalled":
            assert helper is not Helper.NOBODY, row
        for text in (row.meaning, *filter(None, [remedy])):
            assert text.endswith("."), text


def test_a_refused_annotation_of_a_replica_is_stalled_too():
    """Without it the gateway never routes to a replica that has the adapter."""
    pod = replace(a_pod(), route_failure="a policy forbids it", routed=False)
    base = Base(name="chat", uid="u", desired=1, has_room=True)

    made = plan_adapter(AdapterObserved(adapter=an_adapter(), base=base, pods=(pod,)), T0)

    stalled = find_condition(made.status.conditions, "Stalled")
    assert (stalled.reason, "a policy forbids it" in stalled.message) == ("Refused", True)
