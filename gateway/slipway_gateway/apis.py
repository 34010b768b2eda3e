"""What differs between APIs that are routed alike: the field of the output limit, the shape of errors, the last event.

| path                 | field of the limit  | errors      | a stream ends with                                       |
|----------------------|---------------------|-------------|----------------------------------------------------------|
| /v1/chat/completions | `max_tokens`        | OpenAI's    | `data: [DONE]`, `data: {"error"`                         |
| /v1/completions      | `max_tokens`        | OpenAI's    | the same                                                 |
| /v1/responses        | `max_output_tokens` | OpenAI's    | `event: response.{completed,incomplete,failed}`, `error` |
| /v1/messages         | `max_tokens`        | Anthropic's | `event: message_stop`, `event: error`                    |
"""

from collections.abc import Mapping
from typing import Final

import msgspec
from aiohttp import web

from slipway_api.anthropic_errors import MESSAGES_PATH, REQUEST_ID_HEADER, anthropic_error, is_anthropic
from slipway_api.anthropic_models import speaks_anthropic
from slipway_gateway.errors import Refusal
from slipway_gateway.sse import error_event as chat_error_event

RESPONSES_PATH: Final = "/v1/responses"
# They count the tokens of a prompt and generate none.
COUNTING_PATHS: Final = ("/v1/messages/count_tokens", "/v1/responses/input_tokens")
# What they generate is limited and billed, and their streams can be continued on another replica.
GENERATING_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", RESPONSES_PATH, MESSAGES_PATH})


def limit_field(path: str) -> str:
    """The field of a body that says how many tokens an answer may have."""
    return "max_output_tokens" if path == RESPONSES_PATH else "max_tokens"


def refusal_response(
    refusal: Refusal, path: str, request_id: str, request_headers: Mapping[str, str] | None = None
) -> web.Response:
    """A refusal of the gateway itself, in the shape of the API that its request belongs to."""
    response = refusal.response()
    if not speaks_anthropic(path, request_headers or {}):
        return response
    body = anthropic_error(refusal.message, refusal.status, request_id)
    headers = {name: value for name, value in response.headers.items() if name[:8] != "Content-"}
    return web.json_response(body, status=refusal.status, headers=headers | {REQUEST_ID_HEADER: request_id})


def error_event(path: str, message: str, kind: str, status: int) -> bytes:
    """The last event of a stream that could not be finished."""
    if is_anthropic(path):
        return b"event: error\ndata: " + msgspec.json.encode(anthropic_error(message, status)) + b"\n\n"
    if path == RESPONSES_PATH:
        # The numbers of the events before it are not counted here; clients read this one for its message.
        body = {"type": "error", "code": "server_error", "message": message, "param": None, "sequence_number": 1 << 31}
        return b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n"
    return chat_error_event(message, kind, status)
