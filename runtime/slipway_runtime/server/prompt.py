"""Encodes prompts to token ids: chat template, special tokens, truncation and the context limit.

A chat template writes its own special tokens, so a rendered chat is tokenized without adding any; a plain text gets
those that the tokenizer adds by default. Both are identical to `transformers`. Rendering and tokenizing run in threads,
so that a long prompt does not delay the streams of other requests; large prompts run in a thread of their own, so
that ten of them do not delay a small one.

Chat templates come from the model's author and run in jinja's sandbox; their variables are plain data.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Final, NoReturn, TypeVar

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Const, Name, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipway_runtime.server import harmony, pairs
from slipway_runtime.server.chat_types import ChatMessage, Tool
from slipway_runtime.server.errors import ApiError, prompt_too_long
from slipway_runtime.server.template_tools import ToolFormat, text_of_calls, tool_format, with_tools_in_message
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
        self,
        files: TokenizerFiles,
        *,
        max_model_len: int,
        threads: Executor,
        large: Executor | None = None,
        tool_call_parser: str = "auto",
    ) -> None:
        """`tool_call_parser`: as the setting."""
        self.files = files
        self.max_model_len = max_model_len
        self.tokens = TokenText(files.tokenizer)
        self.template = ChatTemplate(
            files.chat_template,
            files.special_tokens,
            tool_source=files.tool_template,
            tool_call_parser=tool_call_parser,
        )
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
        opening: str = "",
    ) -> Prompt:
        """Encode a conversation, with the generation prompt by default.

        `keep`: as for `truncate`; `opening`: the beginning of the answer, which is part of the prompt.
        """

        def work() -> Prompt:
            text = self.template.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                arguments=template_arguments,
            )
            return self._encode(text + opening, add_special_tokens, param="messages", keep=keep)

        return await self._in_thread(work, size=sum(len(message.text) for message in messages))

    async def text(
        self, text: str, *, add_special_tokens: bool = True, keep: int | None = None, field: str = "prompt"
    ) -> Prompt:
        """Encode a plain text. `field`: its name in the request, for the error."""
        return await self._in_thread(
            lambda: self._encode(text, add_special_tokens, param=field, keep=keep), size=len(text)
        )

    async def pair(self, query: str, document: str, *, judges: bool, field: str = "documents") -> Prompt:
        """Encode a query and a document for a reranker.

        By the chat template, if it has the roles query and document; else as Qwen3-Reranker was trained, if the model
        `judges`, that is, answers no or yes; else as a pair of texts, as the tokenizer joins them. `field`: of the
        document in the request, for the error.
        """

        def work() -> Prompt:
            if self.template.scores_pairs:
                return self._encode(self.template.render_pair(query, document), False, param=field, keep=None)
            if judges:
                return self._encode(pairs.judged(query, document), False, param=field, keep=None)
            at_least = len(query.encode() + document.encode()) // self.files.longest_token
            if at_least > self.max_model_len:
                raise prompt_too_long(self.max_model_len, at_least, at_least=True, param=field)
            return Prompt(tuple(self.files.tokenizer.encode(query, document).ids))

        return await self._in_thread(work, size=len(query) + len(document))

    async def ids(
        self, token_ids: Sequence[int], vocab_size: int, *, keep: int | None, with_text: bool, field: str = "prompt"
    ) -> Prompt:
        """A prompt from token ids. `field`: their name in the request, for the error."""
        if any(token_id >= vocab_size or token_id < 0 for token_id in token_ids):
            raise ApiError(400, f"{field} holds an id outside the vocabulary of {vocab_size}", param=field)
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


# What jinja raises where a template computes with a value that it does not expect.
_CANNOT_RENDER: Final = (TypeError, ValueError, KeyError, AttributeError, RecursionError, OverflowError)
_CONTINUE: Final = "CONTINUE_FINAL_MESSAGE_TAG "  # marks the end of the last message; removed with all text after it


class ChatTemplate:
    """A compiled chat template and its special tokens; rendered exactly as `transformers` does."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        tool_source: str = "",
        tool_call_parser: str = "auto",
    ) -> None:
        """`tool_source`: the template for requests with tools, if the model has another one for them."""
        self.source = source
        self._special_tokens = special_tokens
        self._tool_call_parser = tool_call_parser
        environment = _environment()
        self._template = environment.from_string(source) if source else None
        self._tool_template = environment.from_string(tool_source) if tool_source else self._template
        trees = [environment.parse(text) for text in {source, tool_source}]
        # The names that it reads, and its texts: what it does with a variable is in its code, not in its comments.
        self.variables = frozenset(node.name for tree in trees for node in tree.find_all(Name) if node.ctx == "load")
        self.words = frozenset(
            node.value for tree in trees for node in tree.find_all(Const) if isinstance(node.value, str)
        )

    @cached_property
    def tools(self) -> ToolFormat:
        """How the template shows tools, and how its model writes calls: found by rendering it with a probe."""
        return tool_format(self._probed, self._tool_call_parser)

    @property
    def shows_tools(self) -> bool:
        """Whether the template writes the tools into the prompt."""
        return bool(self.tools.place)

    def _probed(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        if self._tool_template is None:
            return ""
        given = {"messages": list(messages), "tools": list(tools) or None, "documents": None}
        return self._tool_template.render(**self._special_tokens, **given, add_generation_prompt=False)

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the conversation to text; raises ApiError 400 where the template refuses it."""
        if self._template is None:
            raise ApiError(400, "this model has no chat template: use /v1/completions, or set one for the service")
        seen = [template_message(message) for message in messages]
        if harmony.CHANNEL in self.source:
            seen = [harmony.template_message(message) for message in seen]
        shown = [_tool_variables(tool) for tool in tools]
        if not self.tools.writes_calls:
            seen = [self._with_written_calls(message) for message in seen]
        if shown and self.tools.place == "message":
            seen = [dict(message) for message in with_tools_in_message(seen, shown)]
        final = ""
        if continue_final_message:
            final = seen[-1].get("content") or ""
            seen[-1]["content"] = final + _CONTINUE
        variables = {
            **self._special_tokens,
            **(arguments or {}),
            "messages": seen,
            "tools": shown or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._rendered(variables)
        return _cut_at_mark(text, final) if continue_final_message else text

    @property
    def scores_pairs(self) -> bool:
        """Whether it is a reranker's: it shows messages of the roles query and document, as vLLM's do."""
        return pairs.names_roles(self.source)

    def render_pair(self, query: str, document: str) -> str:
        """Render a query and a document; raises ApiError 400 if the template refuses them."""
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        variables = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        return self._rendered({**self._special_tokens, **variables})

    def _with_written_calls(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message whose calls are a part of its text, because the template would leave them out."""
        form = self.tools.form
        if not message.get("tool_calls") or form not in {"phi4_mini", "hermes", "mistral", "llama3"}:
            return message
        text = message["content"] or ""
        return message | {"content": f"{text}\n{text_of_calls(message['tool_calls'], form)}".lstrip("\n")}

    def _rendered(self, variables: dict[str, Any]) -> str:
        """Render the template with the first form of the history that it takes; raises ApiError 400 for none.

        Templates differ in what they take: system messages only at the beginning, arguments of calls only as objects.
        The client cannot change what was said, so each is tried; the refusal is that of the history as it came.
        """
        refusal: ApiError | None = None
        for messages in _histories(variables["messages"]):
            try:
                text = self._with_contents(variables | {"messages": messages})
            except TemplateError as error:
                # The template refuses some messages, such as a system message; the sentence is its author's.
                refusal = refusal or _refused(f"the chat template refuses these messages: {error.message}")
            except _CANNOT_RENDER:
                refusal = refusal or _refused("the chat template cannot render these messages")
            else:
                if _shows_system(text, messages):
                    return text
                refusal = refusal or _refused("the chat template does not show these system messages")
        assert refusal is not None
        raise refusal

    def _with_contents(self, variables: dict[str, Any]) -> str:
        """Render the template; an assistant's message without text, only with tool calls, has the content None.

        Some templates recognise calls by that None (DeepSeek), others fail to append it to a text, or write the word
        None. For the latter two the content is rendered as an empty text, as vLLM does for every template.
        """
        template = self._tool_template if variables["tools"] else self._template
        assert template is not None
        messages = variables["messages"]
        if all(message["content"] is not None for message in messages):
            return template.render(**variables)
        with_empty = [message | {"content": message["content"] or ""} for message in messages]
        try:
            text = template.render(**variables)
        except (TemplateError, *_CANNOT_RENDER):
            return template.render(**variables | {"messages": with_empty})
        if "None" not in text:
            return text
        try:
            other = template.render(**variables | {"messages": with_empty})
        except (TemplateError, *_CANNOT_RENDER):
            return text
        return other if other.count("None") < text.count("None") else text


def _tool_variables(tool: Tool) -> dict[str, Any]:
    """A tool as the template sees it, with its keys in the order of the request."""
    given = tool.model_dump(exclude_none=True)
    function = given.get("function", {})
    order = [name for name in getattr(tool.function, "key_order", ()) if name in function]
    return given | {"function": {name: function[name] for name in [*order, *function]}}


def _histories(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The messages as they came, then in the forms that more templates take."""
    yield messages
    objects = _with_objects(messages)
    if objects != messages:
        yield objects
    merged = _with_one_system(messages)
    if merged != messages:
        yield merged
        if objects != messages:
            yield _with_one_system(objects)


def _with_objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with an empty object for arguments that are none, as vLLM has it."""

    def mended(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return call if isinstance(function["arguments"], dict) else call | {"function": function | {"arguments": {}}}

    return [
        message | {"tool_calls": [mended(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the text of all system messages in one, at the beginning."""
    texts = [message["content"] or "" for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others] if texts else messages


def _shows_system(text: str, messages: list[dict[str, Any]]) -> bool:
    """Whether the prompt has the text of each system message after the first message: some templates drop them."""
    later = (message["content"] or "" for message in messages[1:] if message["role"] == "system")
    return all(content.strip() in text for content in later)


def template_message(message: ChatMessage) -> dict[str, Any]:
    """Translate a message to the template's variables; the role `developer` is OpenAI's newer name of `system`.

    Arguments of tool calls arrive as JSON text, and templates write them with `tojson`, so they are parsed to objects.
    Only a message that calls tools may be without a content: elsewhere none is an empty text.
    """
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    is_empty = message.content is None and not message.refusal
    seen: dict[str, Any] = {"role": role, "content": None if is_empty and message.calls else message.text}
    if message.name:
        seen["name"] = message.name
    if reasoning := message.reasoning_content or message.reasoning:
        # Templates of different models read it under different names; transformers fills both.
        seen |= {"reasoning_content": reasoning, "thinking": reasoning}
    if message.tool_call_id is not None:
        seen["tool_call_id"] = message.tool_call_id
    if message.calls:
        seen["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.calls
        ]
    return seen


def _arguments(text: str) -> Any:
    """The arguments as an object; what is none stays the text that the model wrote, so that it sees its mistake."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text


def _cut_at_mark(text: str, final: str) -> str:
    """Cut the text at the end of the last message; a template that trims messages has also trimmed the mark's space."""
    if final.strip() not in text or _CONTINUE.strip() not in text:
        raise _refused("the chat template does not show the final message, so it cannot be continued")
    at = text.rindex(_CONTINUE.strip())
    kept = text[:at]
    return kept if text[at : at + len(_CONTINUE)] == _CONTINUE else kept.rstrip()


def _refused(sentence: str) -> ApiError:
    return ApiError(400, sentence, param="messages")


# --- the jinja sandbox, as in transformers


class _GenerationBlocks(Extension):
    """`{% generation %}` marks text for training; rendered as its body."""

    tags = {"generation"}  # noqa: RUF012  as jinja declares it

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
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # local time, as in transformers
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` filter as in transformers: jinja's own filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
