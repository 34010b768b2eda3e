"""The status of an InferenceService. Timestamps, never ages; numbers that change all the time are metrics."""

from typing import Annotated, Any, Literal

from pydantic import Field

from slipway_api.conditions import Conditions
from slipway_api.model_spec import Shape
from slipway_api.slo import CostStatus, SLOStatus
from slipway_api.types import DecimalString, Struct, Time, bounded_list


class Address(Struct):
    """One address at which the service answers."""

    name: str = Field(max_length=64)
    """gateway; or service, for the Kubernetes Service, which bypasses the gateway."""
    url: str = Field(max_length=1024)
    """Base URL of the OpenAI API there."""


class RevisionStatus(Struct):
    """A set of user-visible inputs that has, or had, replicas."""

    name: str = Field(max_length=128)
    """Name of the revision."""
    hash: str = Field(max_length=64)
    """Hash of the inputs; its first five characters are in the names of the pods."""
    image: str = Field(default="", max_length=512)
    """The runtime image, resolved once when the revision is created."""
    weight: int = Field(default=0, ge=0, le=100)
    """Share of the traffic in percent; the gateway reads it."""
    mirror_percent: int = Field(default=0, ge=0, le=100)
    """Share of requests in percent that the gateway copies to this revision; the answers are discarded."""
    ready: int = Field(default=0, ge=0)
    """Ready replicas of this revision."""
    served: bool = False
    """Whether it served completely once: lost replicas of such a revision are replaced while another one rolls out."""


class CanaryMetricStatus(Struct):
    """One metric of the analysis when its verdict last changed."""

    type: str = Field(max_length=64)
    """Type of the metric."""
    stable: DecimalString | None = None
    """The value of the stable revision: a share of requests, or seconds; absent: not measured."""
    canary: DecimalString | None = None
    """The value of the canary."""
    requests: int = Field(default=0, ge=0)
    """Requests that the canary has answered since the step started."""
    verdict: str = Field(default="", max_length=64)
    """Passed, Failed or Inconclusive."""


class CanaryStatus(Struct):
    """How far the rollout of updateRevision is; strategies Canary and BlueGreen, and any with gates."""

    step: int = Field(default=0, ge=0)
    """Steps that are done; equal to their number when the revision is promoted."""
    weight: int = Field(default=0, ge=0, le=100)
    """Percent of the traffic that the new revision gets."""
    started_time: Time | None = None
    """When the present step started."""
    gate: str = Field(default="", max_length=64)
    """Passed: the tests of rollout.gates are passed; absent: not yet, or there are none."""
    failures: int = Field(default=0, ge=0)
    """Failures of the analysis in this step."""
    failed_time: Time | None = None
    """When the last of them was counted."""
    metrics: Annotated[tuple[CanaryMetricStatus, ...], bounded_list(at_most=8, key="type")] = ()
    """The metrics of the analysis when a verdict last changed."""


class AttemptStatus(Struct):
    """How often the replica of one slot was started over; written before the pod is created."""

    revision: str = Field(max_length=64)
    """Hash of the revision."""
    slot: int = Field(ge=0)
    """Number of the replica within its revision."""
    attempt: int = Field(default=0, ge=0)
    """Highest attempt so far; the last part of the pod's name."""
    failures: int = Field(default=0, ge=0)
    """Failures in a row; they set the backoff."""
    not_before: Time | None = None
    """No new attempt before this moment."""
    avoid_node: str = Field(default="", max_length=253)
    """The node whose GPU failed under an attempt of this slot: the next ones prefer other nodes."""
    last_end: str = Field(default="", max_length=256)
    """How the attempt before this one ended: the exit code and the termination message of its server."""


class SignalStatus(Struct):
    """One metric at the last decision."""

    type: str = Field(max_length=64)
    """Type of the metric."""
    value: DecimalString | None = None
    """Its value over the replicas; absent when nothing could be measured."""
    target: DecimalString
    """The target value."""
    samples: int = Field(default=0, ge=0)
    """Replicas that answered."""
    sampled_time: Time | None = None
    """When the oldest of these samples was taken."""


