"""Structured output: translates the fields of a request to a Grammar, and validates it before the request is queued.

A grammar is compiled here once, in a thread and with a time limit, only to refuse grammars that the engine could not
enforce: an invalid schema is a 400 before the request is queued, and a hostile one does not delay other requests.
"""

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from starlette.requests import Request
from tokenizers import Tokenizer

from slipway_runtime.engine.grammar import GrammarCompiler, GrammarRefusedError
from slipway_runtime.engine.schemas import prepared
from slipway_runtime.messages import Grammar
from slipway_runtime.server.chat_types import ResponseFormat, StructuredOutputs
from slipway_runtime.server.errors import ApiError
from slipway_runtime.server.openai_types import GenerationRequest

CHECK_SECONDS: Final = 10.0
MAX_WAITING: Final = 64  # concurrent grammar checks; more get a 429


def grammar_of(body: GenerationRequest) -> tuple[Grammar, str] | None:
    """The grammar of the request, and the name of the field that has it; None: no grammar."""
    if (bound := body.structured_outputs) is not None:
        return _structured(bound), "structured_outputs"
    if body.response_format is not None and body.response_format.type != "text":
        return _format(body.response_format), "response_format"
    if body.guided_json is not None:
        return Grammar(kind="json_schema", text=_schema_text(body.guided_json)), "guided_json"
    if body.guided_regex is not None:
        return Grammar(kind="regex", text=body.guided_regex), "guided_regex"
    if body.guided_choice is not None:
        return Grammar(kind="choice", text=_as_text(body.guided_choice)), "guided_choice"
    if body.guided_grammar is not None:
        return Grammar(kind="lark", text=body.guided_grammar), "guided_grammar"
    return None


def _structured(bound: StructuredOutputs) -> Grammar:
    if bound.json_ is not None:
        return Grammar(
            kind="json_schema", text=_schema_text(bound.json_, is_compact=bool(bound.disable_any_whitespace))
        )
    if bound.regex is not None:
        return Grammar(kind="regex", text=bound.regex)
    if bound.choice is not None:
        return Grammar(kind="choice", text=_as_text(bound.choice))
    if bound.grammar is not None:
        return Grammar(kind="lark", text=bound.grammar)
    if bound.structural_tag is not None:
        return Grammar(kind="structural_tag", text=_as_text(bound.structural_tag))
    return Grammar(kind="json_object", text="")


def _format(wanted: ResponseFormat) -> Grammar:
    if wanted.json_schema is not None:
        return Grammar(
            kind="json_schema", text=_schema_text(wanted.json_schema.schema_, strict=bool(wanted.json_schema.strict))
        )
    if wanted.type == "structural_tag":
        tag = {"type": "structural_tag", "structures": wanted.structures, "triggers": wanted.triggers}
        return Grammar(kind="structural_tag", text=_as_text(tag))
    return Grammar(kind="json_object", text="")


def unenforced_of(body: GenerationRequest) -> set[str]:
    """The keywords of a request's schema that its grammar does not enforce, after the field that has the schema."""
    given: list[tuple[str, Any]] = [("guided_json", body.guided_json)]
    if body.structured_outputs is not None:
        given.append(("structured_outputs.json", body.structured_outputs.json_))
    if body.response_format is not None and (wanted := body.response_format.json_schema) is not None:
        given.append(("response_format.json_schema.schema", wanted.schema_))
    return {name for field, value in given for name in keywords_of(field, prepared(_parsed(value)).unenforced)}


def keywords_of(field: str, paths: Sequence[str]) -> set[str]:
    """The names of unenforced keywords for a header: without the path, which holds a client's own names."""
    return {f"{field}.{path.rpartition('/')[2]}" for path in paths}


def note_unenforced(http: Request, keywords: set[str]) -> None:
    """Note keywords without effect, as ignored fields are noted: the response names them."""
    if keywords:
        http.state.ignored = getattr(http.state, "ignored", {}) | dict.fromkeys(sorted(keywords), True)


