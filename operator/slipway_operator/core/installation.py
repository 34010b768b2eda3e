"""The settings of the installation that decisions depend on: defaults of fields, allow-lists, networks; frozen."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from slipway_api import trace_settings
from slipway_api.inference_service import DirectAccess


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The namespaces from which the ports of replicas may be reached, as set by the installation."""

    release_namespace: str
    """Namespace of operator and gateway."""
    client_namespaces: tuple[str, ...] = ()
    """May reach the serving port even of services that otherwise only the gateway may call."""
    metrics_namespaces: tuple[str, ...] = ()
    """May scrape the admin port."""


class PodUser(NamedTuple):
    """The numeric user and group of the pods; the group also owns their volumes."""

    user: int
    group: int


NONROOT: Final = PodUser(65532, 65532)  # as in distroless images


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCache:
    """The folder in which every node keeps models, as set by the installation."""

    path: str
    limit: str = ""
    """How much of each namespace's models a node keeps, such as 500Gi; empty: what the disk holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementDefaults:
    """Pull secrets and placement of every pod of this installation's services and pools; an entry of the spec wins."""

    image_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets in the namespace of the pod."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDefaults:
    """Where the replicas of our runtime export the spans of requests to, and which; as the gateway's settings."""

    endpoint: str
    """Base URL of a collector that takes OTLP over HTTP."""
    ratio: float = trace_settings.DEFAULT_RATIO
    slow_seconds: float = trace_settings.DEFAULT_SLOW_SECONDS

    def environment(self) -> list[dict[str, Any]]:
        """The variables of a replica's container."""
        values = {
            trace_settings.ENV_ENDPOINT: self.endpoint,
            trace_settings.ENV_RATIO: f"{self.ratio:g}",
            trace_settings.ENV_SLOW_SECONDS: f"{self.slow_seconds:g}",
        }
        return [{"name": name, "value": value} for name, value in values.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Defaults of the installation for fields that the spec leaves empty."""

    runtime_image: str
    gateway_url: str  # without /v1
    network: Network | None = None  # None: no NetworkPolicy is made
    pod_user: PodUser | None = NONROOT  # None: the platform assigns it
    cluster_domain: str = "cluster.local"
    placement: PlacementDefaults = field(default_factory=PlacementDefaults)
    tracing: TraceDefaults | None = None  # None: replicas export no spans
    node_cache: NodeCache | None = None  # None: model.cache.policy Node is not permitted
    service_accounts: tuple[str, ...] = ()  # ServiceAccounts that a spec may name
    allowed_images: tuple[str, ...] = ()  # registries or repositories of images that a spec may name; empty: all
    allowed_priority_classes: tuple[str, ...] = ()  # PriorityClasses that a spec may name; empty: all but system-*
    direct_access: DirectAccess = DirectAccess.OPEN  # of a new service; GatewayOnly: this gateway has tenants
    agent_image: str = ""  # of slipway-agent, which stands beside foreign engines
    internal_tls: bool = False  # new pods serve TLS, with the certificate of their namespace
    has_tenants: bool = False  # the gateway has API keys, so a name may mean another service to each tenant
