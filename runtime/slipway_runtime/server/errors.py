"""Error responses in OpenAI's format, never with text of a prompt.

    {"error": {"message": …, "type": …, "param": … | null, "code": <status>}}

| cause                               | status | type                    | headers                        |
|-------------------------------------|--------|-------------------------|--------------------------------|
| an invalid request                  | 400    | BadRequestError         |                                |
| the serving or admin token is wrong | 401    | AuthenticationError     |                                |
| an unknown model or path            | 404    | NotFoundError           |                                |
| the wrong method                    | 405    | MethodNotAllowedError   | Allow                          |
| a conflict with the current state   | 409    | ConflictError           |                                |
| a body beyond the limit             | 413    | RequestTooLargeError    |                                |
| a compressed body                   | 415    | BadRequestError         |                                |
| the queue is full                   | 429    | RateLimitError          | Retry-After, retry-after-ms    |
| the engine failed                   | 500    | InternalServerError     |                                |
| not implemented                     | 501    | NotImplementedError     |                                |
| loading, draining, engine dead      | 503    | ServiceUnavailableError | Retry-After                    |
| no memory for a step                | 503    | ServiceUnavailableError | Retry-After                    |
| the deadline passed                 | 504    | GatewayTimeoutError     |                                |

Under /v1/messages the shape is Anthropic's: {"type": "error", "error": {"type": …, "message": …}}; also under
/v1/models, for a client that sends the header `anthropic-version`.
A 429 or 503 of a request that the engine has not taken carries `x-slipway-not-started`: another replica may serve it.
"""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from slipway_api import names
from slipway_api.anthropic_errors import anthropic_error
from slipway_api.anthropic_models import speaks_anthropic
from slipway_runtime.engine.client import Draining, EngineDead, Overloaded, Refused
from slipway_runtime.server import validation_errors

log = structlog.get_logger()

_TYPES: Final = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}
NOT_STARTED: Final = {names.HEADER_NOT_STARTED: "1"}
_LONGEST_MESSAGE: Final = 500
_KEY: Final = re.compile(r"[A-Za-z0-9_\[\]-]{1,40}")
_OF_A_FUNCTION: Final = re.compile(r"(tools\.\d+\.)function\.(\w+)(.*)")
_NAME: Final = re.compile(r"[A-Za-z0-9._:/@-]{1,100}")


class ApiError(Exception):
    """An error response: its status, its message, and the request field that caused it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        reason: str = "",
        kind: str = "",
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """`reason`: the cause in one word, for programs; `kind`: replaces the error type.

        `details`: an object for the clients of Anthropic's API, which read it.
        """
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.kind = kind
        self.details = details
        self.message = message[:_LONGEST_MESSAGE]
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON of the error, for a response or for an event in a stream."""
        otherwise = "InternalServerError" if self.status >= 500 else "BadRequestError"
        kind = self.kind or _TYPES.get(self.status, otherwise)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.status}
        return {"error": error | ({"reason": self.reason} if self.reason else {})}

    def response(self, path: str = "", request_id: str = "", headers: Mapping[str, str] | None = None) -> Response:
        """The error as a response, in the format of the API that the path and the headers of its request belong to."""
        body = self.body()
        if speaks_anthropic(path, headers or {}):
            body = anthropic_error(self.message, self.status, request_id, self.details)
        return JSONResponse(body, status_code=self.status, headers=self.headers)


@contextlib.contextmanager
def renamed_fields(names_of_chat: Mapping[str, str], *, schema: str = "parameters") -> Iterator[None]:
    """Let errors name the fields of another API. names_of_chat: a field of chat completions → that API's field.

    `schema`: the name of a tool's schema there. A tool is flat there: `tools.0.function.name` is `tools.0.name`.
    """
    try:
        yield
    except ApiError as error:
        given = error.param or ""
        field = given.partition(".")[0]
        own = names_of_chat.get(field)
        if own is None and (inner := _OF_A_FUNCTION.fullmatch(given)) is not None:
            own = inner[1] + {"parameters": schema}.get(inner[2], inner[2]) + inner[3]
            field = given
        if own is not None:
            error.param = own
            if error.message.startswith(field):
                error.message = own + error.message.removeprefix(field)
        raise