def _schema_text(value: Mapping[str, Any] | str | bool, *, is_compact: bool = False, strict: bool = False) -> str:
    """A schema for the compiler; raises ApiError 400 if it is strict and a part of it cannot be enforced."""
    parsed = _parsed(value)
    if not isinstance(parsed, Mapping):
        return _as_text(value)
    ready = prepared(parsed)
    if strict and ready.unenforced:
        raise ApiError(
            400,
            f"response_format: {ready.unenforced[0]} of the schema cannot be enforced; remove it, or set strict to"
            " false",
            param="response_format",
        )
    return _as_text(ready.schema, is_compact=is_compact)


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None  # the compiler says why


def _as_text(value: Mapping[str, Any] | list[str] | str | bool, *, is_compact: bool = False) -> str:
    if is_compact and isinstance(value, Mapping):
        value = compact(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def compact(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with at most one space between JSON tokens: a weak model could repeat spaces without end."""
    return {"x-guidance": {"whitespace_pattern": " ?", "coerce_one_of": True}, **schema}


class GrammarValidator:
    """Validates grammars for one model, in threads of its own."""

    def __init__(
        self,
        compiler: Callable[[], GrammarCompiler],
        *,
        seconds: float = CHECK_SECONDS,
        cpu_seconds: Callable[[int], float] | None = None,
    ) -> None:
        """`compiler` is called once: it reads the vocabulary, which takes up to 3 s of processor time.

        `cpu_seconds`: the processor time of a thread so far, by its identifier.
        """
        self._make = compiler
        self._making = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._seconds = seconds
        self._cpu_seconds = cpu_seconds or _cpu_seconds
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="grammar")
        self._waiting = 0

    @classmethod
    def over(cls, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]) -> "GrammarValidator":
        """A validator for a model with this vocabulary."""
        return cls(lambda: GrammarCompiler(tokenizer.to_str(), eos_token_ids=eos_token_ids))

    def prepare(self) -> GrammarCompiler:
        """Read the vocabulary, once. The server calls it before it is ready, so that no request waits for it."""
        with self._making:
            if self._compiler is None:
                self._compiler = self._make()
            return self._compiler

    async def check(self, grammar: Grammar, param: str) -> None:
        """Compile the grammar; raises ApiError.

        | the grammar                                          | status                 |
        |------------------------------------------------------|------------------------|
        | is invalid, or is more than the limits allow         | 400, with the reason   |
        | has used half of the time limit of a processor       | 400: it is too complex |
        | has not, because the machine or the threads are busy | 503 with Retry-After   |
        | comes while 64 others are being checked              | 429 with Retry-After   |
        """
        if self._waiting >= MAX_WAITING:
            raise ApiError(
                429, "too many grammars are being checked", headers={"Retry-After": "1", "retry-after-ms": "1000"}
            )
        self._waiting += 1
        field = param.split(":")[0]
        work = _Check(self, grammar)
        try:
            async with asyncio.timeout(self._seconds):
                await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except GrammarRefusedError as refusal:
            raise ApiError(400, f"{param}: {refusal}", param=field) from None
        except TimeoutError:
            if work.cpu_seconds(self._cpu_seconds) < self._seconds / 2:
                raise ApiError(
                    503,
                    f"{param} was not compiled within {self._seconds:.0f} s because the server is busy; try again",
                    param=field,
                    headers={"Retry-After": "5"},
                ) from None
            raise ApiError(
                400, f"{param} takes longer than {self._seconds:.0f} s to compile", param=param.split(":")[0]
            ) from None
        finally:
            self._waiting -= 1


class _Check:
    """One check in a thread, and the processor time that its compilation has used."""

    def __init__(self, validator: GrammarValidator, grammar: Grammar) -> None:
        self._validator = validator
        self._grammar = grammar
        self._thread: int | None = None  # None: the compilation has not begun
        self._began = 0.0

    def __call__(self) -> None:
        compiler = self._validator.prepare()
        self._began = time.thread_time()
        self._thread = threading.get_ident()
        compiler.check(self._grammar)

    def cpu_seconds(self, of_thread: Callable[[int], float]) -> float:
        """The processor time so far; 0 if the compilation has not begun."""
        return of_thread(self._thread) - self._began if self._thread is not None else 0.0


def _cpu_seconds(thread: int) -> float:
    """The processor time of a thread; without a limit on systems that do not tell it, such as macOS."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    return time.clock_gettime(clock_of(thread)) if clock_of is not None else math.inf
