"""Wire types of OpenAI requests: chat, completions, tokenize and detokenize.

The fields of these classes are honoured; `fields.py` has those that are refused, and those that are ignored and named.
Limits of the API are checked here; limits of the loaded model are checked in `sampling.py`.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from slipway_runtime.server import fields
from slipway_runtime.server.bodies import RequestBody
from slipway_runtime.server.chat_types import (
    MAX_TOOLS,
    ONLY_FUNCTION_CHOICES,
    ONLY_FUNCTIONS,
    ChatMessage,
    NamedTool,
    ResponseFormat,
    StructuredOutputs,
    Tool,
)
from slipway_runtime.server.errors import InvalidField
from slipway_runtime.server.validation_errors import name_type

MAX_STOPS: Final = 16  # OpenAI allows 4; HumanEval has 5
LONGEST_STOP: Final = 1024  # characters of a stop string
MAX_LOGPROBS: Final = 20
MAX_N: Final = 128
MAX_PROMPTS: Final = 256  # in one request of /v1/completions
MAX_MESSAGES: Final = 4096
_INT64: Final = 2**63 - 1


def _stops(stop: str | list[str]) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings are allowed, not {len(stops)}")
    if not all(stops):
        raise ValueError("a stop string may not be empty")
    if (longest := max(map(len, stops), default=0)) > LONGEST_STOP:
        raise ValueError(f"a stop string has at most {LONGEST_STOP} characters, not {longest}")
    return stops


def _number_of_answers(n: Any) -> Any:
    if isinstance(n, int) and not isinstance(n, bool) and not 1 <= n <= MAX_N:
        raise ValueError(f"n is between 1 and {MAX_N}, not {n if abs(n) < 10**9 else 'that'}")
    return n


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected a number, got a boolean")
    return value


Count = Annotated[int, BeforeValidator(_no_boolean)]
Number = Annotated[float, BeforeValidator(_no_boolean)]
TokenId = Annotated[int, Field(strict=True, ge=0)]  # strict: true is no number


def _kind_of_prompt(prompt: Any) -> str:
    """Which of the four kinds of prompts this is, by its first element: the others are checked as elements of it."""
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else ""
    if isinstance(first, list):
        return "lists of ids"
    return "texts" if isinstance(first, str) else "ids"


def _prompt_text(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError(f"expected a string, a list of token ids, or a list of either, got {name_type(value)}")
    return value


_FIRST_ERROR: Final = Field(fail_fast=True)
# A text, its token ids, or a list of either. Only the kind that a value is of is checked, up to its first error.
Prompts = Annotated[
    Annotated[str, BeforeValidator(_prompt_text), Tag("text")]
    | Annotated[list[TokenId], _FIRST_ERROR, Tag("ids")]
    | Annotated[list[str], _FIRST_ERROR, Tag("texts")]
    | Annotated[list[Annotated[list[TokenId], _FIRST_ERROR]], _FIRST_ERROR, Tag("lists of ids")],
    Discriminator(_kind_of_prompt),
]


# A hint, not a constraint: `effort.py` says what becomes of it.
Effort = Annotated[str, Field(max_length=64)]


class StreamOptions(RequestBody):
    """Options of a stream."""

    lists: ClassVar[fields.Lists] = fields.STREAM_OPTIONS

    include_usage: bool = False
    continuous_usage_stats: bool = False  # as in vLLM, only together with `include_usage`


class ResumedAnswer(RequestBody):
    """Tokens of one answer that another replica has generated."""

    output_token_ids: list[TokenId]
    finished: bool = False  # the client has the whole answer: its tokens only count in the usage


class Resume(RequestBody):
    """Answers as far as another replica has streamed them; only from the gateway (`request_context.py`)."""

    answers: list[ResumedAnswer]  # all answers of the request, by index
    id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]{1,160}$")  # id of the response
    created: int | None = None


class GenerationRequest(RequestBody):
    """Fields that chat and completions have in common."""

    lists: ClassVar[fields.Lists] = fields.GENERATION

    model: str = Field(default="", max_length=1024)  # empty: the one model that is served
    max_tokens: Count | None = Field(default=None, ge=1)
    temperature: Number | None = Field(default=None, ge=0, le=2)
    top_p: Number | None = Field(default=None, gt=0, le=1)
    presence_penalty: Number | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: Number | None = Field(default=None, ge=-2, le=2)
    seed: Count | None = Field(default=None, ge=-_INT64 - 1, le=_INT64)
    stop: Annotated[str | list[str], AfterValidator(_stops)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[Count, BeforeValidator(_number_of_answers)] | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = Field(default=None, max_length=1024)

    # vLLM's extensions of OpenAI's fields.
    # 0 and -1: off. As in vLLM, more than the vocabulary is all of it.
    top_k: Count | None = Field(default=None, ge=-1, le=_INT64)
    min_p: Number | None = Field(default=None, ge=0, le=1)
    repetition_penalty: Number | None = Field(default=None, gt=0, le=2)
    min_tokens: Count | None = Field(default=None, ge=0)
    ignore_eos: bool | None = False
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=256)
    skip_special_tokens: bool | None = True
    include_stop_str_in_output: bool | None = False
    cache_salt: str | None = Field(default=None, max_length=256)
    prompt_logprobs: Count | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    truncate_prompt_tokens: Count | None = Field(default=None, ge=-1)  # keep the last so many; -1: as many as fit
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    echo: bool | None = False
    add_special_tokens: bool | None = None
    priority: Count | None = Field(default=None, ge=-1000, le=1000)  # as in vLLM: lower goes first
    request_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]{1,128}$")
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None  # older names of `structured_outputs`
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    slipway_resume: Resume | None = None

    cuts_max_tokens: ClassVar[bool] = False  # more tokens than the context has: as many as fit, not an error

    # Requests of one user or of one key stay together; the gateway reads them.
    user: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidField("stream_options", "is only allowed when stream is true")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidField("prompt_logprobs", "is only allowed when stream is false")
        guided = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
        binding = ["structured_outputs"] if self.structured_outputs is not None else []
        binding += [name for name in guided if getattr(self, name) is not None]
        if self.response_format is not None and self.response_format.type != "text":
            binding.append("response_format")
        if len(binding) > 1:
            raise InvalidField(binding[1], f"binds the answer, and so does {binding[0]}; only one may")
        if self.slipway_resume is not None and len(self.slipway_resume.answers) != self.all_answers:
            raise InvalidField("slipway_resume", f"has to have the tokens of all {self.all_answers} answers")
        return self

    @property
    def stops(self) -> Sequence[str]:
        """The stop strings as a list."""
        return self.stop or ()

    @property
    def wanted_tokens(self) -> int | None:
        """The client's limit on the tokens of an answer; None: not set."""
        return self.max_tokens

    @property
    def wanted_answers(self) -> int:
        """The number of answers to each prompt."""
        return self.n or 1

    @property
    def all_answers(self) -> int:
        """How many answers the request gets in all."""
        return self.wanted_answers

    @property
    def wanted_logprobs(self) -> int | None:
        """The number of top logprobs for each sampled token; None: no logprobs at all."""
        raise NotImplementedError

    @property
    def logprobs_field(self) -> str:
        """The field with the number of top logprobs."""
        raise NotImplementedError

    @property
    def only_scores(self) -> bool:
        """Whether to compute logprobs of the prompt only, without an answer."""
        return False


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    lists: ClassVar[fields.Lists] = fields.CHAT

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: Count | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: Count | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Annotated[Tool, ONLY_FUNCTIONS]] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Annotated[Literal["none", "auto", "required"] | NamedTool, ONLY_FUNCTION_CHOICES] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = True  # vLLM's; false: the answer comes without it

    @model_validator(mode="after")
    def _makes_sense_together(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidField("top_logprobs", "is only allowed when logprobs is true")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise InvalidField("continue_final_message", "needs an assistant's message at the end")
        if self.continue_final_message and "add_generation_prompt" not in self.model_fields_set:
            object.__setattr__(self, "add_generation_prompt", False)  # the pydantic model is frozen
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidField("continue_final_message", "and add_generation_prompt exclude each other")
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) != len(names):
            raise InvalidField("tools", "names a function twice")
        if not names and (self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)):
            raise InvalidField("tool_choice", "wants a tool, and tools is empty")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise InvalidField("tool_choice", "names a function that is not among the tools")
        # A forced call drops a response format, as in vLLM; what only vLLM's fields bind is not dropped silently.
        guided = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        binds = self.structured_outputs is not None or any(value is not None for value in guided)
        if binds and names and self.tool_choice not in (None, "none", "auto"):
            raise InvalidField(
                "tool_choice", "forces a call, and the format of the answer is bound too; only one may be"
            )

    @property
    def wanted_tokens(self) -> int | None:
        """The token limit: `max_completion_tokens`, or its older name `max_tokens`."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """The number of top logprobs: `top_logprobs`, where `logprobs` is true."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def logprobs_field(self) -> str:
        """The field with the number of top logprobs; without it, the switch."""
        return "logprobs" if self.top_logprobs is None else "top_logprobs"


