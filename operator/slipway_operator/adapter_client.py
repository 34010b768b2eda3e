"""An HTTP client for adapters of runtime pods: list, load and unload on the admin port, probe on the serving port."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import quote

from pydantic import ValidationError

from slipway_api import names
from slipway_api.adapter_conditions import AdapterReason
from slipway_api.runtime_api import AdapterInfo, AdapterList, LoadAdapterRequest
from slipway_kube.errors import KubeError
from slipway_operator.replica_client import Address, Dial, ReplicaRefused, ReplicaUnreachable, Tokens

PATH_COMPLETIONS: Final = "/v1/completions"
CALL_SECONDS: Final = 5.0
PROBE_SECONDS: Final = 60.0  # a probe waits in the queue of a busy replica like any request


class ServingTokens(Protocol):
    """Derives the tokens of serving ports."""

    def tokens(self, namespace: str, service: str) -> list[str]:
        """Tokens to try, the likeliest first."""


class LoadRefused(ReplicaRefused):
    """The replica cannot load the adapter; `reason` is an AdapterReason."""

    def __init__(self, status: int, message: str, reason: str) -> None:
        super().__init__(status, message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class AdapterClient:
    """Calls about adapters, to all replicas. Raises ReplicaUnreachable, ReplicaRefused, LoadRefused."""

    dial: Dial
    dial_serving: Dial
    tokens: Tokens
    serving_tokens: ServingTokens

    async def list(self, replica: Address) -> AdapterList:
        """GET /adapters."""
        status, raw = await self._admin("GET", replica, names.PATH_ADAPTERS)
        if status != 200:
            raise ReplicaRefused(status, f"{replica.pod}: GET {names.PATH_ADAPTERS}: {status}")
        try:
            return AdapterList.model_validate_json(raw)
        except ValidationError as exc:
            raise ReplicaRefused(200, f"{replica.pod}: not an AdapterList: {exc.error_count()} errors") from exc

    async def load(self, replica: Address, request: LoadAdapterRequest) -> AdapterInfo:
        """POST /adapters: the adapter as it is now, which may still be loading."""
        status, raw = await self._admin("POST", replica, names.PATH_ADAPTERS, request.wire())
        if status in (200, 202):
            return AdapterInfo.model_validate_json(raw)
        message, reason = _refusal(raw)
        if 400 <= status < 500 and status != 401:
            raise LoadRefused(status, message or f"status {status}", reason or AdapterReason.ENGINE_REJECTED)
        raise ReplicaUnreachable(f"{replica.pod}: POST {names.PATH_ADAPTERS}: {status} {message}")

    async def unload(self, replica: Address, adapter: str) -> bool:
        """DELETE /adapters/{name}: whether it is gone; otherwise its requests finish."""
        path = f"{names.PATH_ADAPTERS}/{quote(adapter, safe='')}"
        status, _ = await self._admin("DELETE", replica, path)
        if status not in (200, 202):
            raise ReplicaRefused(status, f"{replica.pod}: DELETE {path}: {status}")
        return status == 200

    async def probe(self, replica: Address, service: str, adapter: str, *, is_closed: bool) -> None:
        """POST /v1/completions for one token; returns when the adapter has answered."""
        body = json.dumps({"model": adapter, "prompt": "a", "max_tokens": 1, "temperature": 0}).encode()
        tokens: Sequence[str] = self.serving_tokens.tokens(replica.namespace, service) if is_closed else ("",)
        status, raw = 401, b""
        for token in tokens:
            headers = {"Content-Type": "application/json"} | ({names.HEADER_SERVING_TOKEN: token} if token else {})
            status, raw = await self._dialled(
                self.dial_serving, "POST", replica, PATH_COMPLETIONS, headers, body, PROBE_SECONDS
            )
            if status != 401:
                break
        if status == 200:
            return
        message, _ = _refusal(raw)
        if status in (429, 503):
            raise ReplicaUnreachable(f"{replica.pod} is too busy for a probe: {status} {message}")
        raise LoadRefused(status, f"its probe failed: {status} {message}", AdapterReason.ENGINE_REJECTED)

    async def _admin(self, method: str, replica: Address, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body of an answer. After a 401 the next token is tried: the pod may be older than the rotation."""
        status, raw = 401, b"there is no token to try"
        for token in self.tokens.tokens(replica.namespace, replica.pod, replica.nonce):
            headers = {names.HEADER_ADMIN_TOKEN: token, "Content-Type": "application/json"}
            status, raw = await self._dialled(self.dial, method, replica, path, headers, body, CALL_SECONDS)
            if status != 401:
                break
        return status, raw

    async def _dialled(
        self,
        dial: Dial,
        method: str,
        replica: Address,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
        seconds: float,
    ) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(seconds):
                return await dial(method, replica, path, headers, body)
        except TimeoutError as exc:
            raise ReplicaUnreachable(f"{replica.pod}{path}: no answer within {seconds:g} s") from exc
        except (KubeError, OSError) as exc:
            raise ReplicaUnreachable(f"{replica.pod}{path}: {exc or type(exc).__name__}") from exc


def _refusal(raw: bytes) -> tuple[str, str]:
    """Message and reason of an error body; empty where there is none."""
    try:
        error: Any = json.loads(raw)["error"]
        return str(error["message"]), str(error.get("reason") or "")
    except (ValueError, KeyError, TypeError):
        return "", ""
