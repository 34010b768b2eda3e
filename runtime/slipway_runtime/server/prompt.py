"""From what a client sent to token ids: the chat template, the special-tokens rule, and the limit of the context.

A chat template writes its own special tokens, so a rendered chat is tokenized without adding any; a plain text gets
those that the tokenizer puts in front by itself. Both are what `transformers` does, to the byte. Rendering and
tokenizing run in threads, because a long prompt must not hold up the streams of others.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from datetime import datetime
from typing import Any, NoReturn, TypeVar

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipway_runtime.server.errors import ApiError, prompt_too_long
from slipway_runtime.server.openai_types import ChatMessage
from slipway_runtime.server.tokenizer import TokenizerFiles

_T = TypeVar("_T")


class PromptEncoder:
    """Writes prompts for one model."""

    def __init__(self, files: TokenizerFiles, *, max_model_len: int, threads: Executor) -> None:
        self.files = files
        self.max_model_len = max_model_len
        self._threads = threads
        self._template = _environment().from_string(files.chat_template) if files.chat_template else None

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        template_arguments: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
    ) -> tuple[int, ...]:
        """The ids of a conversation, up to where the assistant begins to speak."""

        def work() -> tuple[int, ...]:
            text = self.render(messages, add_generation_prompt, template_arguments or {})
            return self._encode(text, add_special_tokens, param="messages")

        return await self._in_thread(work)

    async def text(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The ids of a plain text."""
        return await self._in_thread(lambda: self._encode(text, add_special_tokens, param="prompt"))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return await self._in_thread(lambda: self.files.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def render(
        self, messages: Sequence[ChatMessage], add_generation_prompt: bool, template_arguments: Mapping[str, Any]
    ) -> str:
        """The conversation as the model was trained to read it."""
        if self._template is None:
            raise ApiError(400, "this model has no chat template: use /v1/completions, or set one for the service")
        try:
            return self._template.render(
                **{
                    **self.files.special_tokens,
                    **template_arguments,
                    "messages": [_as_template_sees(message) for message in messages],
                    "tools": None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except TemplateError as error:
            # The template says what it does not take, such as a system message; its sentence is the model author's.
            raise ApiError(
                400, f"the chat template refuses these messages: {error.message}", param="messages"
            ) from None

    def check_length(self, token_ids: Sequence[int], param: str) -> None:
        """Refuse a prompt that leaves no room for an answer."""
        if len(token_ids) >= self.max_model_len:
            raise prompt_too_long(self.max_model_len, len(token_ids), param=param)

    def _encode(self, text: str, add_special_tokens: bool, param: str) -> tuple[int, ...]:
        # Ten megabytes are refused in no time: a token stands for so many bytes at most.
        at_least = len(text.encode()) // self.files.longest_token
        if at_least > self.max_model_len:
            raise prompt_too_long(self.max_model_len, at_least, at_least=True, param=param)
        return tuple(self.files.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _as_template_sees(message: ChatMessage) -> dict[str, str]:
    """A message in the words that templates know: `developer` is OpenAI's newer name of `system`."""
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": message.text} | ({"name": message.name} if message.name else {})


# --- the sandbox, as transformers builds it


class _GenerationBlocks(Extension):
    """`{% generation %}` marks what a model learns from; for rendering it is only its body."""

    tags = {"generation"}  # noqa: RUF012  jinja's own way to declare it

    def parse(self, parser: Parser) -> Node:
        """Render the block's body in place."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # local time, as everywhere
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on: jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