class ScalingDecision(Struct):
    """One change of the number of replicas."""

    time: Time
    """Time of the change."""
    from_: int = Field(alias="from", ge=0)
    """Replicas before."""
    to: int = Field(ge=0)
    """Replicas after."""
    reason: str = Field(default="", max_length=1024)
    """The evidence, in one sentence with its numbers."""


class AutoscalingStatus(Struct):
    """The last decision of the autoscaler, and why."""

    recommended_replicas: int | None = Field(default=None, ge=0)
    """The number of replicas that the metrics ask for, before limits; in mode Advisory the number that Slipway would
    set."""
    limited_by: str = Field(default="", max_length=128)
    """The limit that keeps the decision from the recommendation; absent: none."""
    active_schedule: str = Field(default="", max_length=63)
    """The schedule whose minReplicas holds now; absent: none."""
    signals: Annotated[tuple[SignalStatus, ...], bounded_list(at_most=8, key="type")] = ()
    """The metrics behind the last decision."""
    history: Annotated[tuple[ScalingDecision, ...], bounded_list(at_most=5)] = ()
    """The last decisions, newest first."""


class CapacityStatus(Struct):
    """The capacity of one replica."""

    max_sequences: int | None = Field(default=None, ge=0)
    """Requests of full length that run concurrently: as many as fit the KV cache, at most maxNumSeqs."""
    kv_blocks: int | None = Field(default=None, ge=0)
    """Blocks of the KV cache."""
    bytes_per_token: int | None = Field(default=None, ge=0)
    """Bytes of KV cache per token."""


class ColdStart(Struct):
    """Where the time of the newest replica went that was started cold, in seconds."""

    schedule_seconds: DecimalString | None = None
    """Until the scheduler found a node."""
    pull_seconds: DecimalString | None = None
    """Until the container ran: pulling the image, mounting volumes."""
    download_seconds: DecimalString | None = None
    """Downloading the model."""
    load_seconds: DecimalString | None = None
    """Loading the weights."""
    warmup_seconds: DecimalString | None = None
    """The first steps."""


class PerformanceStatus(Struct):
    """Measured times of the replicas."""

    cold_start: ColdStart | None = None
    """Where the time of the newest replica went that was started cold, in seconds."""


class AdaptersStatus(Struct):
    """The LoRAAdapters of the service."""

    desired: int = Field(default=0, ge=0)
    """LoRAAdapters whose base is this service."""
    ready: int = Field(default=0, ge=0)
    """Number of adapters that answer requests."""


class ModelCacheStatus(Struct):
    """Which nodes have the model."""

    nodes_ready: int = Field(default=0, ge=0)
    """Nodes that have it: a pod of prePull has brought it, or a replica serves it there."""
    nodes_total: int = Field(default=0, ge=0)
    """Nodes that should: with prePull all that replicas may run on, else nodes with a replica. A shared claim is 1."""
    bytes: int = Field(default=0, ge=0)
    """Size of the model as prePull found it; 0: not known."""


class ModelFacts(Struct):
    """Sizes of the model as its hub has them, for planning memory before the first replica starts."""

    uri: str = Field(max_length=512)
    """The address that they are of."""
    hub_endpoint: str = Field(default="", max_length=256)
    """The hub that was read; absent: the public one."""
    shape: Shape
    """The sizes."""


class PendingUpgrade(Struct):
    """An upgrade of the runtime image that the installation offers, and that has not begun."""

    image: str = Field(max_length=512)
    """The runtime image of the installation."""
    from_image: str = Field(default="", max_length=512)
    """The runtime image of the present revision."""
    not_before: Time | None = None
    """When the next upgradeWindow opens; absent: the policy waits for no moment."""
    reason: str = Field(default="", max_length=256)
    """What it waits for."""


