"""POST /v1/chat/completions: answers a list of messages with the assistant's next message."""

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from slipway_runtime.server.answering import Writer
from slipway_runtime.server.bodies import read_body
from slipway_runtime.server.calls import Call, answer
from slipway_runtime.server.errors import ApiError
from slipway_runtime.server.generation import Delta
from slipway_runtime.server.logprobs import LogprobWriter
from slipway_runtime.server.middleware import new_id
from slipway_runtime.server.openai_types import ChatRequest
from slipway_runtime.server.prompt import Prompt
from slipway_runtime.server.replica import LoadedModel, Replica
from slipway_runtime.server.request_context import Caller, served_by
from slipway_runtime.server.sse import Dialect, OpenAIChunks
from slipway_runtime.server.structured import grammar_of
from slipway_runtime.server.tool_calls import CallDelta, CallStart, Event, TextEvent
from slipway_runtime.server.tools import ToolUse, tool_use

router = APIRouter()


class ChatShape:
    """The response format of chat completions."""

    def __init__(
        self, body: ChatRequest, tools: ToolUse, logprobs: LogprobWriter, *, id: str = "", route: str = "chat"
    ) -> None:
        """`id`: the response id, where the requested API has another form of id."""
        resume = body.slipway_resume
        own = f"chatcmpl-{body.request_id}" if body.request_id else new_id("chatcmpl")
        self.route = route
        self.id = (resume and resume.id) or id or own
        self._created = (resume and resume.created) or int(time.time())
        self._body = body
        self._tools = tools
        self._logprobs = logprobs

    def writer(self, index: int, prompt: Prompt) -> Writer:
        """A writer for one answer."""
        return ChatWriter(index, self._body, self._tools, self._logprobs)

    def envelope(self, choices: list[dict[str, Any]], *, streamed: bool) -> dict[str, Any]:
        """A chat chunk, or the whole chat completion."""
        kind = "chat.completion.chunk" if streamed else "chat.completion"
        whole: dict[str, Any] = {"id": self.id, "object": kind, "created": self._created, "choices": choices}
        for choice in choices:
            # As in vLLM, these stand beside the choices: every answer has the same prompt.
            if "prompt_logprobs" in choice:
                whole["prompt_logprobs"] = choice.pop("prompt_logprobs")
        return whole


