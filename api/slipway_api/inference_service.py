"""The InferenceService kind: one model, the replicas that serve it, and how they scale, roll and drain.

Fields that are not built yet are absent, not ignored. Defaults stand in the schema; the two that depend on another
field (`served_name`, `fixed_replicas`) are resolved here and nowhere else. What is served is in `model_spec`, how a
replica runs it in `runtime_spec`.
"""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from pydantic import Field

from slipway_api.autoscaling import Autoscaling, ScalingMode
from slipway_api.inference_status import InferenceServiceStatus
from slipway_api.model_source import PrePull
from slipway_api.model_spec import Model
from slipway_api.moments import read_moment
from slipway_api.names import ANNOTATION_PAUSE, API_VERSION
from slipway_api.overlay import ResourceMap, Template, resource_rules
from slipway_api.rollout_spec import Rollout
from slipway_api.runtime_spec import Runtime
from slipway_api.slo import SLO
from slipway_api.spec_rules import SPEC_RULES
from slipway_api.types import (
    DecimalString,
    ObjectMeta,
    Rule,
    ServiceKey,
    Struct,
    bounded_list,
    cel_rules,
    decimal_rule,
)


class GPU(Struct):
    """GPUs of one replica."""

    count: int = Field(default=1, ge=0, le=16)
    """Number of GPUs; 0 runs the model on CPUs."""
    resource_name: str = Field(
        default="nvidia.com/gpu",
        pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$",
        max_length=253,
    )
    """Extended resource of the device plugin."""
    product: str = Field(default="", pattern=r"^([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?$", max_length=63)
    """Only nodes whose label nvidia.com/gpu.product has this value; empty: any."""


class Resources(Struct):
    """Resources that one replica requests on its node."""

    model_config = cel_rules(*resource_rules())

    gpu: GPU = GPU()
    """GPUs of one replica."""
    requests: ResourceMap = Field(default_factory=dict)
    """CPU, memory and ephemeral storage that the scheduler reserves, such as cpu: 500m."""
    limits: ResourceMap = Field(default_factory=dict)
    """CPU, memory and ephemeral storage that a replica may use at most; limits.cpu is also its number of threads."""


class Drain(Struct):
    """How a replica is drained: it gets no new requests, finishes its running requests, and only then stops."""

    model_config = cel_rules(
        Rule(
            "self.endpointPropagationSeconds < self.timeoutSeconds",
            "endpointPropagationSeconds must be below timeoutSeconds",
            ".endpointPropagationSeconds",
        )
    )

    timeout_seconds: int = Field(default=300, ge=1, le=3600)
    """How long requests may take to finish; then streams are handed over, and other requests end with an error."""
    endpoint_propagation_seconds: int = Field(default=5, ge=0, le=3600)
    """Shortest time between the removal of a replica from routing and its stop, so that all routers have noticed it."""
    handover: bool = True
    """Streams that a lost replica, or one past its drain deadline, leaves unfinished continue on another replica of the
    same revision. false: they end with an error event. A change takes effect immediately; no replica restarts."""


class DirectAccess(StrEnum):
    """Which callers a replica answers on its serving port."""

    OPEN = "Open"
    GATEWAY_ONLY = "GatewayOnly"


class RoutingStrategy(StrEnum):
    """How the gateway chooses a replica for a request."""

    PREFIX_CACHE = "PrefixCache"
    LEAST_LOAD = "LeastLoad"
    ROUND_ROBIN = "RoundRobin"


class Fallback(Struct):
    """Another service that answers when this one cannot in time."""

    service: str = Field(min_length=1, max_length=40)
    """Name of an InferenceService of the same namespace. It answers while it has a ready replica and the caller may use
    it; its own fallback comes after it. Requests that pin a revision, or name an adapter, stay with this service."""
    after_seconds: int = Field(default=3, ge=0, le=600)
    """How long a request waits for a ready replica of this service, and a streamed one for the first byte of its
    answer. A request that this service refuses, or whose replicas fail, moves on immediately."""


class Hedging(Struct):
    """A second replica gets the request too if the first token of the first replica is late."""

    max_prompt_tokens: int = Field(default=512, ge=1, le=8192)
    """Only streamed requests whose prompt is at most so long, estimated as four bytes a token: both replicas compute
    it."""


class Routing(Struct):
    """How requests reach the replicas."""

    strategy: RoutingStrategy = RoutingStrategy.PREFIX_CACHE
    """How the gateway chooses a replica. PrefixCache: the replica with the beginning of the prompt or the session in
    its cache, unless its load is too far above the least. LeastLoad: the one with the fewest outstanding tokens.
    RoundRobin: one after the other. A change takes effect immediately and restarts nothing."""
    direct_access: DirectAccess | None = None
    """Open: every pod that can reach a replica may call it directly. GatewayOnly: a replica answers only the
    gateway, which shows a token; status.addresses then names no other way. If absent, status.directAccess applies: a
    new service gets the installation's default, GatewayOnly if tenants are configured. A change rolls out new
    replicas."""
    request_timeout_seconds: int = Field(default=600, ge=1, le=86_400)
    """How long a request may take from its arrival at the gateway to the last byte of its answer, streamed or not: then
    an answer that has not started is a 504, and a stream ends. The gateway applies a change immediately."""
    fallback: Fallback | None = None
    """Another service that answers when this one cannot in time. Absent: none does."""
    hedging: Hedging | None = None
    """A streamed request with a short prompt that has waited for its first token for longer than 95 % of the others is
    sent to a second replica of the same revision too; the first answer is forwarded, the other one cancelled. Each
    spends one of the service's retries, which are a fifth of its requests at most. Absent: off."""


