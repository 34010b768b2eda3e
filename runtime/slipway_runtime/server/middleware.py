"""Middleware of the serving port: the serving token, request ids, limits on bodies and on open requests, headers.

Plain ASGI: streams are not buffered, and a disconnect passes through unchanged.
"""

import asyncio
import json
import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipway_api import names
from slipway_api.admin_token import token_matches
from slipway_api.anthropic_errors import REQUEST_ID_HEADER, is_anthropic
from slipway_api.names import RERANK_PATHS, SCORE_PATHS
from slipway_api.runtime_api import Signals
from slipway_runtime.server.errors import NOT_STARTED, ApiError
from slipway_runtime.server.fields import OTHER, header_of
from slipway_runtime.server.replica import Replica

log = structlog.get_logger()

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")

# With this request header a gateway asks for a load report (ORCA) in the response, as text or JSON.
ORCA_FORMAT_HEADER: Final = "endpoint-load-metrics-format"
ORCA_HEADER: Final = "endpoint-load-metrics"
# Paths for the kubelet, which has no token.
OPEN_PATHS: Final = frozenset({names.PATH_HEALTH, names.PATH_READY})
# They need the gateway's token. Names of headers arrive in lower case.
_PROVEN_HEADERS: Final = frozenset({names.HEADER_TENANT.encode(), names.HEADER_PRIORITY.encode()})
# The label of each API in `slipway:ignored_fields_total`.
_APIS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/responses/input_tokens": "responses",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
    "/v1/embeddings": "embeddings",
    **dict.fromkeys(SCORE_PATHS, "scores"),
    **dict.fromkeys(RERANK_PATHS, "rerank"),
    "/tokenize": "tokenize",
    "/detokenize": "tokenize",
}
_DISCARD_BYTES: Final = 64 * 2**20
# Of the body of a caller without the token: most clients finish sending before they read the answer.
_STRANGER_BYTES: Final = 64 * 2**10
_STRANGER_SECONDS: Final = 1.0
_RETRY_SOON: Final = {"Retry-After": "1", "retry-after-ms": "1000", **NOT_STARTED}


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


async def _discard_body(receive: Receive, most: int = _DISCARD_BYTES) -> None:
    """Read and drop a body, up to a limit: a client that still sends would see a reset instead of the response."""
    left = most
    while left > 0:
        message = await receive()
        left -= len(message.get("body", b""))
        if not message.get("more_body", False):
            return


async def _discard_strangers_body(receive: Receive) -> None:
    """The same for a caller that is not known: what it costs does not grow with what it sends, or how slowly."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_STRANGER_SECONDS):
            await _discard_body(receive, _STRANGER_BYTES)


@dataclass
class _Body:
    """Bytes of one request's body: all that were received, and those that count as held."""

    received: int = 0
    held: int = 0


