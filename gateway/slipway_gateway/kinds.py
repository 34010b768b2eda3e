"""The fields of Slipway's kinds that the gateway reads: slim mirrors, without their other fields and their checks."""

from typing import Any

from pydantic import BaseModel

from slipway_api import autoscaling as kinds
from slipway_api import lora_adapter
from slipway_api.inference_service import Drain, Fallback, Hedging, RoutingStrategy
from slipway_api.rollout_spec import Rollout
from slipway_api.runtime_spec import Runtime
from slipway_gateway.picker.endpoints import LatencyLimits
from slipway_kube.objects import Object, Slim


def default_of(kind: type[BaseModel], field: str) -> Any:
    """The default of a field of a kind. The mirrors below have few of the fields, and none of the defaults again."""
    return kind.model_fields[field].get_default(call_default_factory=True)


class RevisionStatus(Slim, frozen=True, gc=False):
    """One revision's share of the traffic."""

    hash: str = ""
    weight: int = 0
    mirror_percent: int = 0


class CanaryStatus(Slim, frozen=True, gc=False):
    """`status.canary`: whether the gates are passed; the rest is for the console."""

    gate: str = ""
    step: int = 0
    weight: int = 0
    failures: int = 0
    metrics: tuple[dict[str, Any], ...] = ()


class ConditionFacts(Slim, frozen=True, gc=False):
    """One condition of an object; message and time are for the console."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: str = ""


class Activation(Slim, frozen=True, gc=False):
    """`spec.autoscaling.scaleToZero.activation`, with the defaults of the kind."""

    max_queued_requests: int = default_of(kinds.Activation, "max_queued_requests")
    max_queued_bytes: str | int = default_of(kinds.Activation, "max_queued_bytes")
    max_wait_seconds: int = default_of(kinds.Activation, "max_wait_seconds")


class ScaleToZero(Slim, frozen=True, gc=False):
    """`spec.autoscaling.scaleToZero`."""

    activation: Activation = Activation()


class Autoscaling(Slim, frozen=True, gc=False):
    """`spec.autoscaling`."""

    mode: str = default_of(kinds.Autoscaling, "mode")
    scale_to_zero: ScaleToZero | None = None


class RuntimeSpec(Slim, frozen=True, gc=False):
    """`spec.runtime`."""

    max_num_seqs: int = default_of(Runtime, "max_num_seqs")


class RolloutSpec(Slim, frozen=True, gc=False):
    """`spec.rollout`, as far as it says which revisions the operator has to admit to traffic."""

    strategy: str = default_of(Rollout, "strategy")
    gates: dict[str, Any] | None = None


class DrainSpec(Slim, frozen=True, gc=False):
    """`spec.drain`."""

    handover: bool = default_of(Drain, "handover")


class FallbackSpec(Slim, frozen=True, gc=False):
    """`spec.routing.fallback`."""

    service: str = ""
    after_seconds: int = default_of(Fallback, "after_seconds")


class HedgingSpec(Slim, frozen=True, gc=False):
    """`spec.routing.hedging`, with the default of the kind."""

    max_prompt_tokens: int = default_of(Hedging, "max_prompt_tokens")


class RoutingSpec(Slim, frozen=True, gc=False):
    """How a service wants its requests routed; text, because a newer API may know more strategies than this gateway."""

    strategy: str = ""
    request_timeout_seconds: int | None = None
    fallback: FallbackSpec = FallbackSpec()
    hedging: HedgingSpec | None = None

    @property
    def known_strategy(self) -> RoutingStrategy:
        """The strategy, or the default one."""
        try:
            return RoutingStrategy(self.strategy)
        except ValueError:
            return RoutingStrategy.PREFIX_CACHE


class SLOSpec(Slim, frozen=True, gc=False):
    """`spec.slo`; decimals are text."""

    ttft_p95_seconds: str = ""
    itl_p95_seconds: str = ""

    @property
    def latency_limits(self) -> LatencyLimits:
        """The limits as numbers; text that is none limits nothing."""
        return LatencyLimits(_seconds_of(self.ttft_p95_seconds), _seconds_of(self.itl_p95_seconds))


def _seconds_of(text: str) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


class Blocks(Slim, frozen=True, gc=False):
    """The blocks of a spec that a ServiceTemplate may supply, as far as routing needs them."""

    drain: DrainSpec | None = None
    autoscaling: Autoscaling | None = None
    slo: SLOSpec | None = None
    rollout: RolloutSpec | None = None


class ServiceSpec(Blocks, frozen=True, gc=False):
    """The fields of the spec that say how requests are routed, and which may wait for a replica."""

    suspend: bool = False
    runtime: RuntimeSpec = RuntimeSpec()
    routing: RoutingSpec = RoutingSpec()
    base_refs: tuple[Slim, ...] = ()


class TemplateStatus(Slim, frozen=True, gc=False):
    """A ServiceTemplate and the blocks that the service inherits from it, for the console."""

    name: str = ""
    blocks: tuple[str, ...] = ()


class ServiceStatus(Slim, frozen=True, gc=False):
    """The operator's status of a service."""

    conditions: tuple[ConditionFacts, ...] = ()
    served_name: str = ""
    desired_replicas: int = 0
    failed_revision: str = ""
    current_revision: str = ""
    update_revision: str = ""
    canary: CanaryStatus = CanaryStatus()
    autoscaling: dict[str, Any] | None = None  # for the console
    observed_generation: int = 0
    templates: tuple[TemplateStatus, ...] = ()
    inherited: Blocks | None = None  # what the operator last applied of the templates of spec.baseRefs
    revisions: tuple[RevisionStatus, ...] = ()


