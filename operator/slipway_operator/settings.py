"""The operator's settings, read from environment variables once, in main, then frozen."""

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from slipway_api import trace_settings
from slipway_api.inference_service import DirectAccess
from slipway_api.types import BYTES_PATTERN
from slipway_operator.core.installation import Defaults, Network, NodeCache, PlacementDefaults, PodUser, TraceDefaults

ReplicaAccess = Literal["direct", "proxy"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]


class OperatorSettings(BaseSettings):
    """Everything that differs from one installation to the next; an unset or empty variable means the default."""

    model_config = SettingsConfigDict(frozen=True, env_ignore_empty=True, populate_by_name=True, extra="ignore")

    namespace: str = Field("slipway-system", validation_alias="SLIPWAY_NAMESPACE")
    """The release namespace, with the Lease and the gateway."""
    lease_name: str = Field("slipway-operator", validation_alias="SLIPWAY_LEASE_NAME")
    """The Lease of this installation's leader; a second installation in the same namespace needs its own."""
    identity: str = Field("slipway-operator", validation_alias="POD_NAME")
    """This replica's name in the Lease: the pod's own name."""
    pod_uid: str = Field("", validation_alias="POD_UID")
    """The uid of this replica's pod: with it, a restarted container takes over the Lease of its predecessor."""
    runtime_image: str = Field("slipway/runtime:0.1.0", validation_alias="SLIPWAY_RUNTIME_IMAGE")
    """Image of a revision whose spec names none; frozen into status when the revision is first seen."""
    agent_image: str = Field("", validation_alias="SLIPWAY_AGENT_IMAGE")
    """Image of slipway-agent, which stands beside other engines than our runtime; frozen with the revision."""
    tenants: bool = Field(False, validation_alias="SLIPWAY_TENANTS")
    """Whether the gateway has tenants: then a name may mean another service to each of them."""
    gateway_url: str = Field(
        "http://slipway-gateway.slipway-system.svc.cluster.local:8000", validation_alias="SLIPWAY_GATEWAY_URL"
    )
    cluster_domain: str = Field("cluster.local", validation_alias="SLIPWAY_CLUSTER_DOMAIN")
    """The DNS domain of the cluster, for the addresses in status."""
    master_directory: Path = Field(Path("/etc/slipway/admin"), validation_alias="SLIPWAY_MASTER_DIR")
    """Holds `current` and, during a rotation, `previous`: the masters of the pods' admin tokens."""
    gateway_key_directory: Path = Field(Path("/etc/slipway/gateway"), validation_alias="SLIPWAY_GATEWAY_KEY_DIR")
    """Holds the gateway's key likewise: the serving tokens of services that only a gateway may call come from it."""
    gateway_selector: str = Field(
        "app.kubernetes.io/part-of=slipway,app.kubernetes.io/component=gateway",
        validation_alias="SLIPWAY_GATEWAY_SELECTOR",
    )
    """Labels of the gateways' pods in the release namespace; they are asked for demand and outcomes."""
    internal_tls: bool = Field(False, validation_alias="SLIPWAY_INTERNAL_TLS")
    """Whether replicas and the gateways' admin ports speak TLS, with certificates that the operator issues."""
    installation: str = Field("slipway", validation_alias="SLIPWAY_INSTALLATION")
    """The value `name` of the chart, with which the names of the installation's own certificates begin."""
    network_policy: bool = Field(True, validation_alias="SLIPWAY_NETWORK_POLICY")
    """Whether each service gets a NetworkPolicy for its replicas."""
    direct_access: DirectAccess = Field(DirectAccess.OPEN, validation_alias="SLIPWAY_DIRECT_ACCESS")
    """spec.routing.directAccess of new services that name none. GatewayOnly: tenants are configured."""
    allowed_service_accounts: Annotated[tuple[str, ...], NoDecode] = Field(
        (), validation_alias="SLIPWAY_ALLOWED_SERVICE_ACCOUNTS"
    )
    """ServiceAccounts that a spec may name; with any other, no pod is created."""
    allowed_images: Annotated[tuple[str, ...], NoDecode] = Field((), validation_alias="SLIPWAY_ALLOWED_IMAGES")
    """Registries or repositories of the images that a spec may name; empty: all."""
    allowed_priority_classes: Annotated[tuple[str, ...], NoDecode] = Field(
        (), validation_alias="SLIPWAY_ALLOWED_PRIORITY_CLASSES"
    )
    """PriorityClasses that a spec may name; empty: all but Kubernetes' own, system-*."""
    client_namespaces: Annotated[tuple[str, ...], NoDecode] = Field((), validation_alias="SLIPWAY_CLIENT_NAMESPACES")
    """Namespaces whose pods may reach the serving port of services that otherwise only a gateway may call."""
    metrics_namespaces: Annotated[tuple[str, ...], NoDecode] = Field((), validation_alias="SLIPWAY_METRICS_NAMESPACES")
    """Namespaces whose pods may scrape the admin port."""
    watch_namespaces: Annotated[tuple[str, ...], NoDecode] = Field((), validation_alias="SLIPWAY_WATCH_NAMESPACES")
    """Empty: all namespaces."""
    prometheus_url: str = Field("", validation_alias="SLIPWAY_PROMETHEUS_URL")
    """A Prometheus that scrapes the replicas; empty: the operator asks them itself, as it does where this one fails."""
    pod_user: str = Field(
        "65532:65532", pattern=r"^([1-9][0-9]{0,9}:[0-9]{1,10}|platform)$", validation_alias="SLIPWAY_POD_USER"
    )
    """User and group of the replicas' pods; `platform`: neither is set, since the platform assigns them (OpenShift)."""
    placement: Annotated[PlacementDefaults, NoDecode] = Field(
        PlacementDefaults(), validation_alias="SLIPWAY_REPLICA_PLACEMENT"
    )
    """JSON with image_pull_secrets, node_selector and tolerations of all pods of services and pools."""
    otlp_endpoint: str = Field("", pattern=r"^(https?://.+)?$", validation_alias="SLIPWAY_OTLP_ENDPOINT")
    """A collector to which replicas export the spans of requests, over OTLP (HTTP); empty: they export none."""
    trace_ratio: float = Field(trace_settings.DEFAULT_RATIO, ge=0, le=1, validation_alias=trace_settings.ENV_RATIO)
    """Share of the traces that are neither sampled, failed nor slow; the gateway's, so that traces are whole."""
    trace_slow_seconds: float = Field(
        trace_settings.DEFAULT_SLOW_SECONDS, gt=0, validation_alias=trace_settings.ENV_SLOW_SECONDS
    )
    replica_access: ReplicaAccess = Field("direct", validation_alias="SLIPWAY_REPLICA_ACCESS")
    """`proxy` reaches pods through the API server: for an operator that runs outside the cluster."""
    admin_port: int = Field(8080, ge=0, le=65535, validation_alias="SLIPWAY_ADMIN_PORT")
    """The operator's own /livez, /readyz and /metrics."""
    model_cache_path: str = Field("", pattern=r"^(/[^:]*)?$", validation_alias="SLIPWAY_MODEL_CACHE_PATH")
    """The folder of each node for model.cache.policy Node; empty: the policy is not permitted."""
    model_cache_limit: str = Field("", pattern=BYTES_PATTERN, validation_alias="SLIPWAY_MODEL_CACHE_LIMIT")
    """How much of each namespace's models a node keeps there."""
    hub_endpoints: Annotated[tuple[str, ...], NoDecode] = Field(
        ("https://huggingface.co",), validation_alias="SLIPWAY_HUB_ENDPOINTS"
    )
    """Hubs that the operator may ask for the sizes of a model; empty elements do not count: `off` is none."""
    log_level: LogLevel = Field("INFO", validation_alias="SLIPWAY_LOG_LEVEL")

    @field_validator("gateway_url", "prometheus_url")
    @classmethod
    def _without_slash(cls, url: str) -> str:
        return url.rstrip("/")

    @field_validator("log_level", mode="before")
    @classmethod
    def _upper(cls, level: object) -> object:
        return level.upper() if isinstance(level, str) else level

    @field_validator(
        *("watch_namespaces", "client_namespaces", "metrics_namespaces", "hub_endpoints", "allowed_service_accounts"),
        *("allowed_images", "allowed_priority_classes"),
        mode="before",
    )
    @classmethod
    def _split(cls, text: object) -> object:
        return tuple(name for part in text.split(",") if (name := part.strip())) if isinstance(text, str) else text

    @field_validator("placement", mode="before")
    @classmethod
    def _parse(cls, text: object) -> object:
        if not isinstance(text, str):
            return text
        value = json.loads(text)  # its error is a ValueError, with the place of the mistake
        known = set(PlacementDefaults.__dataclass_fields__)
        if not isinstance(value, dict) or not set(value) <= known:
            raise ValueError(f"a JSON object with {', '.join(sorted(known))} is expected")
        return value


