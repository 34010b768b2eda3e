"""Errors in the format of Anthropic's Messages API, which gateway and runtime answer alike under /v1/messages."""

from collections.abc import Mapping
from typing import Any, Final

MESSAGES_PATH: Final = "/v1/messages"
REQUEST_ID_HEADER: Final = "request-id"  # of responses: Anthropic's clients report it with each error

_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_anthropic(path: str) -> bool:
    """Whether Anthropic's API has this path."""
    return f"{path}/".startswith(f"{MESSAGES_PATH}/")


def anthropic_error(
    message: str, status: int, request_id: str = "", details: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The JSON body of an error; a status without a type of its own gets the general one of its class."""
    otherwise = "api_error" if status >= 500 else "invalid_request_error"
    inner = {"type": _TYPES.get(status, otherwise), "message": message} | ({"details": details} if details else {})
    error = {"type": "error", "error": inner}
    return error | ({"request_id": request_id} if request_id else {})
