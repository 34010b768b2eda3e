"""The admin port of one runtime pod: ask for its signals, tell it to drain.

Every call has a deadline and all calls together have a bound, so that a thousand silent pods cost a thousand
timeouts spread over time, never a thousand sockets at once.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import aiohttp
from pydantic import ValidationError

from slipway_api import names
from slipway_api.runtime_api import Body, DrainRequest, DrainStatus, Signals, State

BodyT = TypeVar("BodyT", bound=Body)


class ReplicaError(Exception):
    """A replica did not give the answer that was asked for.

    ReplicaError
    ├── ReplicaUnreachable   no answer in time: not listening yet, gone, or the network is cut
    └── ReplicaRefused       an answer, but not 200: unknown token, path or body
    """


class ReplicaUnreachable(ReplicaError):
    """No answer in time."""


class ReplicaRefused(ReplicaError):
    """The replica answered with something else than asked for; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Address:
    """Where one replica listens, and whose token it knows."""

    namespace: str
    pod: str
    ip: str


class Tokens(Protocol):
    """Whoever knows what opens a pod's admin port."""

    def tokens(self, namespace: str, pod: str) -> list[str]:
        """Tokens to try, the likeliest first."""


def direct(address: Address) -> str:
    """The base URL of a replica's admin port inside the cluster: the pod's own address."""
    host = f"[{address.ip}]" if ":" in address.ip else address.ip
    return f"http://{host}:{names.ADMIN_PORT}"


def through_api_server(server: str) -> Callable[[Address], str]:
    """The base URLs for an operator outside the cluster, whose session must carry the API server's credentials."""

    def url(address: Address) -> str:
        return f"{server}/api/v1/namespaces/{address.namespace}/pods/http:{address.pod}:{names.ADMIN_PORT}/proxy"

    return url


class ReplicaClient:
    """Calls to the admin ports of all replicas, over one session that the caller owns."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        tokens: Tokens,
        *,
        base_url: Callable[[Address], str] = direct,
        timeout_seconds: float = 2.0,
        max_concurrent: int = 64,
    ) -> None:
        self._session = session
        self._tokens = tokens
        self._base_url = base_url
        self._timeout = timeout_seconds
        self._slots = asyncio.Semaphore(max_concurrent)

    async def signals(self, replica: Address) -> Signals:
        """Its load, now."""
        return await self._call("GET", replica, names.PATH_SIGNALS, Signals)

    async def state(self, replica: Address) -> State:
        """Everything that a person wants to know of it."""
        return await self._call("GET", replica, names.PATH_STATE, State)

    async def drain(self, replica: Address, *, timeout_seconds: int, reason: str) -> DrainStatus:
        """Stop accepting, finish what runs; asking again is harmless."""
        body = DrainRequest(timeout_seconds=timeout_seconds, reason=reason)
        return await self._call("POST", replica, names.PATH_DRAIN, DrainStatus, body)

    async def undrain(self, replica: Address) -> DrainStatus:
        """Accept again."""
        return await self._call("POST", replica, names.PATH_UNDRAIN, DrainStatus)

    async def _call(
        self, method: str, replica: Address, path: str, answer: type[BodyT], body: Body | None = None
    ) -> BodyT:
        async with self._slots:
            try:
                async with asyncio.timeout(self._timeout):
                    raw = await self._open(method, self._base_url(replica) + path, replica, body)
            except TimeoutError as exc:
                raise ReplicaUnreachable(f"{replica.pod}{path}: no answer within {self._timeout:g} s") from exc
            except (aiohttp.ClientError, OSError) as exc:
                raise ReplicaUnreachable(f"{replica.pod}{path}: {exc or type(exc).__name__}") from exc
        try:
            return answer.model_validate_json(raw)
        except ValidationError as exc:
            raise ReplicaRefused(200, f"{replica.pod}{path}: not a {answer.__name__}: {exc.error_count()} errors") from exc

    async def _open(self, method: str, url: str, replica: Address, body: Body | None) -> bytes:
        """The bytes of a 200. A 401 is tried again with the next token: the pod may be older than the rotation."""
        tokens = self._tokens.tokens(replica.namespace, replica.pod)
        for tries_left, token in zip(range(len(tokens) - 1, -1, -1), tokens, strict=True):
            headers = {names.HEADER_ADMIN_TOKEN: token}
            if body is not None:
                headers["Content-Type"] = "application/json"
            data = body.wire() if body is not None else None
            async with self._session.request(method, url, headers=headers, data=data) as response:
                raw = await response.read()
                if response.status == 200:
                    return raw
                if response.status != 401 or tries_left == 0:
                    text = raw[:200].decode(errors="replace")
                    raise ReplicaRefused(response.status, f"{replica.pod}: {method} {url}: {response.status} {text}")
        raise ReplicaRefused(401, f"{replica.pod}: there is no token to try")
