"""The wire types of Anthropic's POST /v1/messages, and their translation to a chat request.

Text, tool use and tool results are supported; images, documents and tools that run on Anthropic's servers are refused
with a sentence. `cache_control` is accepted and ignored: all prefixes are cached automatically. Thinking is part of the
answer where `thinking` asks for it. `max_tokens` above the context means as many as fit: the field is mandatory, and
clients send a fixed number made for Anthropic's models.
"""

import json
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from slipway_runtime.server.bodies import RequestBody, checked, only_types
from slipway_runtime.server.chat_types import MAX_TOOLS
from slipway_runtime.server.errors import ApiError, InvalidField, Unsupported, renamed_fields
from slipway_runtime.server.openai_types import LONGEST_STOP, MAX_MESSAGES, ChatRequest, Count, Effort, Number, Resume

MAX_STOP_SEQUENCES: Final = 16
FIELDS_OF_CHAT = {  # their names in this API, for errors
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
}


class CacheControl(RequestBody):
    """A cache breakpoint; without effect, because every prefix is cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = None


class Cacheable(RequestBody):
    """Base class of objects with a `cache_control` field."""

    cache_control: CacheControl | None = None


class TextBlock(Cacheable):
    """A text block."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = Field(default=None, max_length=0)


class ToolUseBlock(Cacheable):
    """A tool call of the assistant."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=256)
    name: str
    input: dict[str, Any]
    caller: Any = None  # part of blocks that clients send back unchanged


class ThinkingBlock(RequestBody):
    """Thinking of an earlier turn, for chat templates that show it. Redacted thinking is dropped."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""
    signature: str | None = None
    data: str | None = None  # redacted thinking


_ResultBlock = Annotated[TextBlock, only_types("text", supported="text blocks in the result of a tool")]
_Result = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[_ResultBlock], Tag("blocks")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "blocks"),
]


class ToolResultBlock(Cacheable):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=256)
    content: _Result | None = None
    is_error: bool | None = None


Block = Annotated[
    Annotated[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, Discriminator("type")],
    only_types(
        "text", "tool_use", "tool_result", "thinking", "redacted_thinking",
        supported="text, tool_use, tool_result and thinking blocks",
    ),
]  # fmt: skip


_SystemBlock = Annotated[TextBlock, only_types("text", supported="text blocks")]
_System = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[_SystemBlock], Tag("blocks")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "blocks"),
]
_ONLY_OWN_TOOLS = only_types(None, "custom", supported="tools that the client runs (of type custom)")


class Message(RequestBody):
    """One message of the conversation."""

    role: Literal["user", "assistant"]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[Block], Tag("blocks")],
        Discriminator(lambda value: "text" if isinstance(value, str) else "blocks"),
    ]


class ToolDefinition(Cacheable):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # without effect: arguments are streamed as early as possible
    input_examples: list[Any] | None = Field(default=None, max_length=0)


class ToolChoice(RequestBody):
    """Whether and which tool must be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise InvalidField("tool_choice", "of type tool names one, and no other type does")
        return self


class OutputFormat(RequestBody):
    """The format of the answer's text: a JSON schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestBody):
    """The format of the answer, and the reasoning effort where the chat template supports it."""

    format: OutputFormat | None = None
    effort: Effort | None = None


