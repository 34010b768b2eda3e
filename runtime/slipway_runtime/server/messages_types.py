"""The wire types of Anthropic's POST /v1/messages, and their translation to a chat request.

Text, tool use and tool results are supported; images and files are refused with a sentence. Tools that Anthropic
defines or runs are left out and named, and so are the steps of such tools in the history. Thinking is part of the
answer if `thinking` asks for it. `max_tokens` above the context means as many as fit: the field is mandatory, and
clients send a fixed number made for Anthropic's models.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import AliasChoices, BeforeValidator, Discriminator, Field, Tag, model_validator

from slipway_runtime.server import fields
from slipway_runtime.server.bodies import RequestBody, checked, only_types
from slipway_runtime.server.chat_types import FUNCTION_NAME, MAX_TOOLS, kind_of_content
from slipway_runtime.server.errors import ApiError, InvalidField, renamed_fields
from slipway_runtime.server.openai_types import (
    LONGEST_STOP,
    MAX_MESSAGES,
    MAX_STOPS,
    ChatRequest,
    Count,
    Effort,
    Number,
    Resume,
)

FIELDS_OF_CHAT = {  # their names in this API, for errors
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
}


class Cacheable(RequestBody):
    """Base class of objects with `cache_control`, which asks for what happens anyway: all prefixes are cached."""

    cache_control: Any = None


class TextBlock(Cacheable):
    """A text block, or one whose content is text: a summary of earlier turns."""

    lists: ClassVar[fields.Lists] = fields.BLOCK

    type: Literal["text", "compaction"]
    text: str = Field(default="", validation_alias=AliasChoices("text", "content"))


class SourceBlock(Cacheable):
    """A search result, or a document of plain text."""

    lists: ClassVar[fields.Lists] = fields.BLOCK

    type: Literal["search_result", "document"]
    title: str | None = None
    context: str | None = None
    source: Any = None
    content: Any = None

    @model_validator(mode="after")
    def _is_text(self) -> Self:
        if self.type == "document" and not isinstance(self._data, str):
            raise ValueError("only documents of plain text are supported by this server")
        return self

    @property
    def _data(self) -> Any:
        source = self.source if isinstance(self.source, dict) else {}
        return source.get("data") if source.get("type") == "text" else None

    @property
    def text(self) -> str:
        """Title, source, context and text, each on a line of its own."""
        parts = self.content if isinstance(self.content, list) else ()
        inner = [str(part.get("text", "")) for part in parts if isinstance(part, dict)]
        head = [self.title, self.context, self._data, self.source if isinstance(self.source, str) else None]
        return "\n".join([line for line in head if line] + inner)


class ToolReferenceBlock(Cacheable):
    """The name of a tool that a search of tools found. The model sees every tool, so the name is enough."""

    type: Literal["tool_reference"]
    tool_name: str = ""

    @property
    def text(self) -> str:
        """The name."""
        return self.tool_name


class ToolUseBlock(Cacheable):
    """A tool call of the assistant."""

    lists: ClassVar[fields.Lists] = fields.BLOCK

    type: Literal["tool_use"]
    id: str = Field(default="", max_length=256)
    name: str = ""
    input: Any = None


class ThinkingBlock(RequestBody):
    """Thinking of an earlier turn, for chat templates that show it. Redacted thinking is dropped."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""
    signature: Any = None
    data: Any = None  # redacted thinking
    cache_control: Any = None


# Steps of tools that ran on Anthropic's servers: the assistant's text after them has what came of it.
HOSTED_BLOCKS: Final = (
    "server_tool_use", "mcp_tool_use", "mcp_tool_result", "mcp_tool_listing", "web_search_tool_result",
    "web_fetch_tool_result", "advisor_tool_result", "code_execution_tool_result", "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result", "tool_search_tool_result", "fallback",
)  # fmt: skip


class HostedBlock(RequestBody):
    """A block that is left out of the prompt, and named."""

    lists: ClassVar[fields.Lists] = fields.Whole()

    type: str

    @classmethod
    def honoured(cls) -> Mapping[str, str]:
        """No field: the block is dropped as a whole."""
        return {}

    def dropped(self) -> Iterator[tuple[str, bool]]:
        """The type of the block."""
        yield self.type, True


def _kind_of_block(block: Any) -> str:
    kind = str(block.get("type")) if isinstance(block, dict) else "text"
    if kind in HOSTED_BLOCKS:
        return "hosted"
    return {"compaction": "text", "redacted_thinking": "thinking", "document": "source", "search_result": "source"}.get(
        kind, kind
    )


