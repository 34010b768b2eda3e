"""POST /v1/responses: OpenAI's newer API, translated to chat and back; no state is kept between requests."""

import time
from hashlib import sha256
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from slipway_runtime.server.bodies import read_body
from slipway_runtime.server.chat import answer_chat, count_prompt_tokens
from slipway_runtime.server.errors import ApiError, renamed_fields
from slipway_runtime.server.middleware import new_id
from slipway_runtime.server.replica import Replica
from slipway_runtime.server.responses_types import FIELDS_OF_CHAT, OtherTool, ResponsesRequest

router = APIRouter()

EVENTS_PER_TOKEN: Final = 64  # upper bound, so that the sequence numbers of a resumed stream stay above earlier ones
_encode: Final = msgspec.json.Encoder().encode


@router.post("/v1/responses")
async def create_response(http: Request) -> Response:
    """Generate the answer to an input, as one body or as a stream of typed events."""
    replica: Replica = http.app.state.replica
    arrived = replica.clock()
    body = await read_body(http, ResponsesRequest)
    chat = body.chat()
    resume = body.slipway_resume
    id = (resume and resume.id) or new_id("resp").replace("-", "_", 1)
    dialect = ResponseEvents(body, id, (resume and resume.created) or int(time.time()))
    with renamed_fields(FIELDS_OF_CHAT):
        return await answer_chat(http, chat, arrived, dialect=dialect, id=id, route="responses")


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(http: Request) -> dict[str, Any]:
    """Count the prompt tokens of this input."""
    chat = (await read_body(http, ResponsesRequest)).chat()
    with renamed_fields(FIELDS_OF_CHAT):
        return {"object": "response.input_tokens", "input_tokens": await count_prompt_tokens(http, chat)}


