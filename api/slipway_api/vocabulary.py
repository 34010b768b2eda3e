"""Lists every condition, event and limit of an InferenceService with its meaning, for documentation and tests.

It lists only reasons that are used: tests compare it and the enums with the reasons that the operator emits.
"""

from typing import Final, NamedTuple

from slipway_api.autoscaling import Limit
from slipway_api.conditions import ConditionStatus, ConditionType, EventReason, Reason

_TRUE, _FALSE, _UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN


class ConditionMeaning(NamedTuple):
    """What one reason of one condition means."""

    type: ConditionType
    status: ConditionStatus
    reason: Reason
    meaning: str


# Stalled=True with one of these makes Ready=False with the same reason and message while no replica serves.
INTERNAL_ERROR: Final = "The operator cannot plan the object, by a fault of its own; its pods are left as they are."

STALLED_MEANINGS: Final = {
    Reason.INVALID_SPEC: "The spec breaks a rule, or the API server or the runtime refuses a value of it.",
    Reason.DOES_NOT_FIT: "Weights, reserve and one request exceed the memory; the message has the arithmetic.",
    Reason.CACHE_NOT_PERMITTED: "model.cache.policy Node, but the chart names no folder, or PodSecurity forbids it.",
    Reason.IMAGE_PULL_FAILED: "The kubelet cannot pull the runtime image.",
    Reason.MODEL_NOT_FOUND: "There is nothing at spec.model.uri, or its claim does not exist.",
    Reason.CREDENTIALS_INVALID: "The credentials' Secret or its key is missing, or the source refuses them.",
    Reason.PROGRESS_DEADLINE_EXCEEDED: "A rollout or first start made no progress for progressDeadlineSeconds.",
    Reason.QUOTA_EXCEEDED: "A ResourceQuota forbids the pods.",
    Reason.REFUSED: "RBAC, an admission policy or a webhook forbids a write; an administrator of the cluster can help.",
    Reason.HUB_UNREACHABLE: "The source of the model does not answer; the message has the host and the cause.",
    Reason.NO_SUITABLE_NODE: "No node has so many GPUs, or of this product, used or free; the message names both.",
    Reason.NAME_CONFLICT: "Another object has the served name, or another owner has the name of a child.",
    Reason.CRASH_LOOPING: "Replicas end again and again; it holds until one is ready or the spec changes.",
    Reason.REVISION_MISSING: "The ControllerRevision of a revision is missing or unreadable: the rollout is held.",
}

# Reasons of Stalled whose event has no other meaning: one word in the condition, in the event, and in an alert.
_STALLED_EVENTS: Final = (
    *(Reason.DOES_NOT_FIT, Reason.CACHE_NOT_PERMITTED, Reason.IMAGE_PULL_FAILED, Reason.MODEL_NOT_FOUND),
    *(Reason.CREDENTIALS_INVALID, Reason.QUOTA_EXCEEDED, Reason.REFUSED, Reason.CRASH_LOOPING),
    Reason.REVISION_MISSING,
    *(Reason.NO_SUITABLE_NODE, Reason.HUB_UNREACHABLE),
)

