"""Anthropic's POST /v1/messages and /v1/messages/count_tokens, translated to chat and back."""

import json
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from slipway_api.anthropic_errors import anthropic_error
from slipway_runtime.server.bodies import read_body
from slipway_runtime.server.chat import answer_chat, count_prompt_tokens
from slipway_runtime.server.errors import ApiError, renamed_fields
from slipway_runtime.server.messages_types import FIELDS_OF_CHAT, CountTokensRequest, MessagesRequest
from slipway_runtime.server.middleware import new_id
from slipway_runtime.server.replica import Replica
from slipway_runtime.server.responses import call_id

router = APIRouter()

_encode: Final = msgspec.json.Encoder().encode


@router.post("/v1/messages")
async def create_message(http: Request) -> Response:
    """Generate the assistant's next message, as one body or as a stream of typed events."""
    replica: Replica = http.app.state.replica
    arrived = replica.clock()
    body = await read_body(http, MessagesRequest)
    chat = body.chat()
    id = (body.slipway_resume and body.slipway_resume.id) or new_id("msg").replace("-", "_", 1)
    with renamed_fields(FIELDS_OF_CHAT):
        return await answer_chat(http, chat, arrived, dialect=MessageEvents(id), id=id, route="messages")


@router.post("/v1/messages/count_tokens")
async def count_tokens(http: Request) -> dict[str, int]:
    """Count the prompt tokens of these messages."""
    chat = (await read_body(http, CountTokensRequest)).chat()
    with renamed_fields(FIELDS_OF_CHAT):
        return {"input_tokens": await count_prompt_tokens(http, chat)}


class MessageEvents:
    """Dialect of /v1/messages: translates a chat completion to a message; see `sse.Dialect`."""

    repeats = True  # the last events depend on the finish reason and on the earlier blocks

    def __init__(self, id: str) -> None:
        self._id = id
        self._has_begun = False
        self._blocks: list[str] = []  # the types of the blocks so far
        self._is_open = False  # whether the last block is open
        self._finish = ""
        self._stop: str | int | None = None
        self._usage: dict[str, Any] | None = None
        self._has_failed = False

    # --- Dialect

    def whole(self, completion: dict[str, Any]) -> dict[str, Any]:
        """The message object."""
        [choice] = completion["choices"]
        message = choice["message"]
        content: list[dict[str, Any]] = []
        if message.get("reasoning"):
            thinking = {"type": "thinking", "thinking": message["reasoning"]}
            content.append(thinking | {"signature": self._signature(len(content))})
        if message["content"]:
            content.append({"type": "text", "text": message["content"]})
        for index, call in enumerate(message.get("tool_calls") or ()):
            function = call["function"]
            content.append(self._tool_use(index, function["name"]) | {"input": _arguments(function["arguments"])})
        self._note_end(choice)
        self._blocks = [block["type"] for block in content]
        ended = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        return self._message(completion) | {"content": content} | ended | {"usage": _usage(completion["usage"])}

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        """The events of one chat chunk."""
        events = b""
        self._usage = chunk.get("usage") or self._usage
        if not self._has_begun:
            self._has_begun = True
            usage = (
                _usage(self._usage) | {"output_tokens": 0} if self._usage else {"input_tokens": 0, "output_tokens": 0}
            )
            events += _event("message_start", message=self._message(chunk) | {"usage": usage})
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("reasoning"):
                if not (self._is_open and self._blocks[-1] == "thinking"):
                    events += self._open({"type": "thinking", "thinking": "", "signature": ""})
                events += self._delta({"type": "thinking_delta", "thinking": delta["reasoning"]})
            if delta.get("content"):
                if not (self._is_open and self._blocks[-1] == "text"):
                    events += self._open({"type": "text", "text": ""})
                events += self._delta({"type": "text_delta", "text": delta["content"]})
            for call in delta.get("tool_calls", ()):
                function = call["function"]
                if "name" in function:
                    events += self._open(self._tool_use(call["index"], function["name"]))
                if function["arguments"]:
                    events += self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})
            self._note_end(choice)
        return events

    def replay(self, chunks: list[dict[str, Any]], tokens: int) -> None:
        """Restore the state of a stream of another replica."""
        for chunk in chunks:
            self.chunk(chunk)

    def failure(self, error: ApiError) -> bytes:
        """The error event."""
        self._has_failed = True
        return _event(
            "error",
            **{name: value for name, value in anthropic_error(error.message, error.status).items() if name != "type"},
        )

    def end(self) -> bytes:
        """Close the last block and end the message."""
        if self._has_failed:
            return b""
        if self._finish not in {"stop", "length", "tool_calls"}:
            return self.failure(ApiError(504, "the deadline of the request has passed"))
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        usage = _usage(self._usage) if self._usage is not None else {"output_tokens": 0}
        return self._close() + _event("message_delta", delta=delta, usage=usage) + _event("message_stop")

    # --- blocks

    def _open(self, block: dict[str, Any]) -> bytes:
        events = self._close()
        self._blocks.append(block["type"])
        self._is_open = True
        return events + _event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        events = b""
        if self._blocks[-1] == "thinking":
            events = self._delta({"type": "signature_delta", "signature": self._signature(len(self._blocks) - 1)})
        return events + _event("content_block_stop", index=len(self._blocks) - 1)

    def _signature(self, index: int) -> str:
        """The signature of a thinking block, which clients expect; this server does not verify it."""
        return call_id("unsigned_", self._id, index)

    def _tool_use(self, index: int, name: str) -> dict[str, Any]:
        return {"type": "tool_use", "id": call_id("toolu_", self._id, index), "name": name, "input": {}}

    # --- the message

    def _message(self, chunk: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": chunk["model"],
            "system_fingerprint": chunk["system_fingerprint"],
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _note_end(self, choice: dict[str, Any]) -> None:
        if choice["finish_reason"] is not None:
            self._finish, self._stop = choice["finish_reason"], choice["stop_reason"]

    @property
    def _stop_reason(self) -> str:
        if self._finish == "length":
            return "max_tokens"
        if "tool_use" in self._blocks:
            return "tool_use"
        return "stop_sequence" if self._stop_sequence is not None else "end_turn"

    @property
    def _stop_sequence(self) -> str | None:
        return self._stop if isinstance(self._stop, str) else None


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + _encode({"type": kind, **fields}) + b"\n\n"


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """The usage as this API counts it: `input_tokens` excludes cached tokens."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call as an object; empty where the answer was cut off inside of them."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