_Text = Annotated[TextBlock, Tag("text")]
_Source = Annotated[SourceBlock, Tag("source")]
_RESULT: Final = ("text", "tool_reference", "search_result", "document")
_ResultBlock = Annotated[
    Annotated[_Text | _Source | Annotated[ToolReferenceBlock, Tag("tool_reference")], Discriminator(_kind_of_block)],
    only_types(*_RESULT, supported="text blocks in the result of a tool"),
]
_Result = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[_ResultBlock], Tag("blocks")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "blocks"),
    BeforeValidator(kind_of_content),
]


class ToolResultBlock(Cacheable):
    """The result of a tool call."""

    lists: ClassVar[fields.Lists] = fields.BLOCK

    type: Literal["tool_result"]
    tool_use_id: str = Field(default="", max_length=256)
    content: _Result | None = None
    is_error: bool | None = None


Block = Annotated[
    Annotated[
        _Text
        | _Source
        | Annotated[ToolUseBlock, Tag("tool_use")]
        | Annotated[ToolResultBlock, Tag("tool_result")]
        | Annotated[ToolReferenceBlock, Tag("tool_reference")]
        | Annotated[ThinkingBlock, Tag("thinking")]
        | Annotated[HostedBlock, Tag("hosted")],
        Discriminator(_kind_of_block),
    ],
    only_types(
        *_RESULT, "tool_use", "tool_result", "thinking", "redacted_thinking", "compaction", *HOSTED_BLOCKS,
        supported="text, tool_use, tool_result and thinking blocks",
    ),
]  # fmt: skip


_SystemBlock = Annotated[TextBlock, only_types("text", supported="text blocks")]
_System = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[_SystemBlock], Tag("blocks")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "blocks"),
    BeforeValidator(kind_of_content),
]


class Message(RequestBody):
    """One message of the conversation; one of the role `system` may come between the others."""

    lists: ClassVar[fields.Lists] = fields.SYSTEM_MESSAGE

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[Block], Tag("blocks")],
        Discriminator(lambda value: "text" if isinstance(value, str) else "blocks"),
        BeforeValidator(kind_of_content),
    ] = ""
    cache_control: Any = None


class ToolDefinition(Cacheable):
    """A tool that the client runs."""

    lists: ClassVar[fields.Lists] = fields.TOOL

    type: Literal["custom"] | None = None
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # arguments are streamed as early as possible anyway

    @model_validator(mode="after")
    def _takes_an_object(self) -> Self:
        if self.input_schema.get("type", "object") != "object":
            raise ValueError("the input_schema of a tool is a JSON Schema of type object")
        return self


class OtherTool(RequestBody):
    """A tool that Anthropic defines or runs: this model was not trained on it. It is left out and named."""

    lists: ClassVar[fields.Lists] = fields.Whole()

    type: str = Field(max_length=64)
    name: str = Field(default="", max_length=128)

    @classmethod
    def honoured(cls) -> Mapping[str, str]:
        """No field: the tool is dropped as a whole."""
        return {}

    def dropped(self) -> Iterator[tuple[str, bool]]:
        """The type of the tool without its date."""
        kind = re.sub(r"_\d{8}$", "", self.type)
        yield fields.shown(kind), kind in OTHER_TOOLS


OTHER_TOOLS: Final = (
    "advisor", "bash", "browser_toolset", "code_execution", "computer", "computer_toolset", "mcp_toolset", "memory",
    "text_editor", "tool_search_tool_bm25", "tool_search_tool_regex", "web_fetch", "web_search",
)  # fmt: skip
_OWN: Final = (None, "custom")
Tool = Annotated[
    Annotated[ToolDefinition, Tag("custom")] | Annotated[OtherTool, Tag("other")],
    Discriminator(lambda tool: "custom" if not isinstance(tool, dict) or tool.get("type") in _OWN else "other"),
]


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
    """The format of the answer, and the reasoning effort."""

    lists: ClassVar[fields.Lists] = fields.OUTPUT_CONFIG

    format: OutputFormat | None = None
    effort: Effort | None = None


class Thinking(RequestBody):
    """Whether the model thinks first, and the client gets its thinking. `adaptive` leaves the first to the model."""

    lists: ClassVar[fields.Lists] = fields.THINKING

    type: str = Field(max_length=64)  # enabled, disabled, adaptive; a type of tomorrow is as adaptive
    display: str | None = None  # `omitted`: without the thinking. There are no summaries