_MEANINGS: Final = {
    ConditionType.READY: (
        (_TRUE, Reason.AVAILABLE, "All desired replicas take requests."),
        (_TRUE, Reason.NAME_CONFLICT, "All take requests; only to some tenants the served name is this service's."),
        (_TRUE, Reason.DEGRADED, "Fewer replicas than desired take requests."),
        (_TRUE, Reason.SCALED_TO_ZERO, "No replicas are asked for: by the spec, or because no requests come."),
        (_FALSE, Reason.NO_READY_REPLICAS, "It served before, and no replica does."),
        *((_FALSE, reason, meaning) for reason, meaning in STALLED_MEANINGS.items()),
        (_UNKNOWN, Reason.INTERNAL_ERROR, INTERNAL_ERROR),
        (_UNKNOWN, Reason.LOADING, "Replicas start for the first time."),
        (_UNKNOWN, Reason.DOWNLOADING_MODEL, "A replica downloads the model to its node."),
        (_UNKNOWN, Reason.WAITING_FOR_GPU, "No node has a free GPU for a replica."),
        (
            _UNKNOWN,
            Reason.UNSCHEDULABLE,
            "No node takes a replica; the cause is not GPUs but taints, labels or volumes.",
        ),
    ),
    ConditionType.STALLED: (
        *((_TRUE, reason, meaning) for reason, meaning in STALLED_MEANINGS.items()),
        (_TRUE, Reason.INTERNAL_ERROR, INTERNAL_ERROR),
    ),
    ConditionType.RECONCILING: (
        (_TRUE, Reason.SCALING_UP, "Replicas that are wanted do not serve yet."),
        (_TRUE, Reason.ROLLING_OUT, "A revision replaces the one before it."),
    ),
    ConditionType.WORKLOAD_AVAILABLE: (
        (_TRUE, Reason.AVAILABLE, "All desired replicas are ready."),
        (_FALSE, Reason.DEGRADED, "Some desired replicas are not ready."),
        (_FALSE, Reason.NO_READY_REPLICAS, "No replica is ready."),
    ),
    ConditionType.ROUTE_READY: (
        (_TRUE, Reason.ROUTED, "The gateway serves it under its served name."),
        (_FALSE, Reason.NO_READY_REPLICAS, "There is no replica to route to."),
        (_FALSE, Reason.NO_GATEWAY, "No gateway answers the operator; the message has the command to see why."),
        (_FALSE, Reason.NAME_CONFLICT, "Another object, or another namespace, has the served name."),
    ),
    ConditionType.SCALING_ACTIVE: (
        (_TRUE, Reason.METRICS_FRESH, "All ready replicas report their load."),
        (_TRUE, Reason.METRICS_STALE, "Some ready replicas do not report their load."),
        (_TRUE, Reason.LIMITED_BY_MAX, "More than maxReplicas replicas would be wanted."),
        (_TRUE, Reason.LIMITED_BY_BUDGET, "More GPUs than budget.maxGPUs would be wanted."),
        (_TRUE, Reason.LIMITED_BY_CAPACITY, "More would be wanted, but the last replicas found no node or no quota."),
        (_TRUE, Reason.EXTERNAL, "spec.replicas decides, written through /scale."),
        (_TRUE, Reason.ADVISORY, "Slipway says what it would do, and changes nothing."),
        (_FALSE, Reason.PAUSED, "The present number stays until autoscaling.mode is another one."),
        (
            _FALSE,
            Reason.METRICS_MISSING,
            "No ready replica reports its load, or at zero replicas no gateway: it stays.",
        ),
        (
            _FALSE,
            Reason.KEY_REFUSED,
            "Ready replicas refuse the operator's token (401).",
        ),
        (_UNKNOWN, Reason.METRICS_MISSING, "No replica is ready: there is no load yet."),
    ),
    ConditionType.SUSPENDED: ((_TRUE, Reason.SUSPENDED, "spec.suspend is true: replicas drain, and none starts."),),
    ConditionType.CANARY_HEALTHY: (
        (_UNKNOWN, Reason.ANALYZING, "A new revision is on its way through gates, steps and analysis."),
        (_UNKNOWN, Reason.INCONCLUSIVE, "The analysis can tell neither success nor failure: the step holds."),
        (_TRUE, Reason.PASSED, "The last new revision passed all its steps, or was promoted manually."),
        (_FALSE, Reason.FAILED, "The analysis failed, fewer times than failureLimit so far."),
        (_FALSE, Reason.ROLLED_BACK, "The revision that the spec asks for was rolled back or aborted; why."),
    ),
    ConditionType.ADAPTERS_READY: (
        (_TRUE, Reason.ADAPTERS_LOADED, "Every LoRAAdapter of the service answers requests."),
        (_FALSE, Reason.ADAPTERS_MISSING, "Some LoRAAdapters of the service do not answer."),
    ),
    ConditionType.WITHIN_SLO: (
        (_TRUE, Reason.WITHIN_LIMITS, "Error budget is left, and the last hour is within the limits of spec.slo."),
        (_FALSE, Reason.LIMIT_EXCEEDED, "The last hour is above a limit of spec.slo; which, with its numbers."),
        (_FALSE, Reason.ERROR_BUDGET_BURNING, "An error budget is spent so fast that it will not last; the burn rate."),
        (_FALSE, Reason.ERROR_BUDGET_EXHAUSTED, "An error budget of the window is spent: new revisions wait."),
        (_UNKNOWN, Reason.NO_REQUESTS, "No gateway has counted a request in the window."),
    ),
    ConditionType.MODEL_CACHED: (
        (_TRUE, Reason.CACHED, "With prePull every node that replicas may run on, else every node that has one."),
        (_FALSE, Reason.CACHING, "Image and model are on their way to some nodes."),
        (_FALSE, Reason.CACHING_FAILED, "A node could not get the model; why. It is tried again."),
    ),
    ConditionType.GATEWAY_ONLY: (
        (_FALSE, Reason.OPEN_TO_DIRECT_CALLERS, "Tenants are configured, but replicas answer callers without a key."),
    ),
}

