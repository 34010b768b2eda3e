"""Everything that can be set about one gateway, read once at the start."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from slipway_api.names import ADMIN_PORT, SERVING_PORT
from slipway_gateway.upstream import UpstreamTimeouts

N = TypeVar("N", int, float)


class SettingsError(Exception):
    """A setting that makes no sense; the message says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """One gateway's settings; `static` set means: without Kubernetes."""

    static: tuple[tuple[str, str], ...] = ()  # (model, base URL) pairs
    host: str = ""  # empty: every address in the cluster, only this machine's own with `static`
    port: int = SERVING_PORT
    admin_port: int = ADMIN_PORT
    namespace: str = "slipway-system"
    pod_name: str = ""
    key_directory: Path = Path("/etc/slipway/gateway")  # the gateway's own key: current, and previous while rotating
    watch_namespaces: tuple[str, ...] = ()  # empty: all
    log_level: str = "INFO"
    propagation_seconds: float = 5.0  # after SIGTERM, until clients and load balancers know that we go
    drain_seconds: float = 300.0  # after that, for streams to end by themselves
    most_body_bytes: int = 16 << 20
    most_bodies_bytes: int = 256 << 20
    timeouts: UpstreamTimeouts = field(default_factory=UpstreamTimeouts)

    @property
    def bind(self) -> str:
        """The address to listen on."""
        return self.host or ("127.0.0.1" if self.static else "0.0.0.0")


def read_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> GatewaySettings:
    """Settings from the command line and, where it is silent, from the environment."""
    parser = argparse.ArgumentParser(
        prog="slipway-gateway", description="One OpenAI endpoint in front of all InferenceServices."
    )
    parser.add_argument(
        "--static",
        metavar="MODEL=URL[,…]",
        help="serve these models from these URLs, without Kubernetes; a model named twice has two replicas",
    )
    parser.add_argument("--host", help="address to listen on; default: all, or 127.0.0.1 with --static")
    parser.add_argument("--port", type=int, help=f"for clients; default {SERVING_PORT}")
    parser.add_argument("--admin-port", type=int, help=f"for probes and metrics; default {ADMIN_PORT}")
    options = parser.parse_args(arguments)
    env = _Environment(environment)
    defaults = GatewaySettings()
    return GatewaySettings(
        static=_static(options.static) if options.static else (),
        host=options.host or env.text("SLIPWAY_HOST", defaults.host),
        port=env.number("SLIPWAY_PORT", defaults.port) if options.port is None else options.port,
        admin_port=(
            env.number("SLIPWAY_ADMIN_PORT", defaults.admin_port) if options.admin_port is None else options.admin_port
        ),
        namespace=env.text("SLIPWAY_NAMESPACE", defaults.namespace),
        pod_name=env.text("POD_NAME", defaults.pod_name),
        key_directory=Path(env.text("SLIPWAY_GATEWAY_KEY_DIR", str(defaults.key_directory))),
        watch_namespaces=env.list("SLIPWAY_WATCH_NAMESPACES"),
        log_level=env.text("SLIPWAY_LOG_LEVEL", defaults.log_level).upper(),
        # On a laptop there is no load balancer to wait for.
        propagation_seconds=env.number(
            "SLIPWAY_PROPAGATION_SECONDS", 0.0 if options.static else defaults.propagation_seconds
        ),
        drain_seconds=env.number("SLIPWAY_DRAIN_SECONDS", defaults.drain_seconds),
    )


class _Environment:
    """Environment variables with defaults; an empty one counts as absent."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables

    def text(self, name: str, default: str) -> str:
        return self._variables.get(name, "").strip() or default

    def list(self, name: str) -> tuple[str, ...]:
        return tuple(part.strip() for part in self.text(name, "").split(",") if part.strip())

    def number(self, name: str, default: N) -> N:
        text = self.text(name, "")
        try:
            value = type(default)(text) if text else default
        except ValueError as error:
            raise SettingsError(f"{name} is a number, not {text!r}") from error
        if value < 0:
            raise SettingsError(f"{name} is not negative, but {text} is")
        return value


def _static(text: str) -> tuple[tuple[str, str], ...]:
    pairs = []
    for part in text.split(","):
        model, equals, url = part.strip().partition("=")
        if not (equals and model and url.startswith(("http://", "https://"))):
            raise SettingsError(f"--static wants MODEL=URL[,MODEL=URL…], not {part.strip()!r}")
        pairs.append((model, url))
    return tuple(pairs)
