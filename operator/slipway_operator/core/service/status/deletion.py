"""Builds the status of a service that is being deleted: counts, and the objects that its deletion waits for. Pure."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from slipway_api import names
from slipway_api.conditions import ConditionType, Reason, remove_condition, set_condition
from slipway_api.inference_status import InferenceServiceStatus
from slipway_operator.core.health import Member, Stage
from slipway_operator.core.observed import Observed
from slipway_operator.core.service.rollout.reporting import without_verdicts
from slipway_operator.core.words import REFUSED_KEY

MOST_NAMED: Final = 5  # replicas or finalizers in one message
SHOWN: Final = 4096  # characters of a message


def deletion_status(observed: Observed, members: Sequence[Member], now: datetime) -> InferenceServiceStatus:
    """The status before, with the present counts, Ready=False, and the cause for which the deletion is not complete.

    The message has no number that changes by the second: a drain of an hour causes few writes.
    """
    service, before = observed.service, observed.service.status
    conditions = without_verdicts(before.conditions)
    for ended in (ConditionType.STALLED, ConditionType.SCALING_ACTIVE):
        conditions = remove_condition(conditions, ended)
    message = _waits_for(observed, members)[:SHOWN]
    not_serving = (ConditionType.READY, ConditionType.WORKLOAD_AVAILABLE, ConditionType.ROUTE_READY)
    for type, status in (*((one, False) for one in not_serving), (ConditionType.RECONCILING, True)):
        conditions = set_condition(
            conditions,
            type,
            status,
            Reason.TERMINATING.value,
            message,
            generation=service.metadata.generation,
            now=now,
        )
    return before.model_copy(
        update={
            "conditions": conditions,
            "replicas": len(members),
            "ready_replicas": sum(member.is_ready for member in members),
            "updated_replicas": 0,
            "draining_replicas": sum(one.replica.state == names.STATE_DRAINING for one in members),
            "desired_replicas": 0,
        }
    )


def _waits_for(observed: Observed, members: Sequence[Member]) -> str:
    """Why the object still exists, in one sentence for each cause."""
    namespace = observed.service.metadata.namespace
    sentences = []
    ending = [one.replica.name for one in members if one.stage is Stage.TERMINATING]
    draining = [one.replica for one in members if one.stage is not Stage.TERMINATING and one.stage is not Stage.STUCK]
    if draining:
        limit = observed.service.spec.drain.timeout_seconds
        listed = _listed([one.name for one in draining])
        sentences.append(f"waiting until {listed} finished their requests, at most {limit} s (spec.drain)")
    if ending:
        look = f"kubectl -n {namespace} get pod {ending[0]} -o yaml"
        sentences.append(f"waiting for the end of {_listed(ending)}; for finalizers of others: {look}")
    if any(one.refuses_token for one in draining):
        sentences.append(f"replicas refuse {REFUSED_KEY}")
    sentences += [f"the API server refuses {one.action}: {one.message}" for one in observed.failures]
    others = [one for one in observed.service.metadata.finalizers if one != names.FINALIZER]
    if not draining and not ending and others:
        sentences.append(f"waiting for the owners of the finalizers {_listed(others)}")
    return "Being deleted: " + ("; ".join(sentences) or "no replica is left")


def _listed(what: Sequence[str]) -> str:
    more = len(what) - MOST_NAMED
    return ", ".join(what[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
