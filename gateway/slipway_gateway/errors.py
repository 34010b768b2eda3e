"""The error answers of the gateway itself: status, message and Retry-After, in OpenAI's format with vLLM's messages.

Refusal
├── bad_request            400 the body is not what the API asks for
├── missing_key            401 no API key, and this gateway wants one
├── invalid_key            401 no such API key
├── key_without_tenant     403 the API key belongs to no tenant
├── unknown_model          404 no service has that name; other models are not named
├── unknown_revision       404 the pinned revision does not exist
├── unknown_path           404 not a path of this API
├── wrong_method           405
├── body_too_slow          408 the body did not arrive in time
├── too_large              413 the body
├── unsupported_encoding   415 the body has a content encoding
├── unsupported_expectation 417 an `Expect` header other than 100-continue
├── gateway_memory_full    429 too many bytes of request bodies, in all
├── service_memory_full    429 too many bytes of request bodies, of one service
├── service_requests_full  429 too many open requests, of one service
├── calls_full             429 too many open calls of a tenant to files and batches
├── tenant_limit           429 a limit of the tenant
├── overloaded             429 the service cannot keep up, and the tenant has a low priority
├── internal               500 our own mistake
├── unsupported_transfer   501 a transfer encoding other than chunked
├── bad_gateway            502 every replica that was tried broke off
├── not_ready              503 no replica can answer now
├── refuses_gateway        503 the replicas accept no token of this gateway
├── suspended              503 the service is suspended
├── cannot_start           503 no replica can start, or load the adapter, until a person acts
├── waiting_room_full      503 as many requests as may wait for a replica do so
├── tenants_unreadable     503 the keys and tenants have never been read
├── not_synced             503 this gateway has not listed the services yet
└── deadline_exceeded      504 the request's deadline passed
"""

import math
from collections.abc import MutableMapping

from aiohttp import web

from slipway_api.adapter_conditions import STALLED_CAUSES as ADAPTER_CAUSES
from slipway_api.causes import Cause
from slipway_api.stalled_causes import STALLED_CAUSES
from slipway_gateway.limits import Denied, Standing

ECHO_CHARACTERS = 100  # of a name that a client sent and that we repeat


