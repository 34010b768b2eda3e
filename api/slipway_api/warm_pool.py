"""The WarmPool kind: pods that are started in advance, so that a replica begins in seconds instead of minutes.

| level    | its pods have                                                   | a claim                          |
|----------|-----------------------------------------------------------------|----------------------------------|
| Booted   | the process, torch and the kernels                              | loads any model                  |
| Sleeping | the model's weights in host memory; on a GPU its memory is free | brings them back, sets the name  |
| Loaded   | the model where it computes                                     | sets the name                    |
"""

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from slipway_api.conditions import Conditions
from slipway_api.inference_service import Resources
from slipway_api.model_spec import Model
from slipway_api.names import API_VERSION
from slipway_api.overlay import Template
from slipway_api.runtime_spec import Runtime
from slipway_api.types import ObjectMeta, Rule, ServiceKey, Struct, Time, bounded_list, cel_rules


class WarmLevel(StrEnum):
    """How far the pods of a pool are started."""

    BOOTED = "Booted"
    SLEEPING = "Sleeping"
    LOADED = "Loaded"


class Autosize(Struct):
    """The number of pods follows the rate at which pods of the pool are requested."""

    model_config = cel_rules(Rule("self.min <= self.max", "min must not be above max", ".min"))

    min: int = Field(default=1, ge=0, le=1000)
    """Fewest pods."""
    max: int = Field(ge=1, le=1000)
    """Most pods."""
    cover_seconds: int = Field(default=120, ge=10, le=3600)
    """Seconds that the pods must last at the fastest pace of the last hour: the time to replace a used pod."""


class Refill(Struct):
    """How used pods are replaced."""

    max_concurrent: int = Field(default=1, ge=1, le=100)
    """Pods of the pool that start at the same time."""
    delay_seconds: int = Field(default=10, ge=0, le=3600)
    """Pause after a claim, so that the start of a pod takes no CPU and disk from a replica that loads its model."""


class WarmPoolSpec(Struct):
    """The desired state of the pool: number, shape and level of its pods."""

    model_config = cel_rules(
        Rule("has(self.size) != has(self.autosize)", "set either size or autosize"),
        Rule(
            "self.level == 'Booted' ? !has(self.models) || size(self.models) == 0"
            " : has(self.models) && size(self.models) == 1",
            "levels Sleeping and Loaded need one entry in models, and level Booted must not have one",
            ".models",
        ),
        Rule(
            "!has(self.runtime) || self.level != 'Booted'",
            "runtime is for the levels Sleeping and Loaded: at level Booted it comes with the claim",
            ".runtime",
        ),
        Rule(
            "!has(self.runtime) || !has(self.runtime.image) || self.runtime.image == ''",
            "set image of the pool, and leave runtime.image empty",
            ".runtime.image",
        ),
        Rule(
            "!has(self.runtime) || self.runtime.engine == 'slipway'",
            "the pods of a pool run Slipway's runtime: leave runtime.engine out",
            ".runtime.engine",
        ),
        Rule(
            "!has(self.runtime) || self.runtime.upgradePolicy == 'OnSpecChange'",
            "a pool has no upgradePolicy: its waiting pods follow its image immediately",
            ".runtime.upgradePolicy",
        ),
        Rule(
            "!has(self.runtime) || !has(self.resources) || !has(self.resources.gpu) || self.resources.gpu.count == 0"
            " || self.runtime.tensorParallelSize == self.resources.gpu.count",
            "runtime.tensorParallelSize must be the number of GPUs",
            ".runtime.tensorParallelSize",
        ),
    )

    size: int | None = Field(default=None, ge=0, le=1000)
    """Number of pods that wait for a claim."""
    autosize: Autosize | None = None
    """The number of pods follows the rate at which pods of the pool are requested; instead of size."""
    level: WarmLevel = WarmLevel.BOOTED
    """Booted: the image is pulled, the process runs, torch and the kernels are loaded, and no model is. Sleeping: the
    model is loaded, and its weights wait in host memory; on a GPU its memory is free, though the pod holds the GPU.
    Loaded: the model is loaded where it computes."""
    models: Annotated[tuple[Model, ...], bounded_list(at_most=1)] = ()
    """For the levels Sleeping and Loaded: the model that the pods load, as spec.model of the services that claim them.
    servedName, samplingDefaults, warmPrompts and shape have no effect here: they come with the claim."""
    runtime: Runtime | None = None
    """For the levels Sleeping and Loaded: how the pods run the model, as spec.runtime of the services that claim them.
    Absent: the defaults. startupTimeoutSeconds has no effect here."""
    image: str = Field(default="", pattern=r"^\S*$", max_length=512)
    """Runtime image; empty: the chart's. Only services whose revision has the same image can claim a pod."""
    resources: Resources = Resources()
    """Resources of one pod. Only services with the same resources can claim it."""
    template: Template = Template()
    """An overlay for the pods, as of an InferenceService. Only services with the same spec in it can claim a pod."""
    yield_: bool = Field(default=True, alias="yield")
    """Delete a waiting pod when a replica of this namespace finds no node and asks for the same kind of GPU."""
    refill: Refill = Refill()
    """How used pods are replaced."""
    recycle_after_claims: int = Field(default=20, ge=1, le=1000)
    """A replica that has been claimed so often is deleted after its drain. Others return to the pool when their service
    scales down or is deleted, and the pool has fewer pods than it should. 1: none returns."""
    recycle_after_seconds: int | None = Field(default=None, ge=60)
    """Age at which a waiting pod is replaced, one pod at a time. Absent: age does not replace pods."""
    suspend: bool = False
    """Delete the waiting pods, and start none. Claimed pods are replicas and stay."""