class ChatWriter:
    """Writes one answer as a chat message."""

    def __init__(self, index: int, body: ChatRequest, tools: ToolUse, logprobs: LogprobWriter) -> None:
        self._index = index
        self._body = body
        self._tools = tools
        self._parser = tools.parser()
        self._logprobs = logprobs
        self._has_calls = False
        # With `echo`, the answer begins with the text of the message that is continued.
        self._echo = body.messages[-1].text if body.echo and body.continue_final_message else ""

    def opening(self) -> list[dict[str, Any]]:
        """The first event: the role of the message."""
        return [self._choice({"delta": {"role": "assistant", "content": self._echo}})]

    def piece(self, delta: Delta) -> list[dict[str, Any]]:
        """Events for the text and tool calls of a delta; the last one has its logprobs and finish reason."""
        deltas = self._deltas(self._events(delta))
        wants_logprobs = self._body.logprobs and bool(delta.logprobs)
        if not deltas and (delta.finish_reason is not None or wants_logprobs):
            deltas = [{}]
        choices = [self._choice({"delta": each}) for each in deltas]
        if choices and wants_logprobs:
            choices[-1]["logprobs"] = self._logprobs.chat(delta.logprobs)
        if delta.finish_reason is not None:
            choices[-1] |= {"finish_reason": self._finish(delta), "stop_reason": delta.stop_reason}
        return choices

    def whole(self, deltas: list[Delta]) -> dict[str, Any]:
        """The choice with the whole message."""
        text = self._echo
        calls: list[dict[str, Any]] = []
        for delta in deltas:
            for event in self._events(delta):
                match event:
                    case TextEvent():
                        text += event.text
                    case CallStart():
                        function = {"name": event.name, "arguments": ""}
                        calls.append({"id": event.id, "type": "function", "function": function})
                    case CallDelta():
                        calls[event.index]["function"]["arguments"] += event.arguments
        last = deltas[-1]
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = calls
        choice = self._choice({"message": message, "stop_reason": last.stop_reason})
        choice["finish_reason"] = self._finish(last)
        if self._body.logprobs:
            sampled = tuple(token for delta in deltas for token in delta.logprobs)
            choice["logprobs"] = self._logprobs.chat(sampled)
        if self._body.prompt_logprobs is not None:
            scored = next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), ())
            choice["prompt_logprobs"] = self._logprobs.prompt(scored)
        return choice

    def _events(self, delta: Delta) -> list[Event]:
        if self._parser is None:
            return [TextEvent(delta.text)] if delta.text else []
        events = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            events += self._parser.finish()
        self._has_calls |= any(isinstance(event, CallStart) for event in events)
        return events

    def _deltas(self, events: list[Event]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for event in events:
            match event:
                case TextEvent():
                    deltas.append({"content": event.text})
                case CallStart():
                    function = {"name": event.name, "arguments": ""}
                    call = {"index": event.index, "id": event.id, "type": "function", "function": function}
                    deltas.append({"tool_calls": [call]})
                case CallDelta():
                    call = {"index": event.index, "function": {"arguments": event.arguments}}
                    deltas.append({"tool_calls": [call]})
        return deltas

    def _finish(self, delta: Delta) -> str:
        if self._has_calls and delta.finish_reason == "stop":
            return self._tools.finish_reason
        return str(delta.finish_reason)

    def _choice(self, said: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, **said, "logprobs": None, "finish_reason": None}


@router.post("/v1/chat/completions")
async def create_chat_completion(http: Request) -> Response:
    """Generate the next message of a conversation, as one body or as a stream."""
    replica: Replica = http.app.state.replica
    arrived = replica.clock()
    body = await read_body(http, ChatRequest)
    return await answer_chat(http, body, arrived)


async def answer_chat(
    http: Request,
    body: ChatRequest,
    arrived: float,
    *,
    dialect: Dialect | None = None,
    id: str = "",
    route: str = "chat",
) -> Response:
    """Answer a chat request, possibly translated from another API, whose `dialect` then writes the answer."""
    replica: Replica = http.app.state.replica
    caller = Caller.of(http)
    caller.check(body)
    served = served_by(replica, body.model, http)
    model = served.model
    tools = tool_use(body, model.prompts.template)
    bound = grammar_of(body)
    if bound is None and tools.grammar is not None:
        bound = tools.grammar, "tools"
    if bound is not None:
        await model.grammars.check(*bound)
    prompt = await prompt_of(body, model, tools)
    logprobs = LogprobWriter(model.prompts.tokens, as_ids=bool(body.return_tokens_as_token_ids))
    return await answer(
        Call(
            http=http,
            body=body,
            caller=caller,
            served=served,
            prompts=[prompt],
            shape=ChatShape(body, tools, logprobs, id=id, route=route),
            arrived=arrived,
            prompt_field="messages",
            otherwise_max_tokens=None,
            grammar=bound[0] if bound is not None else None,
            keeps_special_tokens=tools.needs_special_tokens,
            dialect=dialect or OpenAIChunks(),
        )
    )


async def prompt_of(body: ChatRequest, model: LoadedModel, tools: ToolUse) -> Prompt:
    """The prompt of a conversation; raises ApiError 400 where none can be made."""
    prompt = await model.prompts.chat(
        body.messages,
        tools=tools.shown,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_arguments=_template_arguments(body, model),
        add_special_tokens=bool(body.add_special_tokens),
        keep=body.truncate_prompt_tokens,
    )
    if not prompt.token_ids:
        raise ApiError(400, "the prompt is empty: at least one token is needed", param="messages")
    return prompt


def _template_arguments(body: ChatRequest, model: LoadedModel) -> dict[str, Any]:
    """Extra variables of the chat template; a reasoning effort that the template does not read is refused."""
    arguments = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is None:
        return arguments
    if model.prompts.template.knows("reasoning_effort"):
        return arguments | {"reasoning_effort": body.reasoning_effort}
    if body.reasoning_effort != "none":
        raise ApiError(
            400, "this model's chat template knows no reasoning_effort; leave it out", param="reasoning_effort"
        )
    return arguments
