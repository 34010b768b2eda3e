"""Lists every condition, event and limit of an InferenceService with its meaning, who can help, and the remedy.

The reference page is made from it. It lists only reasons that are used: tests compare it and the enums with the reasons
that the operator emits.
"""

from typing import Final

from slipway_api.autoscaling import Limit
from slipway_api.causes import Cause, Helper, Row, condition_table
from slipway_api.conditions import ConditionStatus, ConditionType, EventReason, Reason
from slipway_api.stalled_causes import INTERNAL_ERROR, STALLED_CAUSES

_TRUE, _FALSE, _UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN

# Reasons of Stalled whose event has no other meaning: one word in the condition, in the event, and in an alert.
_STALLED_EVENTS: Final = (
    *(Reason.DOES_NOT_FIT, Reason.CACHE_NOT_PERMITTED, Reason.IMAGE_PULL_FAILED, Reason.MODEL_NOT_FOUND),
    *(Reason.CREDENTIALS_INVALID, Reason.QUOTA_EXCEEDED, Reason.REFUSED, Reason.CRASH_LOOPING),
    *(Reason.REVISION_MISSING, Reason.POOL_NOT_FOUND, Reason.CERTIFICATE_UNAVAILABLE, Reason.ENGINE_WITHOUT_TLS),
    *(Reason.NO_SUITABLE_NODE, Reason.HUB_UNREACHABLE, Reason.MOUNT_FAILED, Reason.ENGINE_NOT_FOUND),
    Reason.TEMPLATE_NOT_FOUND,
)

TERMINATING: Final = Cause(
    "The object is being deleted; the message names the replicas or finalizers that it waits for."
)

_ROLLED_BACK: Final = (
    _FALSE,
    Reason.ROLLED_BACK,
    Cause(
        "The revision of the spec was rolled back or aborted; why.",
        Helper.AUTHOR,
        "Correct the spec, or override with kubectl slipway promote.",
    ),
)

