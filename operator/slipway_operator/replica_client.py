"""An HTTP client for the admin ports of runtime pods: signals, state, drain.

Every call has a deadline. The callers limit how many run at once, scrapes and drains separately, each fairly between
services (`controller.isolation`).
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from pydantic import ValidationError

from slipway_api import internal_tls, names
from slipway_api.runtime_api import (
    Body,
    DrainRequest,
    DrainStatus,
    LoadModelRequest,
    ModelInfo,
    Signals,
    State,
)
from slipway_kube.client import Client
from slipway_kube.errors import KubeError
from slipway_kube.objects import Pod
from slipway_operator.keepalive import KeptConnections

BodyT = TypeVar("BodyT", bound=Body)


class ReplicaError(Exception):
    """A call to a replica failed.

    ReplicaError
    ├── ReplicaUnreachable   no answer in time: not listening yet, gone, or the network is cut
    └── ReplicaRefused       an answer, but not 200: unknown token, path or body
    """


class ReplicaUnreachable(ReplicaError):  # noqa: N818  reads as a fact where it is raised
    """No answer in time."""


class ReplicaRefused(ReplicaError):  # noqa: N818  reads as a fact where it is raised
    """The replica answered with another status than 200 and 202; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Address:
    """The admin port of one replica, and the values from which its token is derived."""

    namespace: str
    pod: str
    ip: str
    nonce: str = field(default="", repr=False)  # annotation slipway.dev/admin-nonce
    owner_uid: str = field(default="", repr=False)  # uid of the controlling ownerReference
    tls_name: str = ""  # the name in its certificate; empty: it was created to speak plain text


def address_of(pod: Pod) -> Address:
    """The admin port of a pod that has an IP address."""
    owner = next((reference.uid for reference in pod.metadata.owner_references if reference.controller), "")
    nonce = pod.metadata.annotations.get(names.ANNOTATION_ADMIN_NONCE, "")
    speaks_tls = pod.spec.secret_of(internal_tls.VOLUME) == internal_tls.REPLICAS_SECRET
    tls_name = internal_tls.replicas_name(pod.namespace) if speaks_tls else ""
    return Address(pod.namespace, pod.name, pod.status.pod_ip, nonce=nonce, owner_uid=owner, tls_name=tls_name)


class Tokens(Protocol):
    """Derives the tokens of admin ports."""

    def tokens(self, namespace: str, pod: str, nonce: str) -> list[str]:
        """Tokens to try, the likeliest first."""


class Dial(Protocol):
    """A function that sends one request to an admin port, directly or through the API server; may raise any error."""

    async def __call__(
        self, method: str, replica: Address, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> tuple[int, bytes]:
        """The HTTP status and the body of the replica's answer."""


def direct(connections: KeptConnections, *, port: int = names.ADMIN_PORT) -> Dial:
    """Connect to the pod's IP address, for an operator inside the cluster. The caller owns the session."""

    async def dial(
        method: str, replica: Address, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> tuple[int, bytes]:
        return await connections.request(method, replica.ip, port, path, headers, body, tls_name=replica.tls_name)

    return dial


def through_api_server(client: Client, *, port: int = names.ADMIN_PORT) -> Dial:
    """Connect through `pods/proxy`, for an operator outside the cluster. It strips Authorization, not our header."""

    async def dial(
        method: str, replica: Address, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> tuple[int, bytes]:
        reply = await client.proxy_to_pod(
            replica.namespace,
            replica.pod,
            port,
            path,
            method=method,
            headers=headers,
            body=body,
            over_tls=bool(replica.tls_name),
        )
        return reply.status, reply.body

    return dial


class ReplicaClient:
    """Calls to the admin ports of all replicas."""

    def __init__(
        self,
        dial: Dial,
        tokens: Tokens,
        *,
        timeout_seconds: float = 2.0,
    ) -> None:
        self._dial = dial
        self._tokens = tokens
        self._timeout = timeout_seconds

    async def signals(self, replica: Address) -> Signals:
        """GET /signals: the replica's present load."""
        return await self._call("GET", replica, names.PATH_SIGNALS, Signals)

    async def state(self, replica: Address) -> State:
        """GET /state: the replica's state in full."""
        return await self._call("GET", replica, names.PATH_STATE, State)

    async def drain(
        self, replica: Address, *, timeout_seconds: int, reason: str, refuse_after_seconds: int = 0
    ) -> DrainStatus:
        """POST /drain: stop accepting requests, after a delay where given, and finish those that run; idempotent."""
        body = DrainRequest(timeout_seconds=timeout_seconds, refuse_after_seconds=refuse_after_seconds, reason=reason)
        return await self._call("POST", replica, names.PATH_DRAIN, DrainStatus, body)

    async def load_model(self, replica: Address, request: LoadModelRequest) -> ModelInfo:
        """POST /model: serve this model; returns while it loads, and asking again is harmless."""
        return await self._call("POST", replica, names.PATH_MODEL, ModelInfo, request)

    async def give_model_back(self, replica: Address) -> ModelInfo:
        """DELETE /model: end the engine, and start over without the model; asking again is harmless."""
        return await self._call("DELETE", replica, names.PATH_MODEL, ModelInfo)

    async def undrain(self, replica: Address) -> DrainStatus:
        """POST /undrain: accept requests again."""
        return await self._call("POST", replica, names.PATH_UNDRAIN, DrainStatus)

    async def _call(
        self, method: str, replica: Address, path: str, answer: type[BodyT], body: Body | None = None
    ) -> BodyT:
        try:
            async with asyncio.timeout(self._timeout):
                raw = await self._open(method, replica, path, body)
        except TimeoutError as exc:
            raise ReplicaUnreachable(f"{replica.pod}{path}: no answer within {self._timeout:g} s") from exc
        except (KubeError, OSError) as exc:
            raise ReplicaUnreachable(f"{replica.pod}{path}: {exc or type(exc).__name__}") from exc
        try:
            return answer.model_validate_json(raw)
        except ValidationError as exc:
            raise ReplicaRefused(
                200, f"{replica.pod}{path}: not a {answer.__name__}: {exc.error_count()} errors"
            ) from exc

    async def _open(self, method: str, replica: Address, path: str, body: Body | None) -> bytes:
        """The body of a 200 or 202. After a 401 the next token is tried: the pod may be older than the rotation."""
        status, raw = 401, b"there is no token to try"
        for token in self._tokens.tokens(replica.namespace, replica.pod, replica.nonce):
            headers = {names.HEADER_ADMIN_TOKEN: token, "Content-Type": "application/json"}
            status, raw = await self._dial(method, replica, path, headers, body.wire() if body is not None else None)
            if status in (200, 202):
                return raw
            if status != 401:
                break
        raise ReplicaRefused(status, f"{replica.pod}: {method} {path}: {status} {raw[:200].decode(errors='replace')}")