class CompletionRequest(GenerationRequest):
    """POST /v1/completions: one prompt or several, each a text or its token ids."""

    lists: ClassVar[fields.Lists] = fields.COMPLETION

    prompt: Prompts
    max_tokens: Count | None = Field(default=None, ge=0)
    logprobs: Count | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    best_of: Count | None = None

    @model_validator(mode="after")
    def _makes_sense_together(self) -> Self:
        if not self.prompt:
            raise InvalidField("prompt", "is empty: at least one token is needed")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidField("max_tokens", "is 0: that scores a prompt, and only makes sense with echo")
        if len(self.prompts) > MAX_PROMPTS:
            raise InvalidField(
                "prompt", f"holds {len(self.prompts)} prompts; at most {MAX_PROMPTS} fit into one request"
            )
        if self.best_of is not None and self.best_of < self.wanted_answers:
            raise InvalidField("best_of", f"is {self.best_of}, below n, which is {self.wanted_answers}")
        if self.best_of is not None and self.best_of > self.wanted_answers:
            raise InvalidField("best_of", "above n is not supported: every answer that is generated is returned")
        if len(self.prompts) * self.wanted_answers > MAX_PROMPTS:
            raise InvalidField("n", f"times the number of prompts is at most {MAX_PROMPTS}")
        return self

    @property
    def all_answers(self) -> int:
        """How many answers the request gets in all."""
        return len(self.prompts) * self.wanted_answers

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list, also where a single one was given."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt

    @property
    def wanted_logprobs(self) -> int | None:
        """The number of top logprobs: `logprobs` is an integer here."""
        return self.logprobs

    @property
    def logprobs_field(self) -> str:
        """The field with the number of top logprobs."""
        return "logprobs"

    @property
    def only_scores(self) -> bool:
        """Whether `echo` is used with `max_tokens` 0."""
        return self.max_tokens == 0


class TokenizeRequest(RequestBody):
    """POST /tokenize: a text, tokenized as for a completion, or messages, as for a chat."""

    lists: ClassVar[fields.Lists] = fields.TOKENIZE

    model: str = Field(default="", max_length=1024)
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, max_length=MAX_MESSAGES)
    tools: list[Annotated[Tool, ONLY_FUNCTIONS]] | None = Field(default=None, max_length=MAX_TOOLS)
    add_special_tokens: bool | None = None  # by default true for a text and false for a chat
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise InvalidField("prompt", "or messages: exactly one of them is needed")
        return self


class DetokenizeRequest(RequestBody):
    """POST /detokenize."""

    model: str = Field(default="", max_length=1024)
    tokens: list[TokenId]