class Profile(StrEnum):
    """The kind of load that a service is for."""

    CHAT = "chat"
    CODING = "coding"
    VOICE = "voice"
    BATCH = "batch"
    LONG_CONTEXT = "long-context"


class DisruptionBudget(StrEnum):
    """Whether a PodDisruptionBudget limits evictions."""

    AUTO = "Auto"
    NONE = "None"


class Availability(Struct):
    """How replicas are protected from disruptions, and how failed ones are replaced."""

    pod_disruption_budget: DisruptionBudget = DisruptionBudget.AUTO
    """Auto: a PodDisruptionBudget lets one replica be evicted at a time, and a single replica once another one is
    ready beside it. None: there is no PodDisruptionBudget."""
    max_node_drain_block_seconds: int = Field(default=1800, ge=0, le=86_400)
    """How long the PodDisruptionBudget may hold up the drain of a node while no other replica becomes ready; then
    evictions are allowed, with a warning event."""
    protect_startup: bool = True
    """Node scalers leave a node alone while a replica starts on it (cluster-autoscaler, Karpenter)."""
    replace_after_unhealthy_seconds: int = Field(default=120, ge=10, le=86_400)
    """A replica that was ready and is not ready for this long is replaced, one replica at a time."""
    priority_class_name: str = Field(default="", pattern=r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?)?$", max_length=253)
    """PriorityClass of the replicas; template.spec.priorityClassName wins. A change rolls out new replicas."""


class Budget(Struct):
    """What the service may cost."""

    model_config = cel_rules(
        Rule(
            "has(self.maxGPUs) || has(self.gpuHourCost)",
            "a budget needs maxGPUs, gpuHourCost, or both",
        ),
        decimal_rule("gpuHourCost", "value > 0.0", "gpuHourCost must be above 0"),
    )

    max_gpus: int | None = Field(default=None, alias="maxGPUs", ge=1, le=16_000)
    """Most GPUs of all desired replicas together. It limits autoscaling also if minReplicas or a schedule asks for
    more, and the number that is written through /scale; a rollout's surge comes on top. Absent: no limit."""
    gpu_hour_cost: DecimalString | None = None
    """Price of one GPU for an hour, in units of currency: status.cost and the metrics of cost follow from it. Absent:
    the service has no price."""
    currency: str = Field(default="USD", pattern="^[A-Z]{3}$", max_length=3)
    """Currency of gpuHourCost, three letters of ISO 4217."""


RESTART_PATTERN = (
    r"^([0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
    r"([.][0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9]))?$"
)
# Text that the pattern refuses passes here: a second message about its conversion would only confuse.
_IS_A_MOMENT = (
    f"!has(self.restartAt) || self.restartAt == '' || !self.restartAt.matches('{RESTART_PATTERN}') || "
    "timestamp(self.restartAt).getFullYear() > 0"
)


class WarmPoolPolicy(StrEnum):
    """What happens when the warm pool has no pod for a replica."""

    PREFER = "Prefer"
    REQUIRE = "Require"


class WarmPoolReference(Struct):
    """The WarmPool whose pods become replicas of the service."""

    name: str = Field(min_length=1, max_length=63)
    """Name of the WarmPool, in the same namespace."""
    policy: WarmPoolPolicy = WarmPoolPolicy.PREFER
    """Prefer: start a replica cold when the pool has no fit pod. Require: wait for one."""


class TemplateReference(Struct):
    """A ServiceTemplate, by name."""

    name: str = Field(min_length=1, max_length=63)
    """Name of the ServiceTemplate, which belongs to the cluster."""


