"""The wire types of POST /v1/responses, and their translation to a chat request.

Stateless: no response is stored, so references to an earlier response are refused with a sentence. The input holds the
whole conversation, as clients of this API send it with `store: false`.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter, field_validator, model_validator

from slipway_runtime.server import fields
from slipway_runtime.server.bodies import RequestBody, checked, only_types
from slipway_runtime.server.chat_types import (
    FUNCTION_NAME,
    MAX_TOOLS,
    ONLY_FUNCTION_CHOICES,
    StructuredOutputs,
    kind_of_content,
)
from slipway_runtime.server.errors import InvalidField, renamed_fields
from slipway_runtime.server.openai_types import MAX_LOGPROBS, MAX_MESSAGES, ChatRequest, Count, Effort, Number, Resume
from slipway_runtime.server.validation_errors import name_type

LOGPROBS: Final = "message.output_text.logprobs"
_NOTHING_KEPT: Final = "is not supported: this server keeps no responses; send the whole conversation in input"
# Fields of the chat request -> their names in this API, for error messages.
FIELDS_OF_CHAT: Final = {  # their names in this API, for errors
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}


class InputText(RequestBody):
    """A content part of a message; only text is supported."""

    lists: ClassVar[fields.Lists] = fields.ITEM_PART

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str = ""
    refusal: str | None = None
    prompt_cache_breakpoint: Any = None  # every prefix is cached


Content = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[
        list[Annotated[InputText, only_types("input_text", "output_text", "text", "refusal", supported="text parts")]],
        Tag("parts"),
    ],
    Discriminator(lambda value: "text" if isinstance(value, str) else "parts"),
    BeforeValidator(kind_of_content),
]


class Item(RequestBody):
    """Base class of the items of an input. Their ids and states say nothing to the model."""

    lists: ClassVar[fields.Lists] = fields.ITEM

    id: Any = None
    status: Any = None
    phase: Any = None


class InputMessage(Item):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content = ""


class CallItem(Item):
    """A call of a tool that the client ran. Calls of tools with a type of their own keep what the model wrote in it."""

    type: Literal["function_call", "custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call"]
    call_id: str = Field(default="", max_length=256)
    name: str = ""
    namespace: str = ""
    arguments: Any = None  # of a function: JSON text
    input: Any = None  # of a custom tool
    action: Any = None  # of a shell
    operation: Any = None  # of a patch

    def call(self) -> dict[str, Any]:
        """The call, as a message of the assistant has it."""
        arguments = self.arguments
        if arguments is None:
            own = {"input": self.input, "action": self.action, "operation": self.operation}
            arguments = {name: value for name, value in own.items() if value is not None}
        name = self.name or self.type.removesuffix("_call")
        function = {"name": flat_name(self.namespace, name), "arguments": arguments}
        return {"id": self.call_id or str(self.id or ""), "type": "function", "function": function}


class OutputItem(Item):
    """The result of a call."""

    type: Literal[
        "function_call_output", "custom_tool_call_output", "local_shell_call_output", "shell_call_output",
        "apply_patch_call_output",
    ]  # fmt: skip
    call_id: str = Field(default="", max_length=256)
    output: Any = ""
    name: Any = None  # of the function, which its call names too
    namespace: Any = None

    @field_validator("output")
    @classmethod
    def _text_of_output(cls, value: Any) -> Any:
        """Text parts as checked parts; other JSON is for the model to read as it is."""
        is_parts = isinstance(value, list) and value and all(isinstance(p, dict) and "type" in p for p in value)
        return _CONTENT.validate_python(value) if is_parts else value

    @property
    def text(self) -> str:
        """The result as text."""
        if isinstance(self.output, list) and self.output and isinstance(self.output[0], InputText):
            return _text(self.output)
        return self.output if isinstance(self.output, str) else json.dumps(self.output, ensure_ascii=False)


class ReasoningText(RequestBody):
    """A part of a reasoning item."""

    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(Item):
    """Reasoning of an earlier answer. A summary and the encrypted content are dropped."""

    lists: ClassVar[fields.Lists] = fields.REASONING_ITEM

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None


# Steps of tools that ran on OpenAI's servers: the message after them has what came of it.
HOSTED_ITEMS: Final = (
    "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "computer_call",
    "tool_search_call", "tool_search_output", "mcp_call", "mcp_list_tools", "mcp_approval_request",
    "mcp_approval_response", "configuration_update", "program", "program_output",
)  # fmt: skip


class HostedItem(RequestBody):
    """An item that is left out of the prompt, and named."""

    type: str

    @classmethod
    def honoured(cls) -> Mapping[str, str]:
        """No field: the item is dropped as a whole."""
        return {}

    lists: ClassVar[fields.Lists] = fields.Whole()

    def dropped(self) -> Iterator[tuple[str, bool]]:
        """The type of the item."""
        yield self.type, True


def _kind_of_item(item: Any) -> str:
    kind = (item.get("type") if isinstance(item, dict) else None) or "message"
    if kind in _CALLS or kind in _OUTPUTS:
        return "output" if kind in _OUTPUTS else "call"
    return "hosted" if kind in HOSTED_ITEMS else str(kind)


_CALLS: Final = get_args(CallItem.model_fields["type"].annotation)
_OUTPUTS: Final = get_args(OutputItem.model_fields["type"].annotation)
_CONTENT: Final[TypeAdapter[str | list[InputText]]] = TypeAdapter(Content)
InputItem = Annotated[
    Annotated[
        Annotated[InputMessage, Tag("message")]
        | Annotated[CallItem, Tag("call")]
        | Annotated[OutputItem, Tag("output")]
        | Annotated[ReasoningItem, Tag("reasoning")]
        | Annotated[HostedItem, Tag("hosted")],
        Discriminator(_kind_of_item),
    ],
    only_types(
        None, "message", "reasoning", *_CALLS, *_OUTPUTS, *HOSTED_ITEMS,
        supported="messages, calls of tools, their outputs and reasoning items",
    ),
]  # fmt: skip


def _kind_of_input(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise ValueError(f"expected a string or a list of items, got {name_type(value)}")
    return value


Input = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES), Tag("items")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "items"),
    BeforeValidator(_kind_of_input),
]


class FunctionTool(RequestBody):
    """A function that the model may call, and the client runs."""

    lists: ClassVar[fields.Lists] = fields.RESPONSES_TOOL

    type: Literal["function"]
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


# Tools that OpenAI's servers run, or whose calls have a form of their own: the model does not see them.
OTHER_TOOLS: Final = (
    "apply_patch", "code_interpreter", "computer", "computer_use_preview", "custom", "file_search",
    "image_generation", "local_shell", "mcp", "programmatic_tool_calling", "shell", "tool_search", "web_search",
    "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
)  # fmt: skip


class OtherTool(RequestBody):
    """A tool that is not a function; it is left out of the prompt, and named."""

    lists: ClassVar[fields.Lists] = fields.Whole()

    type: str = Field(max_length=64)

    @classmethod
    def honoured(cls) -> Mapping[str, str]:
        """No field: the tool is dropped as a whole."""
        return {}

    def dropped(self) -> Iterator[tuple[str, bool]]:
        """The type of the tool."""
        yield fields.shown(self.type), self.type in OTHER_TOOLS


def _kind_of_tool(tool: Any) -> str:
    # pydantic asks for dicts of a request, and for models when a response repeats them.
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return kind if kind in ("function", "namespace") else "other"


class NamespaceTool(RequestBody):
    """A group of functions. The model sees each as `NAMESPACE__NAME`; its calls name both apart again."""

    lists: ClassVar[fields.Lists] = fields.NAMESPACE

    type: Literal["namespace"]
    name: str = Field(pattern=FUNCTION_NAME)
    tools: list[
        Annotated[
            Annotated[FunctionTool, Tag("function")] | Annotated[OtherTool, Tag("other")],
            Discriminator(lambda tool: "function" if _kind_of_tool(tool) == "function" else "other"),
        ]
    ] = Field(default_factory=list, max_length=MAX_TOOLS)


Tool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[OtherTool, Tag("other")],
    Discriminator(_kind_of_tool),
]


def flat_name(namespace: str, name: str) -> str:
    """The name under which the model sees a function of a namespace."""
    return f"{namespace}__{name}" if namespace else name


class FunctionChoice(RequestBody):
    """`tool_choice` as an object: forces a call of this function."""

    type: Literal["function"]
    name: str
    namespace: str = ""


class TextFormat(RequestBody):
    """The format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None and self.name is not None):
            raise InvalidField("text.format", "of type json_schema needs name and schema, and no other type has them")
        return self