class Refusal(Exception):  # noqa: N818  a refusal is an answer, not a mistake
    """An error answer: status, message and Retry-After."""

    def __init__(
        self, status: int, kind: str, message: str, *, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.headers: dict[str, str] = {}
        self.closes_connection = False  # another connection may reach another gateway
        self.is_lasting = False  # no repetition within minutes has another result

    def response(self) -> web.Response:
        """The HTTP response."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        response = web.json_response({"error": error}, status=self.status)
        if self.retry_after is not None:
            response.headers["Retry-After"] = str(self.retry_after)
            response.headers["retry-after-ms"] = str(self.retry_after * 1000)
        response.headers.update(self.headers)
        if self.is_lasting:
            response.headers["x-should-retry"] = "false"  # read by the clients of OpenAI and Anthropic
        if self.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        if self.status == 415:
            response.headers["Accept-Encoding"] = "identity"
        if self.closes_connection:
            response.force_close()
        return response


def set_retry_after(headers: MutableMapping[str, str], default_seconds: int = 1) -> None:
    """Complete both headers of a refusal: whole seconds, rounded up, and milliseconds; the finer one leads.

    >>> headers = {"retry-after-ms": "6500"}; set_retry_after(headers); headers["Retry-After"]
    '7'
    """
    seconds = _number(headers.get("Retry-After", ""))
    milliseconds = _number(headers.get("retry-after-ms", ""))
    if milliseconds is None:
        milliseconds = 1000 * (default_seconds if seconds is None else seconds)
    headers["Retry-After"] = str(math.ceil(milliseconds / 1000 if seconds is None else seconds))
    headers["retry-after-ms"] = str(math.ceil(milliseconds))


def _number(text: str) -> float | None:
    """A number of seconds as a replica may write it; None for a date or nonsense."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < 1e9 else None


def bad_request(message: str, param: str | None = None) -> Refusal:
    """The body is not what the API asks for."""
    return Refusal(400, "BadRequestError", message, param=param)


def missing_key() -> Refusal:
    """The request shows no API key."""
    message = "You didn't provide an API key. Send it as a header: Authorization: Bearer YOUR_KEY."
    return Refusal(401, "AuthenticationError", message)


def invalid_key() -> Refusal:
    """No tenant has this API key; it is not repeated."""
    return Refusal(401, "AuthenticationError", "Incorrect API key provided.")


def key_without_tenant() -> Refusal:
    """The API key exists, but no tenant names it."""
    return Refusal(403, "PermissionDeniedError", "This API key belongs to no tenant.")


def rate_headers(standing: Standing) -> dict[str, str]:
    """A limit and what is left of it, in the headers that OpenAI's clients read."""
    return {
        f"x-ratelimit-limit-{standing.limit}": str(standing.amount),
        f"x-ratelimit-remaining-{standing.limit}": str(standing.remaining),
        f"x-ratelimit-reset-{standing.limit}": f"{math.ceil(standing.reset)}s",
    }


def tenant_limit(denied: Denied) -> Refusal:
    """The request would exceed a limit of its tenant; one that is too large for it at any time is a bad request."""
    message = f"Limit reached: {denied.reason}."
    if denied.retry_after is None:
        return Refusal(400, "BadRequestError", message)
    seconds = max(1, math.ceil(denied.retry_after))
    refusal = Refusal(429, "RateLimitError", f"{message} Try again in {seconds} s.", retry_after=seconds)
    if denied.limit in ("requests", "tokens"):  # OpenAI has no header for concurrency
        refusal.headers = rate_headers(Standing(denied.limit, denied.amount, 0, seconds))
    return refusal


def tenants_unreadable() -> Refusal:
    """Keys and tenants are configured and could not be read since the start: nobody can be let in."""
    return not_ready("this gateway cannot read its tenants and keys")


def unknown_model(model: str) -> Refusal:
    """No service has this name. Those that exist are not listed, because they may be another team's."""
    return Refusal(404, "NotFoundError", f"The model `{model[:ECHO_CHARACTERS]}` does not exist.", param="model")


def unknown_revision(model: str, revision: str) -> Refusal:
    """The client pinned a revision that the service does not have."""
    return Refusal(404, "NotFoundError", f"The model `{model}` has no revision `{revision[:ECHO_CHARACTERS]}`.")


def unknown_path(path: str) -> Refusal:
    """Not a path of this API."""
    return Refusal(404, "NotFoundError", f"There is nothing at {path[:ECHO_CHARACTERS]}.")


def wrong_method(method: str, path: str) -> Refusal:
    """The path exists, but not for this method."""
    return Refusal(405, "MethodNotAllowedError", f"{path[:ECHO_CHARACTERS]} does not take {method}.")


def too_large(limit_bytes: int) -> Refusal:
    """The body exceeds the limit of one request."""
    limit = f"{limit_bytes >> 20} MiB" if limit_bytes >= 1 << 20 else f"{limit_bytes} bytes"
    return Refusal(413, "RequestTooLargeError", f"A request may have {limit}, this one has more.")


def unsupported_encoding() -> Refusal:
    """The body is compressed; the encoding is not repeated, because it is a stranger's text."""
    message = "Content encodings are not supported. Send the body uncompressed, without Content-Encoding."
    return Refusal(415, "UnsupportedMediaTypeError", message)


def unsupported_expectation() -> Refusal:
    """The request expects something else than `100 Continue`."""
    return Refusal(417, "ExpectationFailedError", "The only supported Expect header is 100-continue.")


def unsupported_transfer() -> Refusal:
    """The body has a transfer encoding other than chunked."""
    message = "The only supported Transfer-Encoding is chunked. Send the body as it is."
    return Refusal(501, "NotImplementedError", message)


def body_too_slow() -> Refusal:
    """The body did not arrive in time, or stood still while others needed its memory."""
    return Refusal(408, "RequestTimeoutError", "The body of the request did not arrive in time.", retry_after=1)


def gateway_memory_full() -> Refusal:
    """So many bytes of requests wait for their first answer that one more could exhaust the gateway's memory."""
    return Refusal(429, "RateLimitError", "The gateway holds too many large requests now.", retry_after=1)


def service_memory_full(service: str) -> Refusal:
    """The requests of this service hold their share of the gateway's memory."""
    message = f"The gateway holds too many large requests for {service} now."
    return Refusal(429, "RateLimitError", message, retry_after=1)


def service_requests_full(service: str) -> Refusal:
    """The requests of this service hold their share of the gateway's connections."""
    return Refusal(429, "RateLimitError", f"The gateway has too many open requests for {service} now.", retry_after=1)


def calls_full(open_calls: int, limit: int) -> Refusal:
    """The tenant has too many open calls to files and batches."""
    message = f"Open calls of this tenant to files and batches: {open_calls}; the limit is {limit}."
    return Refusal(429, "RateLimitError", message, retry_after=1)


def bad_gateway(reason: str) -> Refusal:
    """Every replica that was tried broke off before it answered."""
    return Refusal(502, "BadGatewayError", f"The request could not be answered: {reason}.", retry_after=1)


def not_ready(reason: str, retry_after: int = 5) -> Refusal:
    """No replica can answer now; later one may."""
    return Refusal(503, "ServiceUnavailableError", f"Try again later: {reason}.", retry_after=retry_after)


def refuses_gateway() -> Refusal:
    """The replicas were made with a key that this gateway does not have; the operator replaces them."""
    return not_ready("the replicas were started with another key of the gateway, and are being replaced")


def suspended(service: str) -> Refusal:
    """The service has no replicas until its owner resumes it."""
    return not_ready(f"{service} is suspended", retry_after=60)


def cannot_start(model: str, reason: str, *, is_adapter: bool = False) -> Refusal:
    """No replica can start, or load the adapter, until a person acts; `reason`: of the object's condition Stalled.

    Meaning and remedy are those of the table of conditions. The condition's own message is not sent to clients, because
    it may name Secrets, nodes and images.
    """
    table = ADAPTER_CAUSES if is_adapter else STALLED_CAUSES
    causes: dict[str, Cause] = {key.value: cause for key, cause in table.items()}
    kind, does = ("LoRAAdapter", "load") if is_adapter else ("InferenceService", "start")
    parts = [f"No replica can {does} {model}: {reason}."]
    if (cause := causes.get(reason)) is not None:
        parts.append(f"{cause.meaning} Remedy, for {cause.helper}: {cause.remedy}")
    parts.append(f"The condition Stalled of the {kind} has the details.")
    refusal = Refusal(503, "ServiceUnavailableError", " ".join(parts), retry_after=60)
    refusal.is_lasting = True
    return refusal


def waiting_room_full(service: str, limit: str, retry_after: int) -> Refusal:
    """As many requests as may wait for a replica do so already; `limit`: requests or bytes."""
    return not_ready(f"as many {limit} as may wait for {service} are waiting", retry_after=retry_after)


def overloaded(model: str) -> Refusal:
    """The service cannot keep up, and the request is of those that are refused first."""
    return Refusal(429, "RateLimitError", f"{model} is overloaded; this caller has a low priority.", retry_after=2)


def not_synced() -> Refusal:
    """After a restart, until the API server has listed all services: an unknown name may well exist."""
    refusal = not_ready("this gateway has not listed the services yet", retry_after=1)
    refusal.closes_connection = True
    return refusal


def deadline_exceeded(seconds: float) -> Refusal:
    """An answer that is not streamed took too long; the client may not repeat it blindly, so no time to come back."""
    message = f"The request was not answered within {seconds:g} seconds; stream long answers."
    return Refusal(504, "GatewayTimeoutError", message)


def internal() -> Refusal:
    """A bug in the gateway: the log has the details, the client gets none."""
    return Refusal(500, "InternalServerError", "The gateway failed to handle this request.")
