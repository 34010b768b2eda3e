"""Encodes prompts to token ids: chat template, special tokens, truncation and the context limit.

A chat template writes its own special tokens, so a rendered chat is tokenized without adding any; a plain text gets
those that the tokenizer adds by default. Both are identical to `transformers`. Rendering and tokenizing run in threads,
so that a long prompt does not delay the streams of other requests; large prompts run in a thread of their own, so
that ten of them do not delay a small one.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from slipway_runtime.server.chat_types import ChatMessage, Tool
from slipway_runtime.server.errors import ApiError, prompt_too_long
from slipway_runtime.server.template import ChatTemplate
from slipway_runtime.server.tokenizer import TokenizerFiles, TokenText

LARGE: Final = 32 * 1024  # characters; some ten milliseconds of tokenizing
_T = TypeVar("_T")


@dataclass(frozen=True)
class Prompt:
    """The token ids of a prompt, and its text, which is needed for `echo`."""

    token_ids: tuple[int, ...]
    text: str = ""


class PromptEncoder:
    """Encodes and decodes prompts of one model."""

    def __init__(
        self, files: TokenizerFiles, *, max_model_len: int, threads: Executor, large: Executor | None = None
    ) -> None:
        self.files = files
        self.max_model_len = max_model_len
        self.tokens = TokenText(files.tokenizer)
        self.template = ChatTemplate(files.chat_template, files.special_tokens)
        self._threads = threads
        self._large = large or ThreadPoolExecutor(1, thread_name_prefix="prompt-large")

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
        keep: int | None = None,
    ) -> Prompt:
        """Encode a conversation, with the generation prompt by default. `keep`: as for `truncate`."""

        def work() -> Prompt:
            text = self.template.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                arguments=template_arguments,
            )
            return self._encode(text, add_special_tokens, param="messages", keep=keep)

        return await self._in_thread(work, size=sum(len(message.text) for message in messages))

    async def text(self, text: str, *, add_special_tokens: bool = True, keep: int | None = None) -> Prompt:
        """Encode a plain text."""
        return await self._in_thread(
            lambda: self._encode(text, add_special_tokens, param="prompt", keep=keep), size=len(text)
        )

    async def ids(self, token_ids: Sequence[int], vocab_size: int, *, keep: int | None, with_text: bool) -> Prompt:
        """A prompt from token ids."""
        if any(token_id >= vocab_size or token_id < 0 for token_id in token_ids):
            raise ApiError(400, f"prompt holds an id outside the vocabulary of {vocab_size}", param="prompt")
        kept = truncate(token_ids, keep, self.max_model_len)
        return Prompt(kept, await self.decode(kept, skip_special_tokens=True) if with_text else "")

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Decode token ids to text."""
        return await self._in_thread(
            lambda: self.files.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens),
            size=len(token_ids),
        )

    def _encode(self, text: str, add_special_tokens: bool, *, param: str, keep: int | None) -> Prompt:
        # Refuses a huge text without tokenizing it: no token stands for more bytes than this.
        at_least = len(text.encode()) // self.files.longest_token
        if at_least > self.max_model_len and keep is None:
            raise prompt_too_long(self.max_model_len, at_least, at_least=True, param=param)
        ids = self.files.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return Prompt(truncate(ids, keep, self.max_model_len), text)

    async def _in_thread(self, work: Callable[[], _T], *, size: int) -> _T:
        threads = self._large if size > LARGE else self._threads
        return await asyncio.get_running_loop().run_in_executor(threads, work)


def truncate(ids: Sequence[int], keep: int | None, max_model_len: int) -> tuple[int, ...]:
    """The last `keep` ids; -1 keeps as many as leave room for one answer token, None keeps all."""
    if keep is None:
        return tuple(ids)
    last = max_model_len - 1 if keep == -1 else keep
    return tuple(ids[-last:]) if last else ()