_CAUSES: Final[dict[ConditionType, tuple[tuple[ConditionStatus, Reason, Cause], ...]]] = {
    ConditionType.READY: (
        (_TRUE, Reason.AVAILABLE, Cause("All desired replicas take requests.")),
        (
            _TRUE,
            Reason.NAME_CONFLICT,
            Cause(
                "All take requests; only to some tenants the served name is this service's.",
                Helper.OTHER_OWNER,
                "Set another spec.model.servedName, or rename the older object.",
            ),
        ),
        (_TRUE, Reason.DEGRADED, Cause("Fewer replicas than desired take requests.")),
        (_TRUE, Reason.SCALED_TO_ZERO, Cause("No replicas are requested: by the spec, or because no requests come.")),
        (_FALSE, Reason.NO_READY_REPLICAS, Cause("It served before, and no replica does.")),
        *((_FALSE, reason, cause) for reason, cause in STALLED_CAUSES.items()),
        (_FALSE, Reason.TERMINATING, TERMINATING),
        (_UNKNOWN, Reason.INTERNAL_ERROR, INTERNAL_ERROR),
        (_UNKNOWN, Reason.LOADING, Cause("Replicas start for the first time.")),
        (
            _UNKNOWN,
            Reason.MOUNT_FAILED,
            Cause(
                "The kubelet cannot mount a volume of a replica yet; the message has its sentence.",
                Helper.CLUSTER,
                "Read the events of the pod with kubectl describe pod; the kubelet tries again.",
            ),
        ),
        (_UNKNOWN, Reason.DOWNLOADING_MODEL, Cause("A replica downloads the model to its node.")),
        (
            _UNKNOWN,
            Reason.WAITING_FOR_GPU,
            Cause("No node has a free GPU for a replica.", Helper.CLUSTER, "Free a GPU, or add a node with one."),
        ),
        (
            _UNKNOWN,
            Reason.UNSCHEDULABLE,
            Cause(
                "No node takes a replica; the cause is not GPUs but taints, labels or volumes.",
                Helper.AUTHOR,
                "Change what the scheduler's sentence in the message names: tolerations, nodeSelector or a claim.",
            ),
        ),
    ),
    ConditionType.STALLED: (
        *((_TRUE, reason, cause) for reason, cause in STALLED_CAUSES.items()),
        (_TRUE, Reason.INTERNAL_ERROR, INTERNAL_ERROR),
    ),
    ConditionType.RECONCILING: (
        (_TRUE, Reason.SCALING_UP, Cause("Desired replicas do not serve yet.")),
        (_TRUE, Reason.ROLLING_OUT, Cause("A revision replaces the previous one.")),
        (_TRUE, Reason.TERMINATING, TERMINATING),
    ),
    ConditionType.WORKLOAD_AVAILABLE: (
        (_TRUE, Reason.AVAILABLE, Cause("All desired replicas are ready.")),
        (_FALSE, Reason.DEGRADED, Cause("Some desired replicas are not ready.")),
        (_FALSE, Reason.NO_READY_REPLICAS, Cause("No replica is ready.")),
        (_FALSE, Reason.TERMINATING, TERMINATING),
    ),
    ConditionType.ROUTE_READY: (
        (_TRUE, Reason.ROUTED, Cause("The gateway serves it under its served name.")),
        (
            _TRUE,
            Reason.FALLBACK_NOT_FOUND,
            Cause(
                "The gateway serves it, and the service that spec.routing.fallback names does not exist.",
                Helper.AUTHOR,
                "Create that service in the same namespace, or correct or remove the field.",
            ),
        ),
        (_FALSE, Reason.NO_READY_REPLICAS, Cause("No replica exists to route requests to.")),
        (
            _FALSE,
            Reason.CANNOT_START,
            Cause(
                "No replica can start, for the cause in Stalled: the gateway refuses requests immediately.",
                Helper.AUTHOR,
                "Remove the cause in Stalled, whose row names who can help.",
            ),
        ),
        (
            _FALSE,
            Reason.NO_GATEWAY,
            Cause(
                "No gateway answers the operator, so no client reaches the service.",
                Helper.INSTALLATION,
                "Run the command in the message, and start the gateways again.",
            ),
        ),
        (
            _FALSE,
            Reason.NAME_CONFLICT,
            Cause(
                "Another object, or another namespace, has the served name.",
                Helper.OTHER_OWNER,
                "Set another spec.model.servedName, or rename the other object.",
            ),
        ),
        (_FALSE, Reason.TERMINATING, TERMINATING),
    ),
    ConditionType.SCALING_ACTIVE: (
        (_TRUE, Reason.METRICS_FRESH, Cause("All ready replicas report their load.")),
        (
            _TRUE,
            Reason.METRICS_STALE,
            Cause(
                "Some ready replicas do not report their load.",
                Helper.CLUSTER,
                "Check the network between the operator and port 8001 of the replicas.",
            ),
        ),
        (
            _TRUE,
            Reason.LIMITED_BY_MAX,
            Cause("The load needs more than maxReplicas replicas.", Helper.AUTHOR, "Raise autoscaling.maxReplicas."),
        ),
        (
            _TRUE,
            Reason.LIMITED_BY_BUDGET,
            Cause("The load needs more GPUs than budget.maxGPUs.", Helper.AUTHOR, "Raise budget.maxGPUs."),
        ),
        (
            _TRUE,
            Reason.LIMITED_BY_CAPACITY,
            Cause(
                "The load needs more replicas, but the last ones found no node or no quota.",
                Helper.CLUSTER,
                "Add a node, free GPUs, or raise the quota.",
            ),
        ),
        (_TRUE, Reason.EXTERNAL, Cause("spec.replicas decides, written through /scale.")),
        (_TRUE, Reason.ADVISORY, Cause("Slipway reports the number that it would set, and changes nothing.")),
        (_FALSE, Reason.PAUSED, Cause("The present number stays until autoscaling.mode is another one.")),
        (
            _FALSE,
            Reason.METRICS_MISSING,
            Cause(
                "No ready replica reports its load, or at zero replicas no gateway: the number stays.",
                Helper.CLUSTER,
                "Check the network between the operator, port 8001 of the replicas, and the gateways.",
            ),
        ),
        (
            _FALSE,
            Reason.KEY_REFUSED,
            Cause(
                "Ready replicas refuse the operator's token (401).",
                Helper.INSTALLATION,
                "Restore the Secret slipway-admin-master, or replace the replicas with spec.restartAt.",
            ),
        ),
        (_UNKNOWN, Reason.METRICS_MISSING, Cause("No replica is ready: there is no load yet.")),
    ),
    ConditionType.SUSPENDED: (
        (_TRUE, Reason.SUSPENDED, Cause("spec.suspend is true: replicas drain, and none starts.")),
    ),
    ConditionType.CANARY_HEALTHY: (
        (_UNKNOWN, Reason.ANALYZING, Cause("A new revision is on its way through gates, steps and analysis.")),
        (
            _UNKNOWN,
            Reason.INCONCLUSIVE,
            Cause("The analysis can tell neither success nor failure yet: the step holds."),
        ),
        (_TRUE, Reason.PASSED, Cause("The last new revision passed all its steps, or a person promoted it.")),
        (
            _FALSE,
            Reason.FAILED,
            Cause(
                "The analysis failed, fewer times than failureLimit so far.", Helper.AUTHOR, "Nothing yet; or abort."
            ),
        ),
        _ROLLED_BACK,
    ),
    ConditionType.ROLLOUT_HEALTHY: (
        (_UNKNOWN, Reason.ANALYZING, Cause("A new revision has to pass its gates, or waits for the switch.")),
        (_TRUE, Reason.PASSED, Cause("The last new revision passed its gates, or has all the traffic.")),
        _ROLLED_BACK,
    ),
    ConditionType.ADAPTERS_READY: (
        (_TRUE, Reason.ADAPTERS_LOADED, Cause("Every LoRAAdapter of the service answers requests.")),
        (
            _FALSE,
            Reason.ADAPTERS_MISSING,
            Cause(
                "Some LoRAAdapters of the service do not answer.",
                Helper.AUTHOR,
                "Read the conditions of the adapters that the message names.",
            ),
        ),
        (
            _FALSE,
            Reason.ADAPTERS_FAILED,
            Cause(
                "Replicas serve without an adapter of spec.runtime.args; the message has the runtime's reason.",
                Helper.AUTHOR,
                "Correct --adapter in spec.runtime.args, or make a LoRAAdapter of it, which is tried again.",
            ),
        ),
    ),
    ConditionType.WITHIN_SLO: (
        (
            _TRUE,
            Reason.WITHIN_LIMITS,
            Cause("Error budget is left, and the last hour is within the limits of spec.slo."),
        ),
        (
            _FALSE,
            Reason.LIMIT_EXCEEDED,
            Cause(
                "The last hour is above a limit of spec.slo; which, with its numbers.",
                Helper.AUTHOR,
                "Add replicas, or change the limit.",
            ),
        ),
        (
            _FALSE,
            Reason.ERROR_BUDGET_BURNING,
            Cause(
                "An error budget is spent so fast that it will not last; the burn rate.",
                Helper.AUTHOR,
                "Find the errors or slow answers in the metrics that the message names.",
            ),
        ),
        (
            _FALSE,
            Reason.ERROR_BUDGET_EXHAUSTED,
            Cause(
                "An error budget of the window is spent: new revisions wait.",
                Helper.AUTHOR,
                "Promote a revision that is the remedy with kubectl slipway promote, or wait.",
            ),
        ),
        (_UNKNOWN, Reason.NO_REQUESTS, Cause("No gateway has counted a request in the window.")),
    ),
    ConditionType.MODEL_CACHED: (
        (
            _TRUE,
            Reason.CACHED,
            Cause("With prePull every node that replicas may run on, else every node that has one."),
        ),
        (_FALSE, Reason.CACHING, Cause("Image and model are on their way to some nodes.")),
        (
            _FALSE,
            Reason.CACHING_FAILED,
            Cause(
                "A node could not get the model; why. It is tried again.",
                Helper.AUTHOR,
                "Check spec.model.uri and the log of the pull pod.",
            ),
        ),
    ),
    ConditionType.GATEWAY_ONLY: (
        (
            _FALSE,
            Reason.OPEN_TO_DIRECT_CALLERS,
            Cause(
                "Tenants are configured, but replicas answer callers without a key.",
                Helper.AUTHOR,
                "Set spec.routing.directAccess to GatewayOnly; this replaces the replicas.",
            ),
        ),
    ),
    ConditionType.ENGINE_FIELDS_HONOURED: (
        (
            _FALSE,
            Reason.ENGINE_IGNORES,
            Cause(
                "The engine of spec.runtime.engine has nothing for some fields, and runs without them.",
                Helper.AUTHOR,
                "Remove the fields that the message names, or choose an engine that has them.",
            ),
        ),
    ),
    ConditionType.OUTPUT_VALID: (
        (
            _FALSE,
            Reason.INVALID_LOGITS,
            Cause(
                "Replicas computed NaN or infinite logits; the message names them and the number of requests.",
                Helper.AUTHOR,
                "Check the checkpoint, spec.runtime.dtype and adapters; spec.restartAt replaces the replicas.",
            ),
        ),
    ),
}