CONDITIONS: Final = tuple(ConditionMeaning(type, *row) for type, rows in _MEANINGS.items() for row in rows)

EVENTS: Final = {
    EventReason.REPLICA_CREATED: "A pod was created, and for which slot.",
    EventReason.REPLICA_READY: "A replica takes requests; how many do.",
    EventReason.REPLICA_DRAINING: "A replica gets no new requests and finishes those it has; why.",
    EventReason.REPLICA_DRAINED: "A replica has finished its requests and is deleted.",
    EventReason.SCALED_UP: "More replicas are wanted; the evidence in numbers.",
    EventReason.SCALED_DOWN: "Fewer replicas are wanted; the evidence in numbers.",
    EventReason.SCALED_TO_ZERO: "No requests came for idleSeconds, so the last replicas are drained.",
    EventReason.ACTIVATED: "Requests wait for a service without replicas, so it gets some; how many requests.",
    EventReason.ROLLOUT_STARTED: "A revision begins to replace the one before it.",
    EventReason.CANARY_STEP_COMPLETED: "A step of a canary, or the gates, are passed; how.",
    EventReason.CANARY_PROMOTED: "The new revision has all the traffic.",
    EventReason.CANARY_ANALYSIS_FAILED: "The new revision is worse than the stable one; both numbers.",
    EventReason.CANARY_INCONCLUSIVE: "Too few requests, or too small a difference, for a verdict: the step holds.",
    EventReason.CANARY_ROLLED_BACK: "All traffic goes back to the revision before; why, with both numbers.",
    EventReason.ROLLOUT_COMPLETED: "Only the new revision serves.",
    EventReason.SUSPENDED: "spec.suspend became true: all replicas drain.",
    EventReason.RESUMED: "spec.suspend became false: replicas start again.",
    EventReason.WARM_POD_CLAIMED: "A pod of the warm pool became a replica, and for which slot.",
    EventReason.MODEL_CACHED: "All nodes that replicas may run on have the model; how many.",
    EventReason.WARM_POOL_MISS: "The warm pool has no pod for a replica; why, and what happens instead.",
    EventReason.INVALID_SPEC: "The spec breaks a rule.",
    **{EventReason(reason.value): STALLED_MEANINGS[reason] for reason in _STALLED_EVENTS},
    EventReason.NO_GATEWAY: "No gateway answers the operator: no client reaches the service.",
    EventReason.METRICS_STALE: "Some ready replicas do not report their load.",
    EventReason.KEY_REFUSED: "Ready replicas refuse the operator's token (401): was slipway-admin-master replaced?",
    EventReason.SCALING_HELD: "No ready replica, or no gateway of a service at zero, reports: the number stays.",
    EventReason.SCALING_LIMITED: "A limit or a lack of capacity keeps the number below what is wanted.",
    EventReason.WAITING_FOR_GPU: "No node has a free GPU for a replica, or none for the surge of a rollout.",
    EventReason.UNSCHEDULABLE: "No node takes a replica, for another cause than GPUs.",
    EventReason.MODEL_DOWNLOAD_FAILED: "A pod that fills a model cache failed; why.",
    EventReason.REPLICA_UNHEALTHY: "A replica that served ended, hangs or is on a silent node; why.",
    EventReason.REPLICA_REPLACED: "A slot gets another replica; why, and after how many failures.",
    EventReason.GPU_FAULT: "The server of a replica ended by a fault of its GPU; its successor prefers another node.",
    EventReason.NODE_DRAIN_FORCED: "A node's drain waited for maxNodeDrainBlockSeconds: evictions are allowed.",
    EventReason.DRAIN_TIMED_OUT: "A drain took longer than drain.timeoutSeconds; what was left.",
    EventReason.INTERNAL_ERROR: INTERNAL_ERROR,
    EventReason.NAME_CONFLICT: "Another owner has the served name, or the name of a replica or of another child.",
    EventReason.ACTIVATION_TIMED_OUT: "Requests waited for the first replica of a service and gave up; how many.",
    EventReason.ACTIVATION_QUEUE_FULL: "Requests were refused while the first replica starts; how many, which limit.",
    EventReason.BUDGET_EXCEEDED: "budget.maxGPUs keeps the number below what is wanted.",
    EventReason.SLO_EXCEEDED: "The last hour is above a limit of spec.slo; which, with its numbers.",
    EventReason.ERROR_BUDGET_BURNING: "An error budget is spent much faster than it lasts; the burn rates.",
    EventReason.ERROR_BUDGET_EXHAUSTED: "An error budget is spent: new revisions wait, or are promoted manually.",
    EventReason.ADVICE: "A setting or a model is likely to be regretted; in mode Advisory: the number to set.",
    EventReason.PROGRESS_DEADLINE_EXCEEDED: "A rollout or first start made no progress for progressDeadlineSeconds.",
}

