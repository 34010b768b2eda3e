"""The wire types of POST /v1/responses, and their translation to a chat request.

Stateless: no response is stored, so references to an earlier response are refused with a sentence. The input holds the
whole conversation, as clients of this API send it with `store: false`.
"""

from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from slipway_runtime.server.bodies import RequestBody, checked, only_types
from slipway_runtime.server.chat_types import MAX_TOOLS, ONLY_FUNCTION_CHOICES, ONLY_FUNCTIONS, StructuredOutputs
from slipway_runtime.server.errors import InvalidField, Unsupported, renamed_fields
from slipway_runtime.server.openai_types import MAX_LOGPROBS, MAX_MESSAGES, ChatRequest, Count, Effort, Number, Resume

LOGPROBS: Final = "message.output_text.logprobs"
_NOTHING_KEPT: Final = (
    "is not supported: this server keeps no responses; send the whole conversation in input, and leave store out"
)
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

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str = ""
    refusal: str | None = None
    annotations: list[Any] | None = None  # part of outputs that clients send back unchanged
    logprobs: list[Any] | None = None


Content = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[
        list[Annotated[InputText, only_types("input_text", "output_text", "text", "refusal", supported="text parts")]],
        Tag("parts"),
    ],
    Discriminator(lambda value: "text" if isinstance(value, str) else "parts"),
]


class InputMessage(RequestBody):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCallItem(RequestBody):
    """A function call of the model."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=256)
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class FunctionCallOutputItem(RequestBody):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1, max_length=256)
    output: Content
    id: str | None = None
    status: str | None = None


class ReasoningText(RequestBody):
    """A part of a reasoning item."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(RequestBody):
    """Reasoning of an earlier answer. What stands only in a summary or in the encrypted content is dropped."""

    type: Literal["reasoning"]
    summary: list[Any] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: str | None = None


InputItem = Annotated[
    Annotated[
        Annotated[InputMessage, Tag("message")]
        | Annotated[FunctionCallItem, Tag("function_call")]
        | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
        | Annotated[ReasoningItem, Tag("reasoning")],
        Discriminator(lambda item: (item.get("type") if isinstance(item, dict) else None) or "message"),
    ],
    only_types(
        None, "message", "function_call", "function_call_output", "reasoning",
        supported="messages, function_call, function_call_output and reasoning items",
    ),
]  # fmt: skip


Input = Annotated[
    Annotated[str, Field(min_length=1), Tag("text")]
    | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES), Tag("items")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "items"),
]


class FunctionTool(RequestBody):
    """A function that the model may call. The tools that OpenAI's servers run themselves do not exist here."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(RequestBody):
    """`tool_choice` as an object: forces a call of this function."""

    type: Literal["function"]
    name: str


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

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None  # the neutral value


class Reasoning(RequestBody):
    """The reasoning effort, where the chat template supports it."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None  # the best that there is: here, none


class ResponsesStreamOptions(RequestBody):
    """Options of a stream."""

    include_obfuscation: bool | None = None  # padding against side channels; without effect


class ResponsesRequest(RequestBody):
    """POST /v1/responses."""

    model: str = Field(default="", max_length=1024)
    input: Input
    instructions: str | None = None
    max_output_tokens: Count | None = Field(default=None, ge=1)
    temperature: Number | None = Field(default=None, ge=0, le=2)
    top_p: Number | None = Field(default=None, gt=0, le=1)
    top_logprobs: Count | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: list[Annotated[FunctionTool, ONLY_FUNCTIONS]] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Annotated[Literal["none", "auto", "required"] | FunctionChoice, ONLY_FUNCTION_CHOICES] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
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

    # Metadata of the caller; no influence on the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    session_id: str | None = Field(default=None, max_length=256)
    max_tool_calls: Count | None = None  # for tools that run on OpenAI's servers

    # Not supported: refused unless the value is the neutral one.
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    truncation: str | None = None
    service_tier: str | None = None
    prompt_cache_retention: str | None = None
    context_management: list[Any] | None = None

    passed_on: ClassVar[tuple[str, ...]] = (
        "model", "temperature", "top_p", "parallel_tool_calls", "stream", "top_k", "min_p", "repetition_penalty",
        "presence_penalty", "frequency_penalty", "seed", "stop", "ignore_eos", "priority", "cache_salt",
        "chat_template_kwargs", "structured_outputs", "slipway_resume", "session_id",
    )  # fmt: skip
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "background": (False,),
        "prompt": (),
        "service_tier": ("auto", "default"),
        "prompt_cache_retention": ("in_memory",),
        "context_management": ([],),
    }

    @model_validator(mode="after")
    def _only_what_is_honoured(self) -> Self:
        if self.store:
            raise InvalidField("store", _NOTHING_KEPT)
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                raise InvalidField(name, _NOTHING_KEPT)
        if self.truncation not in (None, "disabled"):
            raise InvalidField("truncation", "of a conversation is left to the client: this server drops no items")
        for name, harmless in self.neutral.items():
            value = getattr(self, name)
            if value is not None and value not in harmless:
                raise Unsupported(name)
        if self.top_logprobs and not self.wants_logprobs:
            raise InvalidField("top_logprobs", f"is only allowed with {LOGPROBS} in include")
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Whether logprobs of the output tokens are requested."""
        return LOGPROBS in (self.include or ())

    def chat(self) -> ChatRequest:
        """Translate to a chat request; raises ApiError 400 with the field names of this API."""
        fields: dict[str, Any] = {
            name: value.model_dump(by_alias=True, exclude_unset=True) if isinstance(value, RequestBody) else value
            for name in self.passed_on
            if (value := getattr(self, name)) is not None
        }
        fields["messages"] = self._messages()
        if self.max_output_tokens is not None:
            fields["max_completion_tokens"] = self.max_output_tokens
        if self.stream:
            fields["stream_options"] = {"include_usage": True}
        if self.wants_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.tools:
            fields["tools"] = [{"type": "function", "function": _function(tool)} for tool in self.tools]
        if isinstance(self.tool_choice, FunctionChoice):
            fields["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        elif self.tool_choice is not None:
            fields["tool_choice"] = self.tool_choice
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = _response_format(self.text.format)
        if self.reasoning is not None and self.reasoning.effort is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        with renamed_fields(FIELDS_OF_CHAT):
            return checked(ChatRequest, fields)

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
                case FunctionCallItem():
                    # Consecutive calls, and the text before them, are one message of the assistant.
                    if not messages or messages[-1]["role"] != "assistant":
                        messages.append({"role": "assistant"})
                    function = {"name": item.name, "arguments": item.arguments}
                    call = {"id": item.call_id, "type": "function", "function": function}
                    messages[-1].setdefault("tool_calls", []).append(call)
                case FunctionCallOutputItem():
                    messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            if not isinstance(item, ReasoningItem):
                if reasoning and messages[-1]["role"] == "assistant":
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
