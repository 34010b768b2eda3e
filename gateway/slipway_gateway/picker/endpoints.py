"""The frozen structs of routing: services, endpoints and routes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

from slipway_api.inference_service import RoutingStrategy

STATIC_REVISION: Final = "static"  # of a replica from the command line, whose revision nobody knows


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One replica that may be sent requests: its pod is Ready, serving and not being deleted."""

    name: str  # <namespace>/<pod>
    service: str  # <namespace>/<name>
    revision: str
    url: str  # http://10.0.0.7:8000, or https://
    owner_uid: str = ""  # of the InferenceService that controls the pod; an impostor's pod has another
    served_name: str = ""  # the served name of its runtime; empty: the service's served name
    token_digests: tuple[str, ...] = ()  # of the serving tokens that it accepts; empty: it needs none
    adapters: frozenset[str] = frozenset()  # names of the adapters that it has loaded
    node: str = ""  # of its pod; empty: unknown
    engine: str = ""  # such as vllm; empty: our own runtime, or unknown
    tls_name: str = ""  # the name in the replica's certificate; empty: it was created to speak plain text


@dataclass(frozen=True, slots=True)
class WaitLimits:
    """How many requests of one service this gateway may hold while no replica is ready, and for how long."""

    requests: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """The latency limits of `spec.slo`; None: no such limit."""

    ttft_seconds: float | None = None
    itl_seconds: float | None = None


NO_LIMITS: Final = LatencyLimits()


@dataclass(frozen=True, slots=True)
class Service:
    """The fields of an InferenceService that the gateway uses."""

    key: str  # <namespace>/<name>
    served_name: str  # the `model` that clients send
    uid: str = ""
    created: datetime | None = None
    weights: Mapping[str, int] = field(default_factory=dict)  # share of each revision; empty: no split is known
    withheld: frozenset[str] = frozenset()  # revisions that answer only those that pin them: rolled back, or not tested
    mirrors: Mapping[str, int] = field(default_factory=dict)  # percent of requests that are copied to a revision
    desired_replicas: int = 0  # as the operator last decided
    activation: WaitLimits | None = None  # while it is scaled to zero; None: demand does not bring its replicas back
    is_suspended: bool = False
    stalled: str = ""  # the reason of Stalled that keeps every replica from starting; empty: a replica may come
    max_num_seqs: int = 64  # requests that one replica runs at once
    strategy: RoutingStrategy = RoutingStrategy.PREFIX_CACHE
    request_seconds: float | None = None  # for a whole request; None: the gateway's own setting
    fallback: str = ""  # <namespace>/<name> of the service that answers when this one cannot; empty: none
    fallback_seconds: float = 3.0  # after which it is asked
    hedged_prompt_tokens: int = 0  # streamed requests with prompts up to so long are hedged; 0: none
    handover: bool = True  # streams of a lost replica continue on another one
    latency_limits: LatencyLimits = NO_LIMITS  # goodput counts the requests within them


@dataclass(frozen=True, slots=True)
class Adapter:
    """The fields of a LoRAAdapter that the gateway uses."""

    key: str  # <namespace>/<name>
    name: str  # the `model` that clients send, and the name of it in the replicas
    service: str  # the key of its base
    alias: str = ""  # a name that several adapters share, by weight
    alias_weight: int = 1
    created: datetime | None = None
    on_demand: bool = False  # a request loads it: it may wait until a replica has it
    stalled: str = ""  # the reason of Stalled: no replica loads it until a person acts; empty: one may

    @property
    def namespace(self) -> str:
        """Its namespace."""
        return self.key.partition("/")[0]

    @property
    def names(self) -> tuple[str, str]:
        """Its name, and its full name."""
        return self.name, f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Route:
    """One service, or one adapter of it, with the endpoints that can answer now."""

    service: Service
    endpoints: tuple[Endpoint, ...] = ()
    reserved: tuple[Endpoint, ...] = ()  # ready, for copies of requests and for requests that pin their revision
    adapter: Adapter | None = None
    has_base: bool = False  # with an adapter: whether the base has endpoints, with the adapter or without it

    @property
    def name(self) -> str:
        """What is routed, for messages."""
        return self.adapter.name if self.adapter is not None else self.service.served_name

    @property
    def ready(self) -> tuple[Endpoint, ...]:
        """All its ready endpoints, the reserved ones too."""
        return (*self.endpoints, *self.reserved)

    @property
    def revisions(self) -> set[str]:
        """Every revision that the service's status or one of its endpoints names."""
        return {*self.service.weights, *(endpoint.revision for endpoint in self.ready)}

    def for_pin(self, revision: str) -> "Route":
        """The route of a request that insists on `revision`; empty: of one that does not insist."""
        return replace(self, endpoints=self.ready, reserved=()) if revision and self.reserved else self