class InferenceServiceSpec(Struct):
    """The desired state of the service: model, runtime, replicas."""

    model_config = cel_rules(
        Rule(
            _IS_A_MOMENT,
            "restartAt must be a moment of the calendar in RFC 3339, such as 2026-05-01T12:00:00Z",
            ".restartAt",
        ),
        *SPEC_RULES,
    )

    model: Model
    """The model, its served name and its credentials."""
    base_refs: Annotated[tuple[TemplateReference, ...], bounded_list(at_most=8)] = ()
    """ServiceTemplates that supply the blocks which this spec leaves out: resources, template, autoscaling, rollout,
    drain, availability, budget and slo. A block is taken whole: the service's own, else that of the last template that
    has it, else the defaults of its fields. status.templates has the origin of each."""
    profile: Profile | None = None
    """The kind of load: chat, coding, voice, batch or long-context. It fills runtime.maxNumSeqs,
    runtime.maxNumBatchedTokens and runtime.speculation where they are at their default, and resources.requests of CPU
    and memory for each GPU where nothing is said of them. Absent: fills nothing."""
    runtime: Runtime = Runtime()
    """How a replica runs the model."""
    resources: Resources = Resources()
    """Resources that one replica requests on its node."""
    template: Template = Template()
    """An overlay for the pods, within an allow-list."""
    replicas: int | None = Field(default=None, ge=0, le=1000)
    """A fixed number of replicas, with autoscaling.mode Advisory too, or with External the one written through /scale.
    If absent, 1, or with autoscaling the autoscaler's number; with External the operator writes the first number once,
    so that a manifest without the field does not reset an HPA's."""
    autoscaling: Autoscaling | None = None
    """The autoscaler's limits, metrics and behavior."""
    rollout: Rollout = Rollout()
    """How a new revision replaces the old one."""
    drain: Drain = Drain()
    """How a replica is drained: it gets no new requests, finishes its running requests, and only then stops."""
    routing: Routing = Routing()
    """How requests reach the replicas."""
    availability: Availability = Availability()
    """How replicas are protected from disruptions, and how failed ones are replaced."""
    budget: Budget | None = None
    """What the service may cost."""
    slo: SLO | None = None
    """Service level objectives: they are measured, their error budget is kept in status, and while it is spent new
    revisions wait. Absent: nothing is measured against objectives."""
    restart_at: str = Field(default="", pattern=RESTART_PATTERN, max_length=40)
    """A moment in RFC 3339, such as 2026-05-01T12:00:00Z: from then on replicas that are older are replaced, one after
    the other. A moment in the future waits until then."""
    suspend: bool = False
    """true: all replicas drain and none is started, whatever replicas and autoscaling say."""
    warm_pool: WarmPoolReference | None = None
    """Take replicas from this WarmPool. Absent: every replica is started cold."""
    pre_pull: PrePull | None = None
    """Bring image and model to every node that a replica may run on, before it does. Absent: replicas bring them."""


class InferenceService(Struct):
    """A model served by replicas of Slipway's runtime behind one OpenAI-compatible endpoint."""

    model_config = cel_rules(
        Rule(
            "size(self.metadata.name) <= 40",
            "metadata.name may have at most 40 characters, so that the names of its pods fit",
            ".metadata.name",
        ),
        Rule(
            "self.metadata.name.matches('^[a-z]([a-z0-9-]*[a-z0-9])?$')",
            "metadata.name must be lower-case letters, digits and '-', starting with a letter: it also names a Service",
            ".metadata.name",
        ),
    )

    KIND: ClassVar[str] = "InferenceService"
    PLURAL: ClassVar[str] = "inferenceservices"

    api_version: str = API_VERSION
    kind: str = "InferenceService"
    metadata: ObjectMeta
    spec: InferenceServiceSpec
    """The desired state of the service: model, runtime, replicas."""
    status: InferenceServiceStatus = InferenceServiceStatus()
    """The state of the service that the operator last observed."""

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> "InferenceService":
        """The kind from what the API server sent; raises pydantic.ValidationError."""
        return cls.model_validate(raw)

    @property
    def key(self) -> ServiceKey:
        """Namespace and name."""
        return ServiceKey(self.metadata.namespace, self.metadata.name)

    @property
    def served_name(self) -> str:
        """What clients send as `model`."""
        return self.spec.model.served_name or self.metadata.name

    @property
    def direct_access(self) -> DirectAccess:
        """Which callers the replicas answer: by the spec, else as recorded when the service was first seen."""
        return self.spec.routing.direct_access or DirectAccess(self.status.direct_access or DirectAccess.OPEN)

    @property
    def restart_moment(self) -> datetime | None:
        """spec.restartAt; None if it is not set, or if the calendar has no such day."""
        return read_moment(self.spec.restart_at)

    @property
    def paused_by(self) -> str:
        """The field or annotation by which a person has paused the rollouts; empty if they are not paused."""
        if self.spec.rollout.paused:
            return "spec.rollout.paused"
        is_marked = self.metadata.annotations.get(ANNOTATION_PAUSE) == "true"
        return f"the annotation {ANNOTATION_PAUSE}" if is_marked else ""

    @property
    def fixed_replicas(self) -> int | None:
        """The number of replicas that the spec fixes, 1 without autoscaling; None where status has the number."""
        if self.spec.autoscaling is None:
            return 1 if self.spec.replicas is None else self.spec.replicas
        if self.spec.autoscaling.mode in (ScalingMode.EXTERNAL, ScalingMode.ADVISORY):
            return self.spec.replicas
        return None

    @property
    def is_being_deleted(self) -> bool:
        """Whether a deletion waits for the replicas to drain."""
        return self.metadata.deletion_timestamp is not None
