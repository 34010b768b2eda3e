"""The drain protocol: removes a replica without cutting a stream.

    serving ── DrainPod ──> label state=draining: routers drop it; POST /drain: /ready answers 503
            ── the propagation wait, in which it still takes requests: not every router has seen the label yet
            ── then it refuses new ones with a 503; it stays until the runtime says running + waiting == 0
            ── or until the timeout ──> DELETE with an explicit grace

The clock of a drain is an annotation on the pod, so the protocol goes on where it stood when the operator restarts.
A replica that holds no request and is not ready was never routed to, or no longer is: it is deleted at once. Its grace
is still the whole drain, because the pod itself drains on SIGTERM, should it have become ready a moment ago.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from slipway_api.conditions import EventReason
from slipway_api.inference_service import InferenceService
from slipway_api.names import STATE_DRAINING
from slipway_operator.core.actions import DeletePod, DrainPod, Event, Steps
from slipway_operator.core.observed import Replica
from slipway_operator.core.words import REFUSED_KEY, count

GRACE_AFTER_DRAIN_SECONDS: Final = 30  # for a replica without requests, or past the timeout: a clean exit
ASK_AGAIN: Final = timedelta(seconds=2)  # how often a draining replica is checked


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRules:
    """spec.drain."""

    timeout: timedelta
    propagation: timedelta

    @classmethod
    def of(cls, service: InferenceService) -> "DrainRules":
        """Those of the service."""
        drain = service.spec.drain
        return cls(
            timeout=timedelta(seconds=drain.timeout_seconds),
            propagation=timedelta(seconds=drain.endpoint_propagation_seconds),
        )

    @property
    def whole_grace_seconds(self) -> int:
        """The grace of a pod that has not drained yet: `terminationGracePeriodSeconds` of every pod."""
        return int(self.timeout.total_seconds()) + GRACE_AFTER_DRAIN_SECONDS


def drain_replica(replica: Replica, rules: DrainRules, now: datetime, *, reason: str) -> Steps:
    """Take the next step of the protocol for this replica; `reason` says why it is removed."""
    if replica.deleted_at is not None:
        return Steps()  # already deleted: the kubelet ends it
    if replica.phase in ("Failed", "Succeeded"):
        return Steps(actions=(_delete(replica, GRACE_AFTER_DRAIN_SECONDS, reason),))
    if replica.state != STATE_DRAINING:
        return _begin(replica, rules, now, reason)
    return _go_on(replica, rules, now)


def _begin(replica: Replica, rules: DrainRules, now: datetime, reason: str) -> Steps:
    if not replica.ready and not (replica.sample and replica.sample.requests):
        return Steps(actions=(_delete(replica, rules.whole_grace_seconds, f"{reason}; it was not serving"),))
    event = Event(
        reason=EventReason.REPLICA_DRAINING,
        action="Drain",
        message=f"{replica.name} leaves the route and finishes its requests: {reason}",
        pod=replica.name,
    )
    action = DrainPod(
        name=replica.name,
        uid=replica.uid,
        started=now,
        timeout_seconds=int(rules.timeout.total_seconds()),
        refuse_after_seconds=int(rules.propagation.total_seconds()),
        reason=reason,
        events=(event,),
    )
    return Steps(actions=(action,), again_at=now + rules.propagation)


def _go_on(replica: Replica, rules: DrainRules, now: datetime) -> Steps:
    started = replica.drain_started or now
    deadline = started + rules.timeout
    sample = replica.sample if replica.sample and replica.sample.at >= started else None

    if now >= deadline:
        silence = f"the replica refuses {REFUSED_KEY}" if replica.refuses_token else "the replica does not answer"
        left = count(sample.requests, "unfinished request") if sample else silence
        seconds = int(rules.timeout.total_seconds())
        reason = f"the drain of {replica.name} timed out after {seconds}s: {left}"
        event = Event(reason=EventReason.DRAIN_TIMED_OUT, action="Delete", message=reason, pod=replica.name)
        return Steps(actions=(_delete(replica, GRACE_AFTER_DRAIN_SECONDS, reason, event),))

    if now < started + rules.propagation:
        return Steps(again_at=started + rules.propagation)

    if sample and sample.draining and sample.requests == 0:
        reason = f"{replica.name} has drained: {replica.drain_reason or 'its drain was requested'}"
        event = Event(reason=EventReason.REPLICA_DRAINED, action="Delete", message=reason, pod=replica.name)
        return Steps(actions=(_delete(replica, GRACE_AFTER_DRAIN_SECONDS, reason, event),))

    again_at = min(now + ASK_AGAIN, deadline)
    if sample and sample.draining:
        return Steps(again_at=again_at)
    # The POST was lost, or the runtime restarted since: repeat it. The label stays.
    ask = DrainPod(
        name=replica.name,
        uid=replica.uid,
        started=started,
        timeout_seconds=max(1, int((deadline - now).total_seconds())),
        reason=replica.drain_reason,
        marked=True,
    )
    return Steps(actions=(ask,), again_at=again_at)


def _delete(replica: Replica, grace_seconds: int, reason: str, *events: Event) -> DeletePod:
    return DeletePod(name=replica.name, uid=replica.uid, grace_seconds=grace_seconds, reason=reason, events=events)
