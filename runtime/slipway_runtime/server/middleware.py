"""Middleware of the serving port: the serving token, request ids, limits on bodies and on open requests, headers.

Plain ASGI: streams are not buffered, and a disconnect passes through unchanged.
"""

import json
import re
import uuid
from typing import Final

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipway_api import names
from slipway_api.admin_token import token_matches
from slipway_api.runtime_api import Signals
from slipway_runtime.server.errors import NOT_STARTED, ApiError
from slipway_runtime.server.replica import Replica

log = structlog.get_logger()

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")

# With this request header a gateway asks for a load report (ORCA) in the response, as text or JSON.
ORCA_FORMAT_HEADER: Final = "endpoint-load-metrics-format"
ORCA_HEADER: Final = "endpoint-load-metrics"
# Paths for the kubelet and metrics scrapers, which have no token.
OPEN_PATHS: Final = frozenset({names.PATH_HEALTH, names.PATH_READY, names.PATH_METRICS})
_DISCARD_BYTES: Final = 64 * 2**20


def new_id(prefix: str) -> str:
    """A random id such as `chatcmpl-…`; not chosen by clients, so it cannot collide in the engine."""
    return f"{prefix}-{uuid.uuid4().hex}"


def load_report(signals: Signals, form: str) -> str:
    """The load report in ORCA's format `form`; empty for an unknown format."""
    named = {
        "kv_cache_usage_perc": round(signals.kv_usage, 6),
        "num_requests_running": signals.running,
        "num_requests_waiting": signals.waiting,
    }
    match form.strip().upper():
        case "TEXT":
            return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
        case "JSON":
            return "JSON " + json.dumps({"named_metrics": named}, separators=(",", ":"))
        case _:
            return ""


async def _discard_body(receive: Receive) -> None:
    """Read and drop a body, up to a limit: a client that still sends would see a reset instead of the response."""
    left = _DISCARD_BYTES
    while left > 0:
        message = await receive()
        left -= len(message.get("body", b""))
        if not message.get("more_body", False):
            return


class ServingMiddleware:
    """The outermost middleware of the serving port."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        replica: Replica,
        max_body_bytes: int,
        max_open_requests: int,
        token_digests: tuple[str, ...] = (),
    ) -> None:
        self._app = app
        self._replica = replica
        self._max_body_bytes = max_body_bytes
        self._max_open_requests = max_open_requests
        self._token_digests = token_digests
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to the application, or refuse it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        given = headers.get(names.HEADER_REQUEST_ID, "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        send = self._signing(send, scope, request_id, headers.get(ORCA_FORMAT_HEADER, ""))
        send = self._logging(send, scope, headers, request_id)
        if (refusal := self._refusal(scope, headers)) is not None:
            await _discard_body(receive)
            return await refusal.response(scope["path"])(scope, receive, send)
        self._open += 1
        try:
            await self._app(scope, self._counting(receive), send)
        finally:
            self._open -= 1

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        digests = self._replica.serving_token_digests or self._token_digests
        if digests and scope["path"] not in OPEN_PATHS:
            token = headers.get(names.HEADER_SERVING_TOKEN, "")
            if not token_matches(token, digests):
                return ApiError(401, f"the header {names.HEADER_SERVING_TOKEN} is missing or wrong")
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._max_body_bytes:
            return ApiError(413, self._too_large, headers={"Connection": "close"})
        if scope["method"] == "POST" and self._open >= self._max_open_requests:
            reason = f"{self._open} requests are open, the limit is {self._max_open_requests}"
            return ApiError(429, reason, headers={"Retry-After": "1", "retry-after-ms": "1000", **NOT_STARTED})
        return None

    @property
    def _too_large(self) -> str:
        return f"the body is larger than {self._max_body_bytes} bytes"

    def _counting(self, receive: Receive) -> Receive:
        """Wrap `receive` to enforce the body limit on chunked bodies, which have no Content-Length."""
        received = 0

        async def counting() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._max_body_bytes:
                    await _discard_body(receive)
                    raise HTTPException(413, self._too_large, {"Connection": "close"})
            return message

        return counting

    def _logging(self, send: Send, scope: Scope, headers: Headers, request_id: str) -> Send:
        """Wrap `send` to log and count error responses; answers with tokens are logged when they end."""

        async def logging(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                if self._replica.loaded is not None and not scope["state"].get("admitted"):
                    self._replica.loaded.metrics.failed(message["status"])
                log.info(
                    "refused",
                    request_id=request_id,
                    tenant=headers.get(names.HEADER_TENANT, "")[:128],
                    method=scope["method"],
                    path=scope["path"][:100],
                    status=message["status"],
                )
            await send(message)

        return logging

    def _signing(self, send: Send, scope: Scope, request_id: str, load_format: str) -> Send:
        """Wrap `send` to add headers: request id, model, revision, adapter, tokenizer, and a requested load report."""

        async def signing(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[names.HEADER_REQUEST_ID] = request_id
                headers[names.HEADER_MODEL] = self._replica.identity.model
                if self._replica.identity.revision:
                    headers[names.HEADER_REVISION] = self._replica.identity.revision
                if self._replica.loaded is not None:
                    headers[names.HEADER_TOKENIZER] = self._replica.loaded.tokenizer_sha256
                if adapter := scope["state"].get("adapter"):
                    headers[names.HEADER_ADAPTER] = adapter
                if load_format and (load := load_report(self._replica.signals(), load_format)):
                    headers[ORCA_HEADER] = load
            await send(message)

        return signing
