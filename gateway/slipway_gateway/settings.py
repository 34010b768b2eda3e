"""The gateway's settings, read once at the start: from the command line, then the environment, then defaults.

The variable of a field is SLIPWAY_ and the field's name in capitals; an empty variable counts as absent.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AliasChoices,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from slipway_api import internal_tls, trace_settings
from slipway_api.listening import ALL_ADDRESSES
from slipway_api.names import ADMIN_PORT, SERVING_PORT
from slipway_gateway.batch.limits import BatchLimits
from slipway_gateway.listener import ConnectionLimits
from slipway_gateway.startup import StartupLimits
from slipway_gateway.upstream import UpstreamTimeouts

_LIMITS = ConnectionLimits()
_STARTUP = StartupLimits()
_TIMEOUTS = UpstreamTimeouts()


class SettingsError(Exception):
    """Invalid settings; the message names each of them and says why."""


class GatewaySettings(BaseSettings):
    """One gateway's settings; `static` set means: without Kubernetes."""

    model_config = SettingsConfigDict(
        env_prefix="SLIPWAY_", env_ignore_empty=True, frozen=True, populate_by_name=True, extra="ignore"
    )

    static: Annotated[tuple[tuple[str, str], ...], NoDecode] = ()  # (model, base URL) pairs
    host: str = ""  # empty: every address in the cluster, only this machine's own with `static`
    port: int = Field(SERVING_PORT, ge=0, le=65535)
    admin_port: int = Field(ADMIN_PORT, ge=0, le=65535)
    namespace: str = "slipway-system"
    pod_name: str = Field("", validation_alias=AliasChoices("POD_NAME"))
    # The gateway's own key: current, and previous while rotating.
    key_directory: Path = Field(Path("/etc/slipway/gateway"), validation_alias=AliasChoices("SLIPWAY_GATEWAY_KEY_DIR"))
    watch_namespaces: Annotated[tuple[str, ...], NoDecode] = ()  # empty: all
    log_level: str = "INFO"
    event_loop: Literal["uvloop", "asyncio"] = "uvloop"  # asyncio: the standard library's, to rule uvloop out
    propagation_seconds: NonNegativeFloat = (
        5.0  # after SIGTERM, until clients and load balancers have noticed that this gateway is not ready
    )
    drain_seconds: NonNegativeFloat = 300.0  # after that, for streams to end by themselves

    # The routing table of the last process, for a start without the API server (see `startup`); none: it is not kept.
    state_directory: Path | None = None
    routes_wait_seconds: NonNegativeFloat = _STARTUP.wait_seconds
    snapshot_max_age_seconds: NonNegativeFloat = _STARTUP.max_age_seconds

    # Tenants and their keys, mounted; empty: anyone may call every model.
    tenants_file: Path | None = None
    keys_directory: Path | None = None
    audit: bool | None = None  # a record for each request; by default where there are tenants
    gateways: PositiveInt = 1  # that share the limits of tenants, where they are not counted
    gateway_service: str = ""  # the Kubernetes Service whose ready backends are counted
    tls_directory: Path | None = None  # tls.crt and tls.key for the port of clients, mounted; empty: plain HTTP
    # Certificate of the admin port (ADR 144), mounted; empty: the operator reads it as plain text.
    internal_tls_directory: Path | None = None
    # The authorities that verify replicas; while there is no such file, replicas that speak TLS cannot be called.
    internal_ca_file: Path = Path("/etc/slipway/internal-ca") / internal_tls.CA_FILE
    max_tokens: NonNegativeInt = 0  # that a request may ask for; 0: no limit but the runtime's
    default_max_tokens: NonNegativeInt = 0  # where it asks for no number; 0: max_tokens

    # Clients: how many, how slow, and how much they may send.
    max_connections: PositiveInt = _LIMITS.connections
    max_connections_per_client: PositiveInt = _LIMITS.connections_per_client
    header_seconds: PositiveFloat = _LIMITS.header_seconds
    body_seconds: PositiveFloat = 60.0
    idle_seconds: PositiveFloat = _LIMITS.idle_seconds
    write_stall_seconds: PositiveFloat = _LIMITS.write_stall_seconds
    max_body_bytes: PositiveInt = 16 << 20
    max_bodies_bytes: PositiveInt = 256 << 20

    # Replicas: how long they may be silent (see UpstreamTimeouts).
    connect_seconds: PositiveFloat = _TIMEOUTS.connect_seconds
    unacknowledged_seconds: PositiveFloat = _TIMEOUTS.unacknowledged_seconds
    first_byte_seconds: PositiveFloat = _TIMEOUTS.first_byte_seconds
    stream_silence_seconds: PositiveFloat = _TIMEOUTS.stream_silence_seconds
    request_seconds: PositiveFloat = _TIMEOUTS.request_seconds
    # How long a request waits for the first replica of a service that should have some (see waiting_room); 0: not.
    loading_wait_seconds: NonNegativeFloat = 10.0
    hang_seconds: PositiveFloat = _TIMEOUTS.hang_seconds

    # The batch API: where its files are, on a volume; none: there is no such API (see `batch`).
    batch_directory: Path | None = None
    batch_concurrency: PositiveInt = 16  # requests of batches at once
    batch_max_file_bytes: PositiveInt = 100 << 20
    batch_max_tenant_bytes: PositiveInt = 1 << 30
    batch_max_requests: PositiveInt = 50_000

    # The degrade ladder (see `overload`): requests that wait at a replica, on average; 0: never degrade.
    degrade_waiting: NonNegativeInt = 0
    degrade_max_tokens: PositiveInt = 256

    # Traces: the base URL of a collector that takes OTLP over HTTP; empty: none are made (see `tracing`).
    otlp_endpoint: str = ""
    trace_ratio: float = Field(trace_settings.DEFAULT_RATIO, ge=0, le=1)
    trace_slow_seconds: PositiveFloat = trace_settings.DEFAULT_SLOW_SECONDS

    # Follow what replicas have in their KV cache (see `kv_feeds`): one connection to each replica.
    kv_events: bool = False

    # Handover of streams: how long one may wait for another replica (0: never), and what is kept for it.
    handover_seconds: NonNegativeFloat = 15.0
    max_handover_bytes: PositiveInt = 128 << 20
    max_handover_stream_bytes: PositiveInt = 1 << 20

    @field_validator("static", mode="before")
    @classmethod
    def _split_static(cls, value: Any) -> Any:
        """MODEL=URL[,MODEL=URL…]."""
        if not isinstance(value, str):
            return value
        pairs = []
        for part in value.split(","):
            model, equals, url = part.strip().partition("=")
            if not (equals and model and url.startswith(("http://", "https://"))):
                raise ValueError(f"must be MODEL=URL[,MODEL=URL…], not {part.strip()!r}")
            if "@" in urlsplit(url).netloc:
                raise ValueError(f"the URL of {model!r} must have no user name or password")
            pairs.append((model, url))
        return tuple(pairs)

    @field_validator("watch_namespaces", mode="before")
    @classmethod
    def _split_namespaces(cls, value: Any) -> Any:
        """A comma-separated list."""
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("log_level")
    @classmethod
    def _upper(cls, value: str) -> str:
        return value.upper()

    @model_validator(mode="before")
    @classmethod
    def _static_needs_no_propagation(cls, values: dict[str, Any]) -> dict[str, Any]:
        """On a laptop there is no load balancer to wait for."""
        return {"propagation_seconds": 0.0, **values} if values.get("static") else values

    @model_validator(mode="after")
    def _tenants_need_both(self) -> "GatewaySettings":
        if (self.tenants_file is None) != (self.keys_directory is None):
            raise ValueError("SLIPWAY_TENANTS_FILE and SLIPWAY_KEYS_DIRECTORY belong together")
        return self

    @property
    def batch_limits(self) -> BatchLimits:
        """How much a tenant may keep in the batch API."""
        return BatchLimits(
            file_bytes=self.batch_max_file_bytes,
            tenant_bytes=self.batch_max_tenant_bytes,
            requests=self.batch_max_requests,
        )

    @property
    def bind(self) -> str:
        """The address to listen on; `::`: all, IPv4 and IPv6."""
        return self.host or ("127.0.0.1" if self.static else ALL_ADDRESSES)

    @property
    def connection_limits(self) -> ConnectionLimits:
        """The connection limits of each port."""
        return ConnectionLimits(
            connections=self.max_connections,
            connections_per_client=self.max_connections_per_client,
            header_seconds=self.header_seconds,
            idle_seconds=self.idle_seconds,
            write_stall_seconds=self.write_stall_seconds,
        )

    @property
    def startup_limits(self) -> StartupLimits:
        """How a start without the API server goes."""
        return StartupLimits(wait_seconds=self.routes_wait_seconds, max_age_seconds=self.snapshot_max_age_seconds)

    @property
    def upstream_timeouts(self) -> UpstreamTimeouts:
        """How long replicas may be silent."""
        return UpstreamTimeouts(
            connect_seconds=self.connect_seconds,
            unacknowledged_seconds=self.unacknowledged_seconds,
            first_byte_seconds=self.first_byte_seconds,
            stream_silence_seconds=self.stream_silence_seconds,
            request_seconds=self.request_seconds,
            hang_seconds=self.hang_seconds,
        )