CONDITIONS: Final = tuple(Row(type, *row) for type, rows in _CAUSES.items() for row in rows)

EVENTS: Final = {
    EventReason.REPLICA_CREATED: "A pod was created, and for which slot.",
    EventReason.REPLICA_READY: "A replica takes requests; how many do.",
    EventReason.REPLICA_DRAINING: "A replica gets no new requests and finishes those it has; why.",
    EventReason.REPLICA_DRAINED: "A replica has finished its requests and is deleted.",
    EventReason.SCALED_UP: "More replicas are wanted; the evidence in numbers.",
    EventReason.SCALED_DOWN: "Fewer replicas are wanted; the evidence in numbers.",
    EventReason.SCALED_TO_ZERO: "No requests came for idleSeconds, so the last replicas are drained.",
    EventReason.ACTIVATED: "Requests wait for a service without replicas, so it gets some; how many requests.",
    EventReason.ROLLOUT_STARTED: "A revision starts to replace the previous one.",
    EventReason.CANARY_STEP_COMPLETED: "A step of a canary, or its gates, are passed; how.",
    EventReason.CANARY_PROMOTED: "The new revision has all the traffic.",
    EventReason.GATES_PASSED: "The new revision has passed its gates and gets traffic; strategies other than Canary.",
    EventReason.ROLLOUT_PROMOTED: "The new revision has all the traffic; strategies other than Canary.",
    EventReason.CANARY_ANALYSIS_FAILED: "The new revision is worse than the stable one; both numbers.",
    EventReason.CANARY_INCONCLUSIVE: "Too few requests, or too small a difference, for a verdict: the step holds.",
    EventReason.CANARY_ROLLED_BACK: "All traffic goes back to the previous revision; why, with both numbers.",
    EventReason.ROLLOUT_ROLLED_BACK: "The previous revision gets the traffic back; strategies other than Canary; why.",
    EventReason.ROLLOUT_COMPLETED: "Only the new revision serves.",
    EventReason.SUSPENDED: "spec.suspend became true: all replicas drain.",
    EventReason.RESUMED: "spec.suspend became false: replicas start again.",
    EventReason.WARM_POD_CLAIMED: "A pod of the warm pool became a replica, and for which slot.",
    EventReason.MODEL_CACHED: "All nodes that replicas may run on have the model; how many.",
    EventReason.TEMPLATE_APPLIED: "The inherited blocks have changed; their names, templates and generations.",
    EventReason.WARM_POOL_MISS: "The warm pool has no pod for a replica; why, and what happens instead.",
    EventReason.INVALID_SPEC: "The spec breaks a rule.",
    **{EventReason(reason.value): STALLED_CAUSES[reason].meaning for reason in _STALLED_EVENTS},
    EventReason.FALLBACK_NOT_FOUND: "The service that spec.routing.fallback names does not exist.",
    EventReason.NO_GATEWAY: "No gateway answers the operator: no client reaches the service.",
    EventReason.INVALID_LOGITS: "Replicas computed NaN or infinite logits: these answers ended with an error.",
    EventReason.ADAPTERS_FAILED: "Replicas could not load an adapter of spec.runtime.args; the runtime's reason.",
    EventReason.METRICS_STALE: "Some ready replicas do not report their load.",
    EventReason.KEY_REFUSED: "Ready replicas refuse the operator's token (401): was slipway-admin-master replaced?",
    EventReason.SCALING_HELD: "No ready replica, or no gateway of a service at zero, reports: the number stays.",
    EventReason.SCALING_LIMITED: "A limit or a lack of capacity keeps the number below what is wanted.",
    EventReason.WAITING_FOR_GPU: "No node has a free GPU for a replica, or none for the surge of a rollout.",
    EventReason.UNSCHEDULABLE: "No node takes a replica, for another cause than GPUs.",
    EventReason.MODEL_DOWNLOAD_FAILED: "A pod that fills a model cache failed; why.",
    EventReason.REPLICA_UNHEALTHY: "A replica that served ended, hangs or is on a silent node; why.",
    EventReason.REPLICA_REPLACED: "A slot gets another replica; why, and after how many failures.",
    EventReason.CHILD_RESTORED: "Another client deleted or edited a Service, disruption budget, NetworkPolicy or"
    " ConfigMap of the service, and it is restored; which, and the edited fields.",
    EventReason.LABELS_RESTORED: "Labels of a pod or ControllerRevision were edited, and are restored; which.",
    EventReason.GPU_FAULT: "The server of a replica ended by a fault of its GPU; its successor prefers another node.",
    EventReason.NODE_DRAIN_FORCED: "A node's drain waited for maxNodeDrainBlockSeconds: evictions are allowed.",
    EventReason.DRAIN_TIMED_OUT: "A drain took longer than drain.timeoutSeconds; what was left.",
    EventReason.INTERNAL_ERROR: INTERNAL_ERROR.meaning,
    EventReason.NAME_CONFLICT: "Another owner has the served name, or the name of a replica or of another child.",
    EventReason.ACTIVATION_TIMED_OUT: "Requests waited for the first replica of a service and gave up; how many.",
    EventReason.ACTIVATION_QUEUE_FULL: "Requests were refused while the first replica starts; how many, which limit.",
    EventReason.BUDGET_EXCEEDED: "budget.maxGPUs keeps the number below what is wanted.",
    EventReason.SLO_EXCEEDED: "The last hour is above a limit of spec.slo; which, with its numbers.",
    EventReason.ERROR_BUDGET_BURNING: "An error budget is spent much faster than it lasts; the burn rates.",
    EventReason.ERROR_BUDGET_EXHAUSTED: "An error budget is spent: new revisions wait, or a person promotes them.",
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
        *condition_table(CONDITIONS),
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
