"""The InferenceService kind: one model, the replicas that serve it, and how they scale, roll and drain.

Fields that are not built yet are absent, not ignored. Defaults stand in the schema; the two that depend on another
field (`served_name`, `fixed_replicas`) are resolved here and nowhere else. What is served is in `model_spec`, how a
replica runs it in `runtime_spec`.
"""

from enum import StrEnum
from typing import Any, ClassVar

from pydantic import Field

from slipway_api.autoscaling import Autoscaling, ScalingMode
from slipway_api.inference_status import InferenceServiceStatus
from slipway_api.model_spec import Model
from slipway_api.names import API_VERSION
from slipway_api.overlay import ResourceMap, Template, resource_rules
from slipway_api.runtime_spec import Runtime
from slipway_api.types import ObjectMeta, Rule, ServiceKey, Struct, cel_rules


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


class RollingUpdate(Struct):
    """How many replicas more or fewer a rollout may have."""

    model_config = cel_rules(
        Rule("self.maxSurge + self.maxUnavailable > 0", "maxSurge and maxUnavailable must not both be 0")
    )

    max_surge: int = Field(default=1, ge=0, le=1000)
    """Replicas above the desired number."""
    max_unavailable: int = Field(default=0, ge=0, le=1000)
    """Replicas below the desired number."""


class RolloutStrategy(StrEnum):
    """How a new revision replaces the old one."""

    ROLLING_UPDATE = "RollingUpdate"


class Rollout(Struct):
    """How a new revision replaces the old one."""

    strategy: RolloutStrategy = RolloutStrategy.ROLLING_UPDATE
    """RollingUpdate: start new replicas, wait until they are ready, drain old ones."""
    rolling_update: RollingUpdate = RollingUpdate()
    """How many replicas more or fewer a rollout may have."""
    progress_deadline_seconds: int = Field(default=1800, ge=30, le=86_400)
    """A rollout without progress for this long is reported as Stalled."""
    revision_history_limit: int = Field(default=5, ge=0, le=5)
    """Number of old revisions that are kept."""


class Drain(Struct):
    """How a replica is drained: it gets no new requests, finishes those that it has, and only then stops."""

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
    same revision. false: they end with an error event. The gateway obeys a change at once; no replica restarts."""


class DirectAccess(StrEnum):
    """Which callers a replica answers on its serving port."""

    OPEN = "Open"
    GATEWAY_ONLY = "GatewayOnly"


class Routing(Struct):
    """How requests reach the replicas."""

    direct_access: DirectAccess = DirectAccess.OPEN
    """Open: every pod that can reach a replica may call it directly. GatewayOnly: a replica answers only the
    gateway, which shows a token; status.addresses then names no other way. A change rolls out new replicas."""
    request_timeout_seconds: int = Field(default=600, ge=1, le=86_400)
    """How long a request may take from its arrival at the gateway to the last byte of its answer, streamed or not: then
    an answer that has not begun is a 504, and a stream ends. The gateway obeys a change at once."""


class Availability(Struct):
    """How failed replicas are replaced."""

    replace_after_unhealthy_seconds: int = Field(default=120, ge=10, le=86_400)
    """A replica that was ready and is not ready for this long is replaced, one replica at a time."""


_POOL_WITHIN_LIMIT = (
    "self.resources.gpu.count != 0 || !has(self.runtime.kvCache.bytes) || !has(self.resources.limits) || "
    "!('memory' in self.resources.limits) || !isQuantity(self.runtime.kvCache.bytes) || "
    "!isQuantity(string(self.resources.limits['memory'])) || "
    "quantity(self.runtime.kvCache.bytes).isLessThan(quantity(string(self.resources.limits['memory'])))"
)
_HOST_MEMORY_WITHIN_LIMIT = (
    "!has(self.runtime.kvCache.hostBytes) || !has(self.resources.limits) || !('memory' in self.resources.limits) || "
    "!isQuantity(self.runtime.kvCache.hostBytes) || !isQuantity(string(self.resources.limits['memory'])) || "
    "quantity(self.runtime.kvCache.hostBytes).isLessThan(quantity(string(self.resources.limits['memory'])))"
)


class InferenceServiceSpec(Struct):
    """The desired state of the service: model, runtime, replicas."""

    model_config = cel_rules(
        Rule(
            "self.resources.gpu.count == 0 || self.runtime.tensorParallelSize == self.resources.gpu.count",
            "resources.gpu.count must be 0 (CPU) or equal runtime.tensorParallelSize",
            ".resources.gpu.count",
        ),
        Rule(
            _POOL_WITHIN_LIMIT,
            "runtime.kvCache.bytes must be below resources.limits.memory, because without a GPU the KV cache is "
            "part of the container's memory",
            ".runtime.kvCache.bytes",
        ),
        Rule(
            _HOST_MEMORY_WITHIN_LIMIT,
            "runtime.kvCache.hostBytes must be below resources.limits.memory, because it is part of the container's "
            "memory",
            ".runtime.kvCache.hostBytes",
        ),
        Rule(
            "!has(self.autoscaling) || self.autoscaling.mode == 'External' || !has(self.replicas)",
            "replicas must be absent where autoscaling decides; set one of the two, or autoscaling.mode: External",
            ".replicas",
        ),
        Rule(
            "!has(self.autoscaling) || self.autoscaling.mode != 'External' || has(self.replicas)",
            "autoscaling.mode External needs replicas: the number to start with, which kubectl scale, an HPA or KEDA "
            "then writes",
        ),
    )

    model: Model
    """The model, its served name and its credentials."""
    runtime: Runtime = Runtime()
    """How a replica runs the model."""
    resources: Resources = Resources()
    """Resources that one replica requests on its node."""
    template: Template = Template()
    """An overlay for the pods, within an allow-list."""
    replicas: int | None = Field(default=None, ge=0, le=1000)
    """A fixed number of replicas, or with autoscaling.mode External the one written through /scale. Absent: 1."""
    autoscaling: Autoscaling | None = None
    """The autoscaler's limits, metrics and behavior."""
    rollout: Rollout = Rollout()
    """How a new revision replaces the old one."""
    drain: Drain = Drain()
    """How a replica is drained: it gets no new requests, finishes those that it has, and only then stops."""
    routing: Routing = Routing()
    """How requests reach the replicas."""
    availability: Availability = Availability()
    """How failed replicas are replaced."""


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
    def fixed_replicas(self) -> int | None:
        """The number of replicas the spec fixes, 1 where it says nothing; None where the autoscaler decides."""
        if self.spec.autoscaling and self.spec.autoscaling.mode is ScalingMode.ACTIVE:
            return None
        return 1 if self.spec.replicas is None else self.spec.replicas

    @property
    def is_being_deleted(self) -> bool:
        """Whether a deletion waits for the replicas to drain."""
        return self.metadata.deletion_timestamp is not None