class InferenceService(Object, frozen=True, gc=False):
    """The few fields of an InferenceService that routing needs."""

    spec: ServiceSpec = ServiceSpec()
    status: ServiceStatus = ServiceStatus()

    @property
    def inherited(self) -> Blocks:
        """The inherited blocks as the operator last applied them; none without `spec.baseRefs`."""
        return (self.status.inherited if self.spec.base_refs else None) or Blocks()

    @property
    def drain(self) -> DrainSpec:
        """The service's own block, else the inherited one, else the defaults."""
        return self.spec.drain or self.inherited.drain or DrainSpec()

    @property
    def autoscaling(self) -> Autoscaling | None:
        """Likewise; None: none has it."""
        return self.spec.autoscaling or self.inherited.autoscaling

    @property
    def slo(self) -> SLOSpec:
        """Likewise."""
        return self.spec.slo or self.inherited.slo or SLOSpec()

    @property
    def rollout(self) -> RolloutSpec:
        """Likewise. While the operator has not seen a changed spec with templates, it may ask for a canary."""
        if (known := self.spec.rollout or self.inherited.rollout) is not None:
            return known
        is_seen = self.status.observed_generation == self.metadata.generation
        return RolloutSpec() if is_seen or not self.spec.base_refs else RolloutSpec(strategy="Canary")


class BaseRef(Slim, frozen=True, gc=False):
    """`spec.baseRef` of a LoRAAdapter."""

    name: str = ""


class Alias(Slim, frozen=True, gc=False):
    """`spec.alias` of a LoRAAdapter."""

    name: str = ""
    weight: int = 1  # of an alias that names none


class Placement(Slim, frozen=True, gc=False):
    """`spec.placement` of a LoRAAdapter."""

    mode: str = default_of(lora_adapter.Placement, "mode")


class AdapterSpec(Slim, frozen=True, gc=False):
    """The names of an adapter."""

    base_ref: BaseRef = BaseRef()
    adapter_name: str = ""
    alias: Alias | None = None
    placement: Placement | None = None


class AdapterStatus(Slim, frozen=True, gc=False):
    """The operator's status of an adapter."""

    conditions: tuple[ConditionFacts, ...] = ()


class LoRAAdapter(Object, frozen=True, gc=False):
    """The few fields of a LoRAAdapter that routing needs."""

    spec: AdapterSpec = AdapterSpec()
    status: AdapterStatus = AdapterStatus()