class Thinking(RequestBody):
    """Whether the model thinks first, and the client gets its thinking. `adaptive` leaves the first to the model."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None  # without effect: `max_tokens` bounds thinking and answer together
    display: Literal["summarized", "omitted"] | None = None  # there are no summaries: all of it, or nothing


class ContextManagement(RequestBody):
    """What to clear from earlier turns. Their thinking is left to the chat template, so edits of it change nothing."""

    edits: list[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _only_thinking(self) -> Self:
        if not all(str(edit.get("type")).startswith("clear_thinking_") for edit in self.edits or ()):
            raise InvalidField("context_management", "is supported for thinking alone: nothing else is cleared here")
        return self


class Metadata(RequestBody):
    """Metadata of the caller; does not change the answer."""

    user_id: str | None = None


class CountTokensRequest(Cacheable):
    """POST /v1/messages/count_tokens: the fields that make the prompt."""

    model: str = Field(default="", max_length=1024)
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: _System | None = None
    tools: list[Annotated[ToolDefinition, _ONLY_OWN_TOOLS]] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    context_management: ContextManagement | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat(self) -> ChatRequest:
        """Translate to a chat request; raises ApiError 400 with the field names of this API."""
        with renamed_fields(FIELDS_OF_CHAT):
            return checked(_TranslatedChat, self._fields())

    def _fields(self) -> dict[str, Any]:
        messages = [message for one in self.messages for message in _translated(one)]
        if system := _text(self.system or ""):
            messages.insert(0, {"role": "system", "content": system})
        fields: dict[str, Any] = {"model": self.model, "messages": messages}
        if messages[-1]["role"] == "assistant":
            fields["continue_final_message"] = True  # the answer continues the last message
        fields["chat_template_kwargs"] = self._thinking_arguments() | (self.chat_template_kwargs or {})
        if self.tools:
            fields["tools"] = [{"type": "function", "function": _function(tool)} for tool in self.tools]
        if (choice := self.tool_choice) is not None:
            words = {"auto": "auto", "any": "required", "none": "none"}
            named = {"type": "function", "function": {"name": choice.name}}
            fields["tool_choice"] = words.get(choice.type, named)
            if choice.disable_parallel_tool_use:
                fields["parallel_tool_calls"] = False
        if (config := self.output_config) is not None:
            if config.format is not None:
                schema = {"name": "answer", "schema": config.format.schema_, "strict": True}
                fields["response_format"] = {"type": "json_schema", "json_schema": schema}
            if config.effort is not None:
                fields["reasoning_effort"] = config.effort
        return fields

    def _thinking_arguments(self) -> dict[str, bool]:
        """The variable that switches thinking on or off in templates of Qwen3 and SmolLM3; off unless asked for."""
        kind = self.thinking.type if self.thinking is not None else "disabled"
        return {} if kind == "adaptive" else {"enable_thinking": kind == "enabled"}


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: Count = Field(ge=1)
    stop_sequences: list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]] | None = Field(
        default=None, max_length=MAX_STOP_SEQUENCES
    )
    stream: bool | None = False
    temperature: Number | None = Field(default=None, ge=0, le=2)
    top_p: Number | None = Field(default=None, gt=0, le=1)
    top_k: Count | None = Field(default=None, ge=0, le=2**63 - 1)
    metadata: Metadata | None = None

    # Beyond Anthropic's fields; checked as chat checks them.
    seed: Count | None = None
    ignore_eos: bool | None = None
    priority: Count | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    slipway_resume: Resume | None = None

    # Not supported: refused unless the value is the neutral one.
    service_tier: str | None = None
    container: Any = None
    mcp_servers: list[Any] | None = None
    inference_geo: str | None = None
    speed: str | None = None

    passed_on: ClassVar[tuple[str, ...]] = (
        "max_tokens", "stream", "temperature", "top_p", "top_k", "seed", "ignore_eos", "priority", "cache_salt",
        "session_id", "slipway_resume",
    )  # fmt: skip
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "service_tier": ("auto", "standard_only"),
        "container": (),
        "mcp_servers": ([],),
        "inference_geo": (),
        "speed": ("standard",),
    }

    @model_validator(mode="after")
    def _only_what_is_honoured(self) -> Self:
        for name, harmless in self.neutral.items():
            value = getattr(self, name)
            if value is not None and value not in harmless:
                raise Unsupported(name)
        return self

    def _fields(self) -> dict[str, Any]:
        fields = super()._fields() | {
            name: value.model_dump(exclude_unset=True) if isinstance(value, RequestBody) else value
            for name in self.passed_on
            if (value := getattr(self, name)) is not None
        }
        thinking = self.thinking
        fields["include_reasoning"] = (
            thinking is not None and thinking.type != "disabled" and thinking.display != "omitted"
        )
        if self.stop_sequences:
            fields["stop"] = self.stop_sequences
        if self.stream:
            # The first event already has the prompt tokens.
            fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        return fields


class _TranslatedChat(ChatRequest):
    """A chat request with the stop string limit of this API, and as many tokens as fit where more are asked for."""

    cuts_max_tokens: ClassVar[bool] = True

    stop: list[str] | None = Field(default=None, max_length=MAX_STOP_SEQUENCES)


def _translated(message: Message) -> list[dict[str, Any]]:
    """Translate a message to chat messages: each tool result becomes a message of its own, before the user's text."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results, texts, calls, thoughts = [], [], [], ""
    for block in message.content:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock() if message.role == "assistant":
                thoughts += block.thinking
            case ToolUseBlock() if message.role == "assistant":
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock() if message.role == "user":
                content = ("Error: " if block.is_error else "") + _text(block.content or "")
                results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
            case _:
                sentence = f"a message of the {message.role} has no {block.type} block"
                raise ApiError(400, sentence, param="messages")
    text = "\n".join(texts)  # as the parts of chat
    reasoning = {"reasoning_content": thoughts} if thoughts else {}
    if calls:
        return [{"role": "assistant", "content": text or None, "tool_calls": calls} | reasoning]
    return results + ([{"role": message.role, "content": text} | reasoning] if text or not results else [])


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _function(tool: ToolDefinition) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    return {name: value for name, value in function.items() if value is not None} | {"parameters": tool.input_schema}
