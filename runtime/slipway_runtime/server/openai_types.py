"""The OpenAI wire types: what a client may ask, and what it gets.

A field is honoured or refused, never ignored: an unknown one and an unsupported one are a 400 that names it.
Fields that change nothing here by their nature (`user`, `metadata`, …) are accepted. Limits that every client
knows are checked here; limits of the loaded model are checked where the model is known.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

MAX_STOPS: Final = 4  # as OpenAI
_INT64: Final = 2**63 - 1


def _stops(stop: str | list[str]) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings are allowed, not {len(stops)}")
    if not all(stops):
        raise ValueError("a stop string may not be empty")
    return stops


class Wire(BaseModel):
    """Anything that comes from a client: unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(Wire):
    """What a stream carries beside text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # padding against side channels; sends nothing more here


class GenerationRequest(Wire):
    """What chat and completions have in common."""

    model: str = Field(default="", max_length=1024)  # empty: the one model that is served
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    seed: int | None = Field(default=None, ge=-_INT64 - 1, le=_INT64)
    stop: Annotated[str | list[str], AfterValidator(_stops)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    # What vLLM's clients ask beyond OpenAI's fields.
    top_k: int | None = Field(default=None, ge=-1)  # 0 and -1: off
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=2)
    min_tokens: int | None = Field(default=None, ge=0)
    ignore_eos: bool | None = False
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(default=None, max_length=256)
    skip_special_tokens: bool | None = True
    include_stop_str_in_output: bool | None = False
    cache_salt: str | None = Field(default=None, max_length=256)

    # They say something about the caller, not about the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Known and not supported: refused unless they ask for what happens anyway.
    n: int | None = None
    logprobs: Any = None
    logit_bias: dict[str, float] | None = None
    service_tier: str | None = None

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "n": (1,),
        "logprobs": (False,),
        "logit_bias": ({},),
        "service_tier": ("auto", "default"),
    }

    @model_validator(mode="after")
    def _only_what_is_honoured(self) -> Self:
        for name, harmless in self.neutral.items():
            value = getattr(self, name)
            if value is not None and not any(value == h and type(value) is type(h) for h in harmless):
                raise Unsupported(name)
        if self.stream_options is not None and not self.stream:
            raise Misused("stream_options", "is only allowed when stream is true")
        return self

    @property
    def stops(self) -> Sequence[str]:
        """The stop strings as a list."""
        return self.stop or ()

    @property
    def wanted_tokens(self) -> int | None:
        """How long the answer may be, if the client said so."""
        return self.max_tokens


class TextPart(Wire):
    """One part of a message in the list form; only text is understood."""

    type: Literal["text"]
    text: str


class ChatMessage(Wire):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    refusal: None = None
    audio: None = None
    tool_calls: list[Any] | None = Field(default=None, max_length=0)
    function_call: None = None
    annotations: list[Any] | None = Field(default=None, max_length=0)
    reasoning_content: None = None

    @model_validator(mode="after")
    def _users_say_something(self) -> Self:
        if self.role == "user" and not self.text:
            raise ValueError("the content of a user's message is empty")
        return self

    @property
    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ResponseFormat(Wire):
    """Only free text: structured output needs a grammar."""

    type: Literal["text"]


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    response_format: Any = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None  # without tools it asks for nothing
    functions: list[Any] | None = None
    function_call: Any = None
    top_logprobs: int | None = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    store: bool | None = None
    web_search_options: Any = None

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerationRequest.neutral,
        "response_format": ({"type": "text"},),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "top_logprobs": (0,),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "verbosity": (),
        "store": (False,),
        "web_search_options": (),
    }

    @property
    def wanted_tokens(self) -> int | None:
        """`max_completion_tokens` is the newer name of `max_tokens`."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. One prompt: a text or its token ids, alone or in a list of one."""

    prompt: str | list[int] | list[str] | list[list[int]] = Field(min_length=1)
    add_special_tokens: bool = True

    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerationRequest.neutral,
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
    }

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if isinstance(self.prompt, list) and len(self.prompt) > 1 and not isinstance(self.prompt[0], int):
            raise Misused("prompt", f"holds {len(self.prompt)} prompts; send one in each request")
        return self

    @property
    def one_prompt(self) -> str | list[int]:
        """The prompt without the list around it."""
        if isinstance(self.prompt, str):
            return self.prompt
        first = self.prompt[0]
        return self.prompt if isinstance(first, int) else first  # type: ignore[return-value]  # a list of ints


class TokenizeRequest(Wire):
    """POST /tokenize: a text as a completion sees it, or messages as a chat sees them."""

    model: str = ""
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None  # by default true for a text and false for a chat
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise Misused("prompt", "or messages: exactly one of them is needed")
        return self


class DetokenizeRequest(Wire):
    """POST /detokenize."""

    model: str = ""
    tokens: list[Annotated[int, Field(ge=0)]]


class Unsupported(ValueError):  # noqa: N818  reads as a sentence where it is raised
    """A field of OpenAI's that this server does not honour, so it refuses it."""

    def __init__(self, field: str) -> None:
        super().__init__(f"{field} is not supported by this server with this value; leave it out")
        self.field = field


class Misused(ValueError):  # noqa: N818  the same
    """A field that makes no sense beside the others."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field} {why}")
        self.field = field