class TextConfig(RequestBody):
    """The `text` field."""

    lists: ClassVar[fields.Lists] = fields.RESPONSES_TEXT

    format: TextFormat | None = None


class Reasoning(RequestBody):
    """The reasoning effort. There are no summaries: the reasoning itself is part of the answer."""

    lists: ClassVar[fields.Lists] = fields.REASONING

    effort: Effort | None = None


class ResponsesStreamOptions(RequestBody):
    """Options of a stream."""

    lists: ClassVar[fields.Lists] = fields.STREAM_OPTIONS


class ResponsesRequest(RequestBody):
    """POST /v1/responses."""

    lists: ClassVar[fields.Lists] = fields.RESPONSES

    model: str = Field(default="", max_length=1024)
    input: Input
    instructions: str | None = None
    max_output_tokens: Count | None = Field(default=None, ge=1)
    temperature: Number | None = Field(default=None, ge=0, le=2)
    top_p: Number | None = Field(default=None, gt=0, le=1)
    top_logprobs: Count | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Annotated[Literal["none", "auto", "required"] | FunctionChoice, ONLY_FUNCTION_CHOICES] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    stream: bool | None = False
    stream_options: ResponsesStreamOptions | None = None

    # vLLM's extensions of OpenAI's fields; checked by the chat request.
    top_k: Count | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    seed: Count | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    priority: Count | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    slipway_resume: Resume | None = None

    # Repeated in the response; the gateway keeps requests of one user or key together.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    max_tool_calls: Count | None = None  # for tools that run on OpenAI's servers

    passed_on: ClassVar[tuple[str, ...]] = (
        "model", "temperature", "top_p", "parallel_tool_calls", "stream", "top_k", "min_p", "repetition_penalty",
        "presence_penalty", "frequency_penalty", "seed", "stop", "ignore_eos", "priority", "cache_salt",
        "chat_template_kwargs", "structured_outputs", "slipway_resume",
    )  # fmt: skip

    @model_validator(mode="before")
    @classmethod
    def _nothing_kept(cls, value: Any) -> Any:
        for name in ("previous_response_id", "conversation"):
            if isinstance(value, dict) and value.get(name) is not None:
                raise InvalidField(name, _NOTHING_KEPT)
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.top_logprobs and not self.wants_logprobs:
            raise InvalidField("top_logprobs", f"is only allowed with {LOGPROBS} in include")
        names = [tool.name for tool in self.functions]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise InvalidField("tools", f"names the function {twice} twice")
        forced = self.tool_choice == "required" or isinstance(self.tool_choice, FunctionChoice)
        if forced and self.tools and not names:
            raise InvalidField("tool_choice", "forces a call, and none of the tools is a function of the client")
        return self

    def dropped(self) -> Iterator[tuple[str, bool]]:
        """What `include` asks for beyond what there is."""
        if any(name not in (LOGPROBS, "reasoning.encrypted_content") for name in self.include or ()):
            yield "include", True

    @property
    def functions(self) -> list[FunctionTool]:
        """The functions that the model sees, under the names under which it sees them."""
        return [
            function.model_copy(update={"name": flat_name(space, function.name)})
            for space, function in self._functions()
        ]

    @property
    def namespaces(self) -> dict[str, tuple[str, str]]:
        """The name under which the model sees a function -> its namespace, if any, and its own name."""
        return {flat_name(space, function.name): (space, function.name) for space, function in self._functions()}

    def _functions(self) -> Iterator[tuple[str, FunctionTool]]:
        for tool in self.tools or ():
            if isinstance(tool, FunctionTool):
                yield "", tool
            elif isinstance(tool, NamespaceTool):
                yield from ((tool.name, one) for one in tool.tools if isinstance(one, FunctionTool))

    @property
    def wants_logprobs(self) -> bool:
        """Whether logprobs of the output tokens are requested."""
        return LOGPROBS in (self.include or ())

    def chat(self) -> ChatRequest:
        """Translate to a chat request; raises ApiError 400 with the field names of this API."""
        chat: dict[str, Any] = {
            name: value.model_dump(by_alias=True, exclude_unset=True) if isinstance(value, RequestBody) else value
            for name in self.passed_on
            if (value := getattr(self, name)) is not None
        }
        chat["messages"] = self._messages()
        if self.max_output_tokens is not None:
            chat["max_completion_tokens"] = self.max_output_tokens
        if self.stream:
            chat["stream_options"] = {"include_usage": True}
        if self.wants_logprobs:
            chat |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if functions := self.functions:
            chat["tools"] = [{"type": "function", "function": _function(tool)} for tool in functions]
        if isinstance(self.tool_choice, FunctionChoice):
            name = flat_name(self.tool_choice.namespace, self.tool_choice.name)
            chat["tool_choice"] = {"type": "function", "function": {"name": name}}
        elif self.tool_choice is not None:
            chat["tool_choice"] = self.tool_choice
        if self.text is not None and self.text.format is not None:
            chat["response_format"] = _response_format(self.text.format)
        if self.reasoning is not None and self.reasoning.effort is not None:
            chat["reasoning_effort"] = self.reasoning.effort
        with renamed_fields(FIELDS_OF_CHAT):
            return checked(ChatRequest, chat)

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        reasoning = ""  # of the assistant's next message
        for item in self.input:
            match item:
                case ReasoningItem():
                    reasoning += "".join(part.text for part in item.content or ())
                case InputMessage():
                    messages.append({"role": item.role, "content": _text(item.content)})
                case CallItem():
                    # Consecutive calls, and the text before them, are one message of the assistant.
                    if not messages or messages[-1]["role"] != "assistant":
                        messages.append({"role": "assistant"})
                    messages[-1].setdefault("tool_calls", []).append(item.call())
                case OutputItem():
                    messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.text})
                case HostedItem():
                    continue
            if not isinstance(item, ReasoningItem):
                if reasoning and messages and messages[-1]["role"] == "assistant":
                    messages[-1]["reasoning_content"] = messages[-1].get("reasoning_content", "") + reasoning
                reasoning = ""
        return messages


def _text(content: str | list[InputText]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text or part.refusal or "" for part in content)  # as the parts of chat


def _function(tool: FunctionTool) -> dict[str, Any]:
    return tool.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)


def _response_format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    schema = {"name": wanted.name, "schema": wanted.schema_, "strict": wanted.strict}
    return {"type": "json_schema", "json_schema": schema | {"description": wanted.description}}