@router.api_route("/v1/responses/{name:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
async def no_kept_response(name: str) -> Response:
    """Refuse to read, cancel or delete a response: none is stored."""
    raise ApiError(404, "this server keeps no responses: each is complete in its own answer")


class ResponseEvents:
    """Dialect of /v1/responses: translates a chat completion to a response object; see `sse.Dialect`."""

    repeats = True  # the last event holds the whole response

    def __init__(self, body: ResponsesRequest, id: str, created: int) -> None:
        self._body = body
        self._namespaces = body.namespaces
        self._id = id
        self._unique = id.partition("_")[2] or id
        self._created = created
        self._sequence = 0
        self._has_begun = False
        self._output: list[dict[str, Any]] = []
        self._is_open = False  # whether the last item of the output is open
        self._pending_logprobs: list[dict[str, Any]] = []  # of tokens whose text is held back
        self._finish: str = ""
        self._usage: dict[str, Any] | None = None
        self._signature: dict[str, Any] = {}  # model and fingerprint
        self._failure: ApiError | None = None

    # --- Dialect

    def whole(self, completion: dict[str, Any]) -> dict[str, Any]:
        """The response object."""
        [choice] = completion["choices"]
        message = choice.pop("message")
        calls = [{"index": i} | call for i, call in enumerate(message.get("tool_calls") or ())]
        choice["delta"] = {"content": message["content"], "tool_calls": calls, "reasoning": message.get("reasoning")}
        self.chunk(completion)
        self._close(self._item_status)
        return self._response(self._status)

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        """The events of one chat chunk."""
        events = b""
        self._signature = {name: chunk[name] for name in ("model", "system_fingerprint")}
        self._usage = chunk.get("usage") or self._usage
        if not self._has_begun:
            self._has_begun = True
            events += self._event("response.created", response=self._response("in_progress"))
            events += self._event("response.in_progress", response=self._response("in_progress"))
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if choice.get("logprobs") is not None and self._body.wants_logprobs:
                self._pending_logprobs += [_logprob(token) for token in choice["logprobs"]["content"]]
            if delta.get("reasoning"):
                events += self._reasoning(delta["reasoning"])
            if delta.get("content"):
                events += self._text(delta["content"])
            for call in delta.get("tool_calls", ()):
                events += self._call(call)
            self._finish = choice["finish_reason"] or self._finish
        return events

    def replay(self, chunks: list[dict[str, Any]], tokens: int) -> None:
        """Restore the state of a stream of another replica; later sequence numbers are above those already sent."""
        for chunk in chunks:
            self.chunk(chunk)
        self._finish = ""
        self._sequence = max(self._sequence, EVENTS_PER_TOKEN * (tokens + 1))

    def failure(self, error: ApiError) -> bytes:
        """The event of a failed response."""
        self._failure = error
        return b""

    def end(self) -> bytes:
        """Close the last item and end the response."""
        if self._failure is None and self._finish not in {"stop", "length", "tool_calls"}:
            self._failure = ApiError(504, "the deadline of the request has passed")
        events = self._close(self._item_status)
        status = self._status
        return events + self._event(f"response.{status}", response=self._response(status))

    # --- items of the output

    @property
    def _status(self) -> str:
        if self._failure is not None:
            return "failed"
        return "incomplete" if self._finish == "length" else "completed"

    @property
    def _item_status(self) -> str:
        return "completed" if self._status == "completed" else "incomplete"

    def _text(self, text: str) -> bytes:
        events = b""
        if not (self._is_open and self._output[-1]["type"] == "message"):
            events = self._open({"id": self._name("msg"), "type": "message", "role": "assistant", "content": []})
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            events += self._of_item("response.content_part.added", content_index=0, part=part)
            self._output[-1]["content"].append(part)
        part = self._output[-1]["content"][0]
        logprobs, self._pending_logprobs = self._pending_logprobs, []
        part["text"] += text
        part["logprobs"] += logprobs
        return events + self._of_item("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _reasoning(self, text: str) -> bytes:
        events = b""
        if not (self._is_open and self._output[-1]["type"] == "reasoning"):
            item = {"id": self._name("rs"), "type": "reasoning", "summary": [], "content": []}
            events = self._open(item | {"encrypted_content": None})
            part = {"type": "reasoning_text", "text": ""}
            events += self._of_item("response.content_part.added", content_index=0, part=part)
            self._output[-1]["content"].append(part)
        self._output[-1]["content"][0]["text"] += text
        return events + self._of_item("response.reasoning_text.delta", content_index=0, delta=text)

    def _call(self, call: dict[str, Any]) -> bytes:
        events, function = b"", call["function"]
        if "name" in function:
            space, name = self._namespaces.get(function["name"], ("", function["name"]))
            item = {"id": self._name("fc"), "type": "function_call", "name": name, "arguments": ""}
            if space:
                item["namespace"] = space
            # Derived from the response id, not random: a replica that resumes the stream makes the same id.
            item["call_id"] = call_id("call_", self._id, call["index"])
            events = self._open(item)
        if function["arguments"]:
            self._output[-1]["arguments"] += function["arguments"]
            events += self._of_item("response.function_call_arguments.delta", delta=function["arguments"])
        return events

    def _open(self, item: dict[str, Any]) -> bytes:
        events = self._close("completed")
        self._output.append(item | {"status": "in_progress"})
        self._is_open = True
        return events + self._event(
            "response.output_item.added", output_index=len(self._output) - 1, item=self._output[-1]
        )

    def _close(self, status: str) -> bytes:
        if not self._is_open:
            return b""
        item, self._is_open = self._output[-1], False
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            part["logprobs"] += self._pending_logprobs
            self._pending_logprobs = []
            done = {"text": part["text"], "logprobs": part["logprobs"]}
            events = self._of_item("response.output_text.done", content_index=0, **done)
            events += self._of_item("response.content_part.done", content_index=0, part=part)
        elif item["type"] == "reasoning":
            part = item["content"][0]
            events = self._of_item("response.reasoning_text.done", content_index=0, text=part["text"])
            events += self._of_item("response.content_part.done", content_index=0, part=part)
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            events = self._of_item("response.function_call_arguments.done", **done)
        return events + self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _name(self, kind: str) -> str:
        return f"{kind}_{self._unique}_{len(self._output)}"

    # --- events and the response object

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._output[-1]["id"], output_index=len(self._output) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + _encode(body) + b"\n\n"

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        tools = [tool.model_dump() for tool in body.tools or () if not isinstance(tool, OtherTool)]
        choice = body.tool_choice or "auto"
        text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text is not None else {}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": _error(self._failure) if self._failure is not None else None,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "output": self._output,
            "frequency_penalty": body.frequency_penalty or 0.0,
            "presence_penalty": body.presence_penalty or 0.0,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}} | text,
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": tools,
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "user": body.user,
            "metadata": body.metadata or {},
            **self._signature,
            # Last: the gateway reads the usage from the end of an answer.
            "usage": _usage(self._usage) if self._usage is not None and status != "in_progress" else None,
        }


def call_id(prefix: str, response_id: str, index: int) -> str:
    """The id of a tool call, derived from the response id: equal on each replica."""
    return prefix + sha256(f"{response_id}/{index}".encode()).hexdigest()[:24]


def _logprob(token: dict[str, Any]) -> dict[str, Any]:
    return {name: token[name] for name in ("token", "logprob", "bytes", "top_logprobs")}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        },
        "total_tokens": usage["total_tokens"],
    }


def _error(error: ApiError) -> dict[str, Any]:
    return {"code": "rate_limit_exceeded" if error.status == 429 else "server_error", "message": error.message}
