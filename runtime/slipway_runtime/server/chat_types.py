"""Wire types of a chat: messages, tools, tool calls, response formats and structured outputs."""

import json
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from slipway_runtime.server import fields
from slipway_runtime.server.bodies import RequestBody, only_types
from slipway_runtime.server.errors import InvalidField
from slipway_runtime.server.validation_errors import name_type

# OpenAI allows 128 tools and names of 64 characters; Anthropic names of 128. Agents with many servers send more tools.
MAX_TOOLS: Final = 1024
FUNCTION_NAME: Final = r"^[A-Za-z0-9_.-]{1,128}$"


class TextPart(RequestBody):
    """A text part of a message."""

    lists: ClassVar[fields.Lists] = fields.TEXT_PART

    type: Literal["text"]
    text: str
    cache_control: Any = None  # breakpoints of caches: every prefix is cached
    prompt_cache_breakpoint: Any = None


class RefusalPart(RequestBody):
    """A part of an earlier message in which the assistant refuses."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The refusal, which the model reads as text."""
        return self.refusal


Part = Annotated[
    Annotated[TextPart | RefusalPart, Discriminator("type")],
    only_types("text", "refusal", supported="text parts"),
]


def kind_of_content(value: Any) -> Any:
    """Refuses contents that are neither a text nor a list, in a sentence about the content."""
    if not isinstance(value, str | list):
        raise ValueError(f"expected a string or a list of parts, got {name_type(value)}")
    return value


Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Part], Tag("parts")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "parts"),
    BeforeValidator(kind_of_content),
]


class FunctionCall(RequestBody):
    """A function call of the assistant, as a client sends it back: nothing of it can be wrong any more.

    The arguments are JSON text, or whatever a model wrote in place of it.
    """

    lists: ClassVar[fields.Lists] = fields.FUNCTION_CALL

    name: str = ""
    arguments: Annotated[str, BeforeValidator(lambda value: value if isinstance(value, str) else json.dumps(value))] = (
        "{}"
    )


class ToolCall(RequestBody):
    """A tool call in an earlier message of the assistant."""

    lists: ClassVar[fields.Lists] = fields.TOOL_CALL

    id: str = Field(default="", max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # present if a client collected the call from a stream
    cache_control: Any = None  # every prefix is cached


class ChatMessage(RequestBody):
    """One message of a conversation. The client cannot change what was said, so as little as possible is an error."""

    lists: ClassVar[fields.Lists] = fields.MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_call_id: str | None = Field(default=None, max_length=256)
    function_call: FunctionCall | None = None  # the older form of `tool_calls`; its result has the role `function`
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's newer name of the same
    cache_control: Any = None  # every prefix is cached

    @model_validator(mode="after")
    def _of_its_role(self) -> Self:
        parts = self.content if isinstance(self.content, list) else ()
        if self.role != "assistant" and any(isinstance(part, RefusalPart) for part in parts):
            raise ValueError("only an assistant's message has refusal parts")
        if self.role != "assistant" and self.calls:
            raise ValueError("only an assistant's message has tool_calls")
        return self

    @property
    def calls(self) -> list[ToolCall]:
        """The tool calls, also one in the older form."""
        older = [ToolCall(function=self.function_call)] if self.function_call is not None else []
        return (self.tool_calls or []) + older

    @property
    def text(self) -> str:
        """The content as one text; each part is a line of its own, as vLLM writes it for templates that read a text."""
        if isinstance(self.content, str):
            return self.content
        if self.content is None:
            return self.refusal or ""
        return "\n".join(part.text for part in self.content)


class FunctionDefinition(RequestBody):
    """A function that the model may call."""

    lists: ClassVar[fields.Lists] = fields.TOOL

    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON Schema; None: the function has no parameters
    strict: bool | None = None

    @property
    def key_order(self) -> tuple[str, ...]:
        """The keys in the order of the request, which templates that write the whole tool keep."""
        return tuple(self._order)

    _order: tuple[str, ...] = ()

    @model_validator(mode="wrap")
    @classmethod
    def _keep_order(cls, value: Any, handler: Any) -> "FunctionDefinition":
        made: FunctionDefinition = handler(value)
        if isinstance(value, dict):
            made._order = tuple(str(name) for name in value)
        return made

    @model_validator(mode="after")
    def _takes_an_object(self) -> Self:
        if self.parameters is not None and self.parameters.get("type", "object") != "object":
            raise ValueError("the parameters of a function are a JSON Schema of type object")
        return self

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        return {"type": "object", **(self.parameters or {"properties": {}, "additionalProperties": False})}


class Tool(RequestBody):
    """A tool that the model may use; functions are the only kind."""

    lists: ClassVar[fields.Lists] = fields.TOOL

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: Any = None  # every prefix is cached


class NamedFunction(RequestBody):
    """The name of a function."""

    name: str


class NamedTool(RequestBody):
    """`tool_choice` as an object: forces a call of this function."""

    type: Literal["function"]
    function: NamedFunction


ONLY_FUNCTIONS: Final = only_types("function", supported="functions, which the client runs,")
ONLY_FUNCTION_CHOICES: Final = only_types("function", supported="auto, none, required and the name of a function")


class JsonSchemaFormat(RequestBody):
    """The schema of a `response_format` of type `json_schema`."""

    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None  # the schema is enforced either way


class ResponseFormat(RequestBody):
    """OpenAI's `response_format`: text, a JSON object, a JSON schema, or vLLM's structural tag."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = Field(default=None, max_length=MAX_TOOLS)
    triggers: list[str] | None = Field(default=None, max_length=MAX_TOOLS)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidField("response_format", "of type json_schema needs json_schema, and no other type has one")
        is_tag = self.type == "structural_tag"
        if is_tag != bool(self.structures) or is_tag != bool(self.triggers):
            raise InvalidField("response_format", "of type structural_tag needs structures and triggers, and only it")
        return self


class StructuredOutputs(RequestBody):
    """vLLM's `structured_outputs`: exactly one kind of constraint on the answer."""

    lists: ClassVar[fields.Lists] = fields.STRUCTURED

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = Field(default=None, min_length=1)
    choice: list[Annotated[str, Field(min_length=1)]] | None = Field(default=None, min_length=1, max_length=1024)
    grammar: str | None = Field(default=None, min_length=1)
    structural_tag: dict[str, Any] | str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None  # at most one space between the parts of JSON

    ways: ClassVar[tuple[str, ...]] = ("json_", "regex", "choice", "grammar", "structural_tag", "json_object")

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [way for way in self.ways if getattr(self, way) not in (None, False)]
        if len(given) != 1:
            raise InvalidField(
                "structured_outputs",
                f"names {len(given)} ways to bind the answer; exactly one of json, regex, choice, grammar,"
                " structural_tag and json_object is needed",
            )
        return self