class TemplateStatus(Struct):
    """A ServiceTemplate of spec.baseRefs, as it was last applied."""

    name: str = Field(max_length=63)
    """Name of the ServiceTemplate."""
    generation: int = Field(default=0, ge=0)
    """Its metadata.generation."""
    blocks: Annotated[tuple[str, ...], bounded_list(at_most=16)] = ()
    """The blocks that the service inherits from it; absent: none."""


class InferenceServiceStatus(Struct):
    """The state of the service that the operator last observed."""

    observed_generation: int | None = Field(default=None, ge=0)
    """The generation of the spec that this status was made from."""
    conditions: Conditions = ()
    """Conditions of the service; Ready is the summary, Reconciling and Stalled are present only when True."""
    url: str = Field(default="", max_length=1024)
    """Base URL of the OpenAI API of this service."""
    addresses: Annotated[tuple[Address, ...], bounded_list(at_most=8, key="name")] = ()
    """Every address at which the service answers."""
    direct_access: Literal["", "Open", "GatewayOnly"] = ""
    """Which callers the replicas answer. Without spec.routing.directAccess it was recorded when the operator first saw
    the service, and a later change of the installation's default does not change it."""
    replicas: int | None = Field(default=None, ge=0)
    """All replicas that exist, whatever their state."""
    ready_replicas: int | None = Field(default=None, ge=0)
    """Replicas that take requests."""
    updated_replicas: int | None = Field(default=None, ge=0)
    """Replicas of the newest revision."""
    draining_replicas: int | None = Field(default=None, ge=0)
    """Replicas that finish their requests and are then deleted."""
    desired_replicas: int | None = Field(default=None, ge=0)
    """The desired number of replicas; it keeps the autoscaler's last decision across restarts of the operator."""
    selector: str = Field(default="", max_length=512)
    """Label selector of the pods, for kubectl scale, HPA and KEDA."""
    served_name: str = Field(default="", max_length=253)
    """The model name in requests."""
    current_revision: str = Field(default="", max_length=128)
    """The revision that last served completely."""
    update_revision: str = Field(default="", max_length=128)
    """The revision that the spec asks for; differs from currentRevision while rolling out."""
    failed_revision: str = Field(default="", max_length=128)
    """A revision that was rolled back or aborted; it is not tried again until the spec asks for another one."""
    revisions: Annotated[tuple[RevisionStatus, ...], bounded_list(at_most=6, key="name")] = ()
    """Revisions with replicas or within revisionHistoryLimit, newest first."""
    canary: CanaryStatus | None = None
    """How far the rollout of updateRevision is; absent: nothing rolls out."""
    attempts: Annotated[tuple[AttemptStatus, ...], bounded_list(at_most=2048, key=("revision", "slot"))] = ()
    """Slots whose replica was started more than once."""
    autoscaling: AutoscalingStatus | None = None
    """The last decision of the autoscaler, and why."""
    capacity: CapacityStatus | None = None
    """The capacity of one replica."""
    performance: PerformanceStatus | None = None
    """Measured times of the replicas."""
    slo: SLOStatus | None = None
    """The measured service levels, and what is left of the error budget; absent: spec.slo is."""
    cost: CostStatus | None = None
    """What the service costs; absent: spec.budget has no gpuHourCost, or its replicas have no GPUs."""
    adapters: AdaptersStatus | None = None
    """The LoRAAdapters of the service; absent if there are no adapters."""
    model_cache: ModelCacheStatus | None = None
    """Which nodes have the model; absent: it is neither cached nor pulled before replicas start."""
    model: ModelFacts | None = None
    """Sizes of the model as its hub has them; absent: spec.model.shape has them, or they could not be read."""
    templates: Annotated[tuple[TemplateStatus, ...], bounded_list(at_most=8)] = ()
    """The ServiceTemplates of spec.baseRefs, as they were last applied; absent: there are none."""
    inherited: dict[str, Any] | None = None
    """The inherited blocks of the spec, as they were last applied. They stay in force while a template is missing or
    cannot be applied."""
    pending_upgrade: PendingUpgrade | None = None
    """A newer runtime image that the installation offers, and what it waits for; absent: none."""