class Unsupported(ValueError):  # noqa: N818  reads as a sentence where it is raised
    """A known field that this server does not support, and therefore refuses."""

    def __init__(self, field: str) -> None:
        super().__init__(f"{field} is not supported by this server with this value; leave it out")
        self.field = field
        # With this detail the `anthropic` client sends the whole conversation instead of naming a thread.
        unsupported = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        self.details = unsupported if field == "thread" else None


class InvalidField(ValueError):  # noqa: N818  reads as a sentence where it is raised
    """A field with an invalid value, or in conflict with other fields."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field} {why}")
        self.field = field


def unavailable(message: str, retry_after_seconds: float | None = 1.0, *, started: bool = False) -> ApiError:
    """A 503: this replica cannot serve now; another one may. `started`: the engine had accepted the request."""
    return ApiError(503, message, headers=_retry_headers(retry_after_seconds) | ({} if started else NOT_STARTED))


def unknown_model(name: str) -> ApiError:
    """A 404 in OpenAI's words. The name is repeated only where it looks like a model name."""
    said = f"The model `{name}` does not exist." if _NAME.fullmatch(name) else "The model of that name does not exist."
    return ApiError(404, said, param="model")


def unknown_adapter(name: str) -> ApiError:
    """A 404 in vLLM's words. The name is repeated only where it looks like an adapter's."""
    said = f"The lora adapter '{name}'" if _NAME.fullmatch(name) else "The lora adapter of that name"
    return ApiError(404, f"{said} cannot be found.", param="lora_name")


def prompt_too_long(max_model_len: int, prompt_tokens: int, *, at_least: bool = False, param: str) -> ApiError:
    """A 400 in the words that client libraries recognise as a context-window error."""
    return ApiError(
        400,
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt has"
        f" {'at least ' if at_least else ''}{prompt_tokens} tokens. Please reduce its length.",
        param=param,
    )


def of_engine(error: Exception) -> ApiError:
    """Translate an engine's refusal to an ApiError."""
    match error:
        case Draining():
            return unavailable(error.reason, error.retry_after_seconds)
        case Overloaded():
            return ApiError(429, error.reason, headers=_retry_headers(error.retry_after_seconds) | NOT_STARTED)
        case Refused():
            return ApiError(400, str(error))
        case EngineDead():
            return unavailable("the engine of this replica has stopped")
        case _:
            raise error


def _retry_headers(seconds: float | None) -> dict[str, str]:
    """Retry headers: `Retry-After` in whole seconds, at least one; `retry-after-ms` is exact."""
    if seconds is None:
        return {}
    return {"Retry-After": str(max(1, math.ceil(seconds))), "retry-after-ms": str(max(1, math.ceil(seconds * 1000)))}


def of_validation(errors: Sequence[Any], body: Any = None) -> ApiError:
    """The first validation error of a body, without the client's values. `body`: tells fields from names of types."""
    first, keys = validation_errors.first_cause(errors, body)
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidField):
        return ApiError(400, str(cause), param=cause.field)
    # A key may hold any text of the client, a prompt included: only keys that look like a name are repeated.
    path = ".".join(str(part) if _KEY.fullmatch(str(part)) else "…" for part in keys)[:100]
    if isinstance(cause, Unsupported):
        prefix = f"{path}." if path else ""
        return ApiError(400, f"{prefix}{cause}", param=prefix + cause.field, details=cause.details)
    message = str(cause) if isinstance(cause, ValueError) else first["msg"]
    message = validation_errors.wrong_type(first, body, keys) or message
    return ApiError(400, f"{path}: {message}" if path else message, param=path or None)


def install(app: FastAPI) -> None:
    """Install exception handlers, so that all errors of the application have one format."""

    def answer(request: Request, error: ApiError) -> Response:
        # The admin port has no request id.
        return error.response(request.url.path, getattr(request.state, "request_id", ""), request.headers)

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return answer(request, error)

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return answer(request, of_validation(error.errors()))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        sentence = {
            404: "There is nothing at this path",
            405: "This path does not take this method",
        }.get(error.status_code, str(error.detail))
        return answer(request, ApiError(error.status_code, sentence, headers=error.headers))

    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("request failed", exc_info=error)
        return answer(request, ApiError(500, "the server failed; the cause is in its log"))

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)
