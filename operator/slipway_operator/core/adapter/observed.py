"""The snapshot of one adapter and the replicas of its base, from which the core decides; frozen.

`inputs.lora_adapters` fills it from caches. Truth about a replica is its own list of adapters, never an annotation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from slipway_api.lora_adapter import AdapterPodStatus, LoRAAdapter, PlacementMode
from slipway_api.runtime_api import AdapterInfo
from slipway_operator.core.actions import Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The adapters of one replica, as it last listed them."""

    at: datetime
    boot_id: str
    restarts: int
    """Restarts of the container when it was asked: another number now means another process."""
    adapters: Mapping[str, AdapterInfo] = field(default_factory=dict)
    max_adapters: int = 0
    max_cpu_adapters: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of the last load or probe of the adapter on one replica."""

    at: datetime
    version: str
    ok: bool
    reason: str = ""
    """An AdapterReason; empty: the replica did not answer."""
    message: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPod:
    """One replica of the base that may take requests, from the adapter's point of view."""

    name: str
    uid: str
    ready: bool
    unready_since: datetime | None = None
    restarts: int = 0
    routed: bool = False
    """Whether the pod's annotation names the adapter."""
    boot_id: str = ""
    """The boot id of the newest sample of the replica's signals."""
    sampled_at: datetime | None = None
    listing: Listing | None = None
    silent_since: datetime | None = None
    """Since when the replica has not answered for its list."""
    probed: frozenset[tuple[str, str]] = frozenset()
    """(boot id, digest) that answered a probe."""
    outcome: Outcome | None = None
    route_failure: str = ""
    """Why the pod's annotation could not be written; empty: it could, or is not yet to be."""
    busy: bool = False
    """Whether a call about this adapter on this replica is under way, or its result is not in the caches yet."""
    is_listing: bool = False

    @property
    def current(self) -> Listing | None:
        """The listing, unless the process that gave it has ended."""
        listing = self.listing
        if listing is None or listing.restarts != self.restarts:
            return None
        is_newer = self.sampled_at is not None and self.sampled_at > listing.at
        if is_newer and self.boot_id and self.boot_id != listing.boot_id:
            return None
        return listing


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The facts of the InferenceService that the adapter is for."""

    name: str
    uid: str
    desired: int | None
    """Its status.desiredReplicas; None: not decided yet."""
    has_room: bool
    """Whether spec.runtime.lora makes room for adapters."""
    propagation_seconds: int = 5
    """spec.drain.endpointPropagationSeconds: after so long every router knows what the pods' annotations say."""
    is_closed: bool = False
    """Whether replicas require the serving token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """An older object of the namespace that has one of the adapter's names."""

    kind: str
    name: str
    served_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDemandAdapter:
    """An adapter of the same base in mode OnDemand; the observed one is among them."""

    name: str
    priority: int = 0
    pinned: bool = False
    waiting: int = 0
    """Requests that wait at the gateways until a replica has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterObserved:
    """One adapter, its base and the base's replicas at one moment."""

    adapter: LoRAAdapter
    base: Base | None
    rival: Rival | None = None
    pods: tuple[AdapterPod, ...] = ()
    on_demand: tuple[OnDemandAdapter, ...] = ()
    """The base's adapters in mode OnDemand; empty where the observed one has another mode."""
    entries: Mapping[str, AdapterPodStatus] | None = None
    """`AdapterPlan.entries` of the last pass; None after a takeover: those in status count."""
    counted: Mapping[str, datetime] = field(default_factory=dict)
    """By uid of a pod: the outcome that was counted last."""
    unrouted: Mapping[str, datetime] = field(default_factory=dict)
    """By uid of a pod that is to drop the adapter: since when it is not routed."""
    written_at: datetime | None = None
    """When the status last changed."""
    failures: tuple[Failure, ...] = ()
    """The writes that the API server refused in the last pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedAdapter:
    """The facts of one adapter that the plan of its base needs."""

    name: str
    uri: str
    digest: str
    version: str
    pinned: bool
    mode: PlacementMode
    priority: int = 0
    has_credentials: bool
    is_ready: bool
    is_refused: bool
    """Whether another object has its name: no replica loads it."""

    @property
    def boots(self) -> bool:
        """Whether a new replica loads it before it is ready."""
        return self.mode is PlacementMode.ALL and not self.has_credentials and not self.is_refused