def explain(error: ValidationError) -> str:
    """List all invalid settings at once, each with its variable, its value and the allowed values."""
    return "; ".join(
        f"{'.'.join(map(str, one['loc']))} is {one['input']!r}: {one['msg'][:1].lower()}{one['msg'][1:]}"
        for one in error.errors(include_url=False)
    )


def installation_defaults(settings: OperatorSettings) -> Defaults:
    """The values of this installation that decisions about services start from."""
    return Defaults(
        runtime_image=settings.runtime_image,
        agent_image=settings.agent_image,
        gateway_url=settings.gateway_url,
        has_tenants=settings.tenants,
        cluster_domain=settings.cluster_domain,
        network=_network(settings),
        node_cache=_node_cache(settings),
        pod_user=_pod_user(settings),
        placement=settings.placement,
        tracing=_tracing(settings),
        direct_access=settings.direct_access,
        internal_tls=settings.internal_tls,
        service_accounts=settings.allowed_service_accounts,
        allowed_images=settings.allowed_images,
        allowed_priority_classes=settings.allowed_priority_classes,
    )


def _pod_user(settings: OperatorSettings) -> PodUser | None:
    """User and group of the replicas' pods; None: the platform assigns them."""
    if settings.pod_user == "platform":
        return None
    user, _, group = settings.pod_user.partition(":")
    return PodUser(int(user), int(group))


def _tracing(settings: OperatorSettings) -> TraceDefaults | None:
    """Where replicas export spans to; None: nowhere."""
    if not settings.otlp_endpoint:
        return None
    return TraceDefaults(
        endpoint=settings.otlp_endpoint, ratio=settings.trace_ratio, slow_seconds=settings.trace_slow_seconds
    )


def _network(settings: OperatorSettings) -> Network | None:
    """The pods that a NetworkPolicy admits to the replicas; None: no policy is created."""
    if not settings.network_policy:
        return None
    return Network(
        release_namespace=settings.namespace,
        client_namespaces=settings.client_namespaces,
        metrics_namespaces=settings.metrics_namespaces,
    )


def _node_cache(settings: OperatorSettings) -> NodeCache | None:
    """The folder of the nodes in which models are kept; None: there is none."""
    if not settings.model_cache_path:
        return None
    return NodeCache(path=settings.model_cache_path, limit=settings.model_cache_limit)
