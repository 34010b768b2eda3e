"""What the operator process may be told from outside: read from the environment once, in main, then frozen."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, cast, get_args

ReplicaAccess = Literal["direct", "proxy"]


class InvalidSettings(ValueError):  # noqa: N818  reads as a fact where it is raised
    """An environment variable holds what it cannot mean; the message names it and what it may hold."""


@dataclass(frozen=True, kw_only=True)
class OperatorSettings:
    """Everything that differs from one installation to the next."""

    namespace: str = "slipway-system"
    """The release namespace: the Lease lives here, the gateway too."""
    identity: str = "slipway-operator"
    """This replica's name in the Lease: the pod's own name."""
    runtime_image: str = "slipway/runtime:0.1.0"
    """Image of a revision whose spec names none; frozen into status when the revision is first seen."""
    gateway_url: str = "http://slipway-gateway.slipway-system.svc.cluster.local:8000"
    master_directory: Path = Path("/etc/slipway/admin")
    """Holds `current` and, during a rotation, `previous`: the masters of the pods' admin tokens."""
    gateway_key_directory: Path = Path("/etc/slipway/gateway")
    """Holds the gateway's key likewise: the serving tokens of services that only a gateway may call come from it."""
    network_policy: bool = True
    """Whether each service gets a NetworkPolicy in front of its replicas."""
    client_namespaces: tuple[str, ...] = ()
    """Namespaces whose pods may reach the serving port of services that otherwise only a gateway may call."""
    metrics_namespaces: tuple[str, ...] = ()
    """Namespaces whose pods may scrape the admin port."""
    watch_namespaces: tuple[str, ...] = ()
    """Empty: all namespaces."""
    replica_access: ReplicaAccess = "direct"
    """`proxy` dials pods through the API server: for an operator that runs outside the cluster."""
    admin_port: int = 8080
    """The operator's own /livez, /readyz and /metrics."""
    log_level: str = "INFO"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """The settings that `environment` asks for; an unset or empty variable means the default."""

        def text(variable: str, default: str) -> str:
            return environment.get(variable, "").strip() or default

        def words(variable: str) -> tuple[str, ...]:
            return tuple(word for part in environment.get(variable, "").split(",") if (word := part.strip()))

        access = text("SLIPWAY_REPLICA_ACCESS", cls.replica_access)
        if access not in get_args(ReplicaAccess):
            raise InvalidSettings(f"SLIPWAY_REPLICA_ACCESS is {access!r}: it may be direct or proxy")
        policy = text("SLIPWAY_NETWORK_POLICY", "on")
        if policy not in {"on", "off"}:
            raise InvalidSettings(f"SLIPWAY_NETWORK_POLICY is {policy!r}: it may be on or off")
        port = text("SLIPWAY_ADMIN_PORT", str(cls.admin_port))
        if not port.isdecimal() or not 0 <= int(port) <= 65535:
            raise InvalidSettings(f"SLIPWAY_ADMIN_PORT is {port!r}: it must be a port number")
        level = text("SLIPWAY_LOG_LEVEL", cls.log_level).upper()
        if level not in {"DEBUG", "INFO", "WARNING", "ERROR"}:
            raise InvalidSettings(f"SLIPWAY_LOG_LEVEL is {level!r}: it may be DEBUG, INFO, WARNING or ERROR")
        return cls(
            namespace=text("SLIPWAY_NAMESPACE", cls.namespace),
            identity=text("POD_NAME", cls.identity),
            runtime_image=text("SLIPWAY_RUNTIME_IMAGE", cls.runtime_image),
            gateway_url=text("SLIPWAY_GATEWAY_URL", cls.gateway_url).rstrip("/"),
            master_directory=Path(text("SLIPWAY_MASTER_DIR", str(cls.master_directory))),
            gateway_key_directory=Path(text("SLIPWAY_GATEWAY_KEY_DIR", str(cls.gateway_key_directory))),
            network_policy=policy == "on",
            client_namespaces=words("SLIPWAY_CLIENT_NAMESPACES"),
            metrics_namespaces=words("SLIPWAY_METRICS_NAMESPACES"),
            watch_namespaces=words("SLIPWAY_WATCH_NAMESPACES"),
            replica_access=cast(ReplicaAccess, access),
            admin_port=int(port),
            log_level=level,
        )