class ClaimSeconds(Struct):
    """Seconds from a claim until the replica is ready."""

    p50: int | None = Field(default=None, ge=0)
    """Median of the claims in uses."""
    p95: int | None = Field(default=None, ge=0)
    """95th percentile of the claims in uses."""


class PoolUse(Struct):
    """One replica that a service wanted from the pool."""

    time: Time
    """When it was wanted."""
    service: str = Field(max_length=64)
    """The InferenceService."""
    pod: str = Field(max_length=253)
    """The pod that became the replica."""
    hit: bool
    """True: a pod of the pool was claimed. False: none was fit, and the replica was started cold."""
    seconds: int | None = Field(default=None, ge=0)
    """Seconds until the replica was ready; absent while it is not."""


class WarmPoolStatus(Struct):
    """The state of the pool that the operator last observed."""

    observed_generation: int | None = Field(default=None, ge=0)
    """The generation of the spec that this status was made from."""
    conditions: Conditions = ()
    """Ready is the summary; Reconciling, Stalled and Exhausted are present only when True."""
    size: int | None = Field(default=None, ge=0)
    """Number of pods that should wait: spec.size, or what autosize asks for."""
    ready: int | None = Field(default=None, ge=0)
    """Pods that can be claimed."""
    warming: int | None = Field(default=None, ge=0)
    """Pods that start."""
    claimed: int | None = Field(default=None, ge=0)
    """Pods of the pool that are replicas of services now."""
    hits: int | None = Field(default=None, ge=0)
    """Replicas that were claimed from the pool."""
    misses: int | None = Field(default=None, ge=0)
    """Replicas that were wanted from the pool and started cold."""
    hit_percent: int | None = Field(default=None, ge=0, le=100)
    """Share of hits."""
    claim_seconds: ClaimSeconds | None = None
    """Seconds from a claim until the replica is ready."""
    failures: int | None = Field(default=None, ge=0)
    """Pods in a row that ended before they could be claimed; they set the backoff."""
    not_before: Time | None = None
    """No new pod before this moment."""
    yielded_to: Annotated[tuple[Annotated[str, Field(max_length=253)], ...], bounded_list(at_most=64)] = ()
    """Replicas that find no node, and for which waiting pods were deleted: once for each of them."""
    uses: Annotated[tuple[PoolUse, ...], bounded_list(at_most=32)] = ()
    """The last replicas that were wanted from the pool, newest first."""


class WarmPool(Struct):
    """Pods that wait with Slipway's runtime started, and become replicas of services of the same namespace."""

    model_config = cel_rules(
        Rule(
            "size(self.metadata.name) <= 40",
            "metadata.name may have at most 40 characters, so that the names of its pods fit",
            ".metadata.name",
        ),
        Rule(
            "self.metadata.name.matches('^[a-z]([a-z0-9-]*[a-z0-9])?$')",
            "metadata.name must be lower-case letters, digits and '-', starting with a letter",
            ".metadata.name",
        ),
    )

    KIND: ClassVar[str] = "WarmPool"
    PLURAL: ClassVar[str] = "warmpools"

    api_version: str = API_VERSION
    kind: str = "WarmPool"
    metadata: ObjectMeta
    spec: WarmPoolSpec
    """The desired state of the pool: number, shape and level of its pods."""
    status: WarmPoolStatus = WarmPoolStatus()
    """The state of the pool that the operator last observed."""

    @property
    def key(self) -> ServiceKey:
        """Namespace and name."""
        return ServiceKey(self.metadata.namespace, self.metadata.name)

    @property
    def is_being_deleted(self) -> bool:
        """Whether the garbage collector is about to delete the waiting pods."""
        return self.metadata.deletion_timestamp is not None