LIMITS: Final = {
    Limit.LIMITED_BY_MAX: "maxReplicas.",
    Limit.MIN_REPLICAS: "minReplicas, or that of the active schedule.",
    Limit.LIMITED_BY_BUDGET: "budget.maxGPUs.",
    Limit.LIMITED_BY_CAPACITY: "The last replicas found no node or no quota.",
    Limit.SCALE_UP_RATE: "behavior.scaleUp: maxPods were added within periodSeconds.",
    Limit.SCALE_DOWN_RATE: "behavior.scaleDown: maxPods were removed within periodSeconds.",
    Limit.STABILIZATION_WINDOW: "A more cautious recommendation of the stabilization window.",
    Limit.LIVE_DEMAND: "Fewer replicas could not run the requests that are there.",
}


def vocabulary_section() -> str:
    """The part of the reference page that lists conditions and events."""
    lines = [
        "## Conditions",
        "",
        "Reconciling, Stalled and Suspended are present only while they are True. The message names the cause.",
        "",
        "| condition | status | reason | meaning |",
        "|---|---|---|---|",
        *(f"| {row.type.value} | {row.status.value} | {row.reason.value} | {row.meaning} |" for row in CONDITIONS),
        "",
        "## Events",
        "",
        "| type | reason | what it tells |",
        "|---|---|---|",
        *(f"| {reason.type} | {reason.value} | {meaning} |" for reason, meaning in EVENTS.items()),
        "",
        "## Limits of autoscaling",
        "",
        "Values of `status.autoscaling.limitedBy`, also in the message of ScalingActive.",
        "",
        "| limitedBy | what keeps the number away from recommendedReplicas |",
        "|---|---|",
        *(f"| {limit.value} | {meaning} |" for limit, meaning in LIMITS.items()),
        "",
    ]
    return "\n".join(lines)