class ServingMiddleware:
    """The outermost middleware of the serving port."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        replica: Replica,
        max_body_bytes: int,
        max_open_requests: int,
        max_open_body_bytes: int,
        token_digests: tuple[str, ...] = (),
        gateway_token_digests: tuple[str, ...] = (),
    ) -> None:
        self._app = app
        self._replica = replica
        self._max_body_bytes = max_body_bytes
        self._max_open_requests = max_open_requests
        self._token_digests = token_digests
        self._gateway_token_digests = gateway_token_digests
        self._open = 0
        self._max_open_body_bytes = max(max_open_body_bytes, max_body_bytes)  # one body alone always fits
        self._body_bytes = 0  # received of requests whose answers have not begun

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to the application, or refuse it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        dropped = self._drop_unproven(scope)
        headers = Headers(scope=scope)
        given = headers.get(names.HEADER_REQUEST_ID, "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        send = self._signing(send, scope, request_id, headers.get(ORCA_FORMAT_HEADER, ""), dropped)
        send = self._logging(send, scope, headers, request_id)
        if (refusal := self._refusal(scope, headers)) is not None:
            await (_discard_strangers_body(receive) if refusal.status == 401 else _discard_body(receive))
            return await refusal.response(scope["path"], request_id, headers)(scope, receive, send)
        body = _Body()
        self._open += 1
        try:
            await self._app(scope, self._counting(receive, body), self._releasing(send, body))
        finally:
            self._open -= 1
            self._release(body)

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        digests = self._replica.serving_token_digests or self._token_digests
        if digests and scope["path"] not in OPEN_PATHS:
            token = headers.get(names.HEADER_SERVING_TOKEN, "")
            if not token_matches(token, digests):
                message = f"the header {names.HEADER_SERVING_TOKEN} is missing or wrong"
                return ApiError(401, message, headers={"Connection": "close"})
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._max_body_bytes:
            return ApiError(413, self._too_large, headers={"Connection": "close"})
        if scope["method"] == "POST" and self._open >= self._max_open_requests:
            reason = f"{self._open} requests are open, the limit is {self._max_open_requests}"
            return ApiError(429, reason, headers=_RETRY_SOON)
        if length.isdigit() and self._body_bytes + int(length) > self._max_open_body_bytes:
            return ApiError(429, self._too_many_bytes, headers=_RETRY_SOON)
        return None

    @property
    def _too_large(self) -> str:
        return f"the body is larger than {self._max_body_bytes} bytes"

    @property
    def _too_many_bytes(self) -> str:
        return f"the bodies of all requests that wait for an answer may hold {self._max_open_body_bytes} bytes"

    def _counting(self, receive: Receive, body: "_Body") -> Receive:
        """Wrap `receive` to count the bytes of the body, and enforce both limits where Content-Length did not.

        What has arrived counts, not what is announced: a client that sends nothing takes nothing from the others.
        """

        async def counting() -> Message:
            message = await receive()
            if message["type"] != "http.request":
                return message
            size = len(message.get("body", b""))
            body.received += size
            body.held += size
            self._body_bytes += size
            if body.received > self._max_body_bytes:
                self._release(body)
                await _discard_body(receive)
                raise HTTPException(413, self._too_large, {"Connection": "close"})
            if self._body_bytes > self._max_open_body_bytes:
                self._release(body)
                if message.get("more_body", False):
                    await _discard_body(receive)
                raise HTTPException(429, self._too_many_bytes, _RETRY_SOON)
            return message

        return counting

    def _releasing(self, send: Send, body: "_Body") -> Send:
        """Wrap `send` to release the bytes of the body when the answer begins: the engine bounds what runs."""

        async def releasing(message: Message) -> None:
            self._release(body)
            await send(message)

        return releasing

    def _release(self, body: "_Body") -> None:
        self._body_bytes -= body.held
        body.held = 0

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

    def _drop_unproven(self, scope: Scope) -> str:
        """Remove tenant and priority from a request that shows no token of the gateway; the names of those removed.

        Whoever reaches an open port could otherwise choose whose queue, quota and prefix cache it uses.
        """
        given = [name for name, _ in scope["headers"] if name in _PROVEN_HEADERS]
        if not given:
            return ""
        replica = self._replica
        digests = (
            *(replica.serving_token_digests or self._token_digests),
            *(replica.gateway_token_digests or self._gateway_token_digests),
        )
        token = Headers(scope=scope).get(names.HEADER_SERVING_TOKEN, "")
        if token and token_matches(token, digests):
            return ""
        scope["headers"] = [(name, value) for name, value in scope["headers"] if name not in _PROVEN_HEADERS]
        return ", ".join(sorted({name.decode() for name in given}))

    def _report_ignored(self, path: str, request_id: str, ignored: Mapping[str, bool]) -> None:
        """Log and count the fields of a request that had no effect: their names, never their values."""
        api = _APIS.get(path, OTHER)
        log.info("fields ignored", request_id=request_id, api=api, fields=header_of(ignored))
        if self._replica.loaded is not None:
            self._replica.loaded.metrics.ignored(api, ignored)

    def _signing(self, send: Send, scope: Scope, request_id: str, load_format: str, dropped: str) -> Send:
        """Wrap `send` to add headers: request id, ignored fields, model, revision, adapter, tokenizer, load report."""

        async def signing(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[names.HEADER_REQUEST_ID] = request_id
                if dropped:
                    headers[names.HEADER_IGNORED_HEADERS] = dropped
                if ignored := scope["state"].get("ignored"):
                    headers[names.HEADER_IGNORED] = header_of(ignored)
                    self._report_ignored(scope["path"], request_id, ignored)
                if is_anthropic(scope["path"]):
                    headers[REQUEST_ID_HEADER] = request_id
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