class CountTokensRequest(Cacheable):
    """POST /v1/messages/count_tokens: the fields that make the prompt."""

    lists: ClassVar[fields.Lists] = fields.MESSAGES

    model: str = Field(default="", max_length=1024)
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: _System | None = None
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _can_be_continued(self) -> Self:
        last = self.messages[-1]
        blocks = last.content if isinstance(last.content, list) else ()
        if last.role == "assistant" and any(isinstance(block, ToolUseBlock) for block in blocks):
            raise InvalidField("messages", "ends with a tool_use block: a tool_result block has to follow")
        return self

    @property
    def own_tools(self) -> list[ToolDefinition]:
        """The tools that the model sees."""
        return [tool for tool in self.tools or () if isinstance(tool, ToolDefinition)]

    def chat(self) -> ChatRequest:
        """Translate to a chat request; raises ApiError 400 with the field names of this API."""
        with renamed_fields(FIELDS_OF_CHAT, schema="input_schema"):
            return checked(_TranslatedChat, self._fields())

    def _fields(self) -> dict[str, Any]:
        messages = [message for one in self.messages for message in _translated(one)]
        if system := _text(self.system or ""):
            messages.insert(0, {"role": "system", "content": system})
        chat: dict[str, Any] = {"model": self.model, "messages": messages}
        if messages[-1]["role"] == "assistant":
            chat["continue_final_message"] = True  # the answer continues the last message
        chat["chat_template_kwargs"] = self._thinking_arguments() | (self.chat_template_kwargs or {})
        if self.own_tools:
            chat["tools"] = [{"type": "function", "function": _function(tool)} for tool in self.own_tools]
        if (choice := self.tool_choice) is not None and choice.type in ("any", "tool") and not self.own_tools:
            raise ApiError(400, "tool_choice forces a call, and none of the tools is the client's own", param="tools")
        if choice is not None:
            words = {"auto": "auto", "any": "required", "none": "none"}
            named = {"type": "function", "function": {"name": choice.name}}
            chat["tool_choice"] = words.get(choice.type, named)
            if choice.disable_parallel_tool_use:
                chat["parallel_tool_calls"] = False
        if (config := self.output_config) is not None:
            if config.format is not None:
                schema = {"name": "answer", "schema": config.format.schema_, "strict": True}
                chat["response_format"] = {"type": "json_schema", "json_schema": schema}
            if config.effort is not None:
                chat["reasoning_effort"] = config.effort
        return chat

    def _thinking_arguments(self) -> dict[str, bool]:
        """The variable that switches thinking on or off in templates of Qwen3 and SmolLM3; off unless asked for."""
        kind = self.thinking.type if self.thinking is not None else "disabled"
        return {"enable_thinking": kind == "enabled"} if kind in ("enabled", "disabled") else {}


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: Count = Field(ge=1)
    stop_sequences: list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]] | None = Field(
        default=None, max_length=MAX_STOPS
    )
    stream: bool | None = False
    temperature: Number | None = Field(default=None, ge=0, le=2)
    top_p: Number | None = Field(default=None, gt=0, le=1)
    top_k: Count | None = Field(default=None, ge=0, le=2**63 - 1)

    # Beyond Anthropic's fields; checked as chat checks them.
    seed: Count | None = None
    ignore_eos: bool | None = None
    priority: Count | None = None
    cache_salt: str | None = None
    slipway_resume: Resume | None = None

    passed_on: ClassVar[tuple[str, ...]] = (
        "max_tokens", "stream", "temperature", "top_p", "top_k", "seed", "ignore_eos", "priority", "cache_salt",
        "slipway_resume",
    )  # fmt: skip

    def _fields(self) -> dict[str, Any]:
        chat = super()._fields() | {
            name: value.model_dump(exclude_unset=True) if isinstance(value, RequestBody) else value
            for name in self.passed_on
            if (value := getattr(self, name)) is not None
        }
        thinking = self.thinking
        chat["include_reasoning"] = (
            thinking is not None and thinking.type != "disabled" and thinking.display != "omitted"
        )
        if self.stop_sequences:
            chat["stop"] = self.stop_sequences
        if self.stream:
            # The first event already has the prompt tokens.
            chat["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        return chat


class _TranslatedChat(ChatRequest):
    """A chat request of which more tokens than fit mean as many as fit."""

    cuts_max_tokens: ClassVar[bool] = True


def _translated(message: Message) -> list[dict[str, Any]]:
    """Translate a message to chat messages: each tool result becomes a message of its own, before the user's text."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results, texts, calls, thoughts = [], [], [], ""
    for block in message.content:
        match block:
            case TextBlock() | SourceBlock() | ToolReferenceBlock():
                texts.append(block.text)
            case HostedBlock():
                continue
            case ThinkingBlock() if message.role == "assistant":
                thoughts += block.thinking
            case ToolUseBlock() if message.role == "assistant":
                function = {"name": block.name, "arguments": _arguments(block.input)}
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


def _arguments(given: Any) -> str:
    """The input of a call as JSON text."""
    return json.dumps({} if given is None else given, ensure_ascii=False)


def _text(content: str | Sequence[TextBlock | SourceBlock | ToolReferenceBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _function(tool: ToolDefinition) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    return {name: value for name, value in function.items() if value is not None} | {"parameters": tool.input_schema}