def read_settings(arguments: Sequence[str]) -> GatewaySettings:
    """Read the settings from the command line and, where an option is absent, from the environment."""
    parser = argparse.ArgumentParser(
        prog="slipway-gateway", description="One OpenAI endpoint in front of all InferenceServices."
    )
    parser.add_argument(
        "--static",
        metavar="MODEL=URL[,…]",
        help="serve these models from these URLs, without Kubernetes; a model named twice has two replicas",
    )
    parser.add_argument("--host", help="address to listen on; default: all, or 127.0.0.1 with --static")
    parser.add_argument("--port", help=f"for clients; default {SERVING_PORT}")
    parser.add_argument("--admin-port", help=f"for probes and metrics; default {ADMIN_PORT}")
    parser.add_argument(
        "--state-directory", help="keep the routing table there, for a start without the API server; default: nowhere"
    )
    options = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    try:
        return GatewaySettings(**options)
    except ValidationError as invalid:
        raise SettingsError(describe(invalid)) from invalid


def describe(invalid: ValidationError) -> str:
    """One sentence for each invalid setting, with its variable and its value."""
    return "; ".join(
        _sentence(error["loc"], error["input"], error["msg"]) for error in invalid.errors(include_url=False)
    )


def _sentence(location: tuple[int | str, ...], value: object, message: str) -> str:
    if not location:  # of several settings together; the message names them
        return message
    name = str(location[0])
    variable = name if name.isupper() else f"SLIPWAY_{name.upper()}"
    return f"{variable} is {value!r}: {message[:1].lower()}{message[1:]}"
