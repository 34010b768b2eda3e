"""POST /v1/chat/completions: answers a list of messages with the assistant's next message."""

import time
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from slipway_runtime.messages import Grammar, TokenLogprobs
from slipway_runtime.server.answer_parts import AnswerParser, ReasoningUse, Segment, binds_at_once
from slipway_runtime.server.bodies import note_ignored, read_body
from slipway_runtime.server.calls import Call, answer
from slipway_runtime.server.effort import effort_arguments
from slipway_runtime.server.errors import ApiError
from slipway_runtime.server.generation import Delta
from slipway_runtime.server.harmony import header_of_bound_answer
from slipway_runtime.server.logprobs import LogprobWriter
from slipway_runtime.server.middleware import new_id
from slipway_runtime.server.openai_types import ChatRequest
from slipway_runtime.server.prompt import Prompt
from slipway_runtime.server.reasoning import Part, ReasoningEvent, form_of
from slipway_runtime.server.replica import LoadedModel, Replica
from slipway_runtime.server.request_context import Caller, served_by
from slipway_runtime.server.response_builder import ChoiceWriter
from slipway_runtime.server.sse import Dialect, OpenAIChunks
from slipway_runtime.server.structured import note_unenforced
from slipway_runtime.server.tool_calls import CallDelta, CallStart, TextEvent
from slipway_runtime.server.tools import ToolUse, bound_of, check_bound, tool_use, unenforced_keywords

router = APIRouter()


class ChatFormat:
    """The response format of chat completions."""

    def __init__(
        self,
        body: ChatRequest,
        tools: ToolUse,
        reasoning: ReasoningUse,
        logprobs: LogprobWriter,
        *,
        id: str = "",
        route: str = "chat",
    ) -> None:
        """`id`: the response id, where the requested API has another form of id."""
        resume = body.slipway_resume
        own = f"chatcmpl-{body.request_id}" if body.request_id else new_id("chatcmpl")
        self.route = route
        self.id = (resume and resume.id) or id or own
        self._created = (resume and resume.created) or int(time.time())
        self._body = body
        self._tools = tools
        self._reasoning = reasoning
        self._logprobs = logprobs

    def writer(self, index: int, prompt: Prompt) -> ChoiceWriter:
        """A writer for one answer."""
        splitter = self._reasoning.splitter(prompt, self._tools)
        parser = AnswerParser(splitter, self._tools.parser(), self._reasoning)
        return ChatWriter(index, self._body, self._tools, parser, self._logprobs)

    def envelope(self, choices: list[dict[str, Any]], *, streamed: bool) -> dict[str, Any]:
        """A chat chunk, or the whole chat completion."""
        kind = "chat.completion.chunk" if streamed else "chat.completion"
        whole: dict[str, Any] = {"id": self.id, "object": kind, "created": self._created, "choices": choices}
        if not streamed:  # keys that vLLM always has
            whole |= {"prompt_logprobs": None, "prompt_token_ids": None}
        for choice in choices:
            # As in vLLM, these stand beside the choices: every answer has the same prompt.
            if "prompt_logprobs" in choice:
                whole["prompt_logprobs"] = choice.pop("prompt_logprobs") or whole.get("prompt_logprobs") or []
        return whole


class ChatWriter:
    """Writes one answer as a chat message."""

    def __init__(
        self, index: int, body: ChatRequest, tools: ToolUse, parser: AnswerParser, logprobs: LogprobWriter
    ) -> None:
        self._index = index
        self._body = body
        self._tools = tools
        self._parser = parser
        self._logprobs = logprobs
        self._has_calls = False
        # With `echo`, the answer begins with the text of the message that is continued.
        self._echo = body.messages[-1].text if body.echo and body.continue_final_message else ""

    def opening(self) -> list[dict[str, Any]]:
        """The first event: the role of the message."""
        return [self._choice({"delta": {"role": "assistant", "content": self._echo}})]

    @property
    def reasoning_tokens(self) -> int | None:
        """The tokens of the reasoning so far; None where no reasoning is looked for."""
        return self._parser.reasoning_tokens if self._parser.splits else None

    def piece(self, delta: Delta) -> list[dict[str, Any]]:
        """Events for the parts of a delta, each with the logprobs of its tokens; the last one has the finish reason."""
        choices: list[dict[str, Any]] = []
        segments = self._segments(delta)
        for segment in segments:
            deltas = self._deltas(segment.parts)
            wants_logprobs = self._body.logprobs and bool(segment.logprobs)
            is_end = delta.finish_reason is not None and segment is segments[-1]
            if not deltas and (is_end or wants_logprobs):
                deltas = [{}]
            said = [self._choice({"delta": each}) for each in deltas]
            if said and wants_logprobs:
                said[-1]["logprobs"] = self._logprobs.chat(tuple(segment.logprobs))
            choices += said
        if delta.finish_reason is not None:
            choices[-1] |= {"finish_reason": self._finish(delta), "stop_reason": delta.stop_reason}
        return choices

    def whole(self, deltas: list[Delta]) -> dict[str, Any]:
        """The choice with the whole message."""
        text, reasoning = self._echo, ""
        calls: list[dict[str, Any]] = []
        sampled: list[TokenLogprobs] = []
        for segment in (segment for delta in deltas for segment in self._segments(delta)):
            sampled += segment.logprobs
            for event in segment.parts:
                match event:
                    case TextEvent():
                        text += event.text
                    case ReasoningEvent():
                        reasoning += event.text
                    case CallStart():
                        function = {"name": event.name, "arguments": ""}
                        calls.append({"id": event.id, "type": "function", "function": function})
                    case CallDelta():
                        calls[event.index]["function"]["arguments"] += event.arguments
        last = deltas[-1]
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        # As in vLLM, also without any: attributes of the client's message objects must exist.
        message |= _reasoning(reasoning or None)
        if calls:
            message["tool_calls"] = calls
        choice = self._choice({"message": message, "stop_reason": last.stop_reason})
        choice["finish_reason"] = self._finish(last)
        if self._body.logprobs:
            choice["logprobs"] = self._logprobs.chat(tuple(sampled))
        if self._body.prompt_logprobs is not None:
            scored = next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), ())
            choice["prompt_logprobs"] = self._logprobs.prompt(scored)
        return choice

    def _segments(self, delta: Delta) -> list[Segment]:
        segments = self._parser.read(delta)
        self._has_calls |= any(isinstance(part, CallStart) for segment in segments for part in segment.parts)
        return segments

    def _deltas(self, parts: list[Part]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for event in parts:
            match event:
                case TextEvent():
                    deltas.append({"content": event.text})
                case ReasoningEvent():
                    deltas.append(_reasoning(event.text))
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


def _reasoning(text: str | None) -> dict[str, str | None]:
    """The reasoning under both of its names: DeepSeek's, which most clients read, and vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


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
    tools = tool_use(body, model.prompts.template, has_channels=_has_channels(body, model))
    bound = bound_of(body, tools)
    reasoning = reasoning_use(body, model, bound[0] if bound is not None else None, route)
    prompt = await prompt_of(body, model, tools, http)
    grammar: Grammar | None = None
    if bound is not None:
        grammar, field = reasoning.bound(bound[0], prompt), bound[1]
        await check_bound(model.grammars, (grammar, field), tools)
        note_unenforced(http, unenforced_keywords(body, tools))
    logprobs = LogprobWriter(model.prompts.tokens, as_ids=bool(body.return_tokens_as_token_ids))
    return await answer(
        Call(
            http=http,
            body=body,
            caller=caller,
            served=served,
            prompts=[prompt],
            format=ChatFormat(body, tools, reasoning, logprobs, id=id, route=route),
            arrived=arrived,
            prompt_field="messages",
            otherwise_max_tokens=None,
            grammar=grammar,
            keeps_special_tokens=tools.needs_special_tokens
            or reasoning.needs_special_tokens(model.prompts.files.tokenizer),
            dialect=dialect or OpenAIChunks(),
        )
    )


def reasoning_use(body: ChatRequest, model: LoadedModel, grammar: Grammar | None, route: str) -> ReasoningUse:
    """How the reasoning of the answers to a request is found."""
    form = form_of(model.prompts.template.source, model.reasoning_parser)
    return ReasoningUse(
        form=form,
        is_bound=_is_bound(body, model, grammar),
        is_shown=body.include_reasoning is not False,
        has_logprobs=route == "chat",  # the Responses API has logprobs of its messages only
        continued=body.messages[-1].text if body.continue_final_message else None,
    )


def _has_channels(body: ChatRequest, model: LoadedModel) -> bool:
    """Whether the answer begins with the header of a channel, as gpt-oss writes it, and may think there."""
    is_off = body.reasoning_effort == "none" or (body.chat_template_kwargs or {}).get("enable_thinking") is False
    begins = body.add_generation_prompt and not body.continue_final_message
    return form_of(model.prompts.template.source, model.reasoning_parser) == "harmony" and begins and not is_off


def _is_bound(body: ChatRequest, model: LoadedModel, grammar: Grammar | None) -> bool:
    """Whether a grammar binds the answer from its first token, so that it has no reasoning."""
    thinks_in_tags = form_of(model.prompts.template.source, model.reasoning_parser) == "think"
    return binds_at_once(grammar) and not thinks_in_tags and not _has_channels(body, model)


async def count_prompt_tokens(http: Request, body: ChatRequest) -> int:
    """The number of tokens of a conversation's prompt; raises ApiError as `answer_chat` does."""
    model = served_by(http.app.state.replica, body.model, http).model
    tools = tool_use(body, model.prompts.template, has_channels=_has_channels(body, model))
    return len((await prompt_of(body, model, tools, http)).token_ids)


async def prompt_of(body: ChatRequest, model: LoadedModel, tools: ToolUse, http: Request) -> Prompt:
    """The prompt of a conversation; raises ApiError 400 if none can be made. Notes an effort without effect."""
    bound = bound_of(body, tools)
    form = form_of(model.prompts.template.source, model.reasoning_parser)
    is_bound = _is_bound(body, model, bound[0] if bound is not None else None)
    has_header = is_bound and form == "harmony" and body.add_generation_prompt
    prompt = await model.prompts.chat(
        body.messages,
        tools=tools.shown,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_arguments=_template_arguments(body, model, http, is_bound=is_bound),
        add_special_tokens=bool(body.add_special_tokens),
        keep=body.truncate_prompt_tokens,
        opening=header_of_bound_answer(tools.name) if has_header else "",
    )
    if not prompt.token_ids:
        raise ApiError(400, "the prompt is empty: at least one token is needed", param="messages")
    return prompt


# The reasoning effort has another name in each API.
_EFFORT: Final = {"/v1/responses": "reasoning.effort", "/v1/messages": "output_config.effort"}


def _template_arguments(body: ChatRequest, model: LoadedModel, http: Request, *, is_bound: bool) -> dict[str, Any]:
    """Extra variables of the chat template. What the client names by `chat_template_kwargs` wins over all others."""
    arguments: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        template = model.prompts.template
        arguments = effort_arguments(body.reasoning_effort, template.variables, template.words)
        if not arguments:
            path = http.url.path
            name = next((name for prefix, name in _EFFORT.items() if path.startswith(prefix)), "reasoning_effort")
            note_ignored(http, name)
    if is_bound:
        # Read by the templates of Qwen3 and SmolLM3. Without a reasoning parser a grammar binds the thoughts too, so
        # the prompt says that there are none.
        arguments |= {"enable_thinking": False}
    return arguments | (body.chat_template_kwargs or {})
