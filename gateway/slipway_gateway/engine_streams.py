"""Continues streams of vLLM: it knows no marks, but reports the token ids of its events (`return_token_ids`).

1. The request is sent with `return_token_ids`. The ids are taken out of the events and kept in the journal, with those
   of the prompt, which the first event has.
2. A stream that breaks off is sent to another replica of the same revision as a completion of prompt and answer so
   far. Its events get the id, the form and the usage of the stream that the client reads.

| such a request                                                     | ends with an error event, because           |
|--------------------------------------------------------------------|---------------------------------------------|
| has a field that is not in `_FIELDS`, such as `stop`, `tools`, `n` | another replica lacks the state behind it   |
| samples with a `seed` of its client                                | vLLM restarts the sequence of a seed        |
| is a chat whose answer has reasoning or tool calls                 | they are parsed from the first token on     |

An answer of temperature 0 is that of an undisturbed run, as far as vLLM computes a prompt and a step alike.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from slipway_gateway.journal import BYTES_PER_TOKEN_ID, Identified, Journal, JournalMemory, with_field
from slipway_gateway.picker.endpoints import Endpoint
from slipway_gateway.sse import DONE, MAX_PENDING

VLLM: Final = "vllm"
COMPLETIONS: Final = "/v1/completions"
CHATS: Final = "/v1/chat/completions"
_SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos", "stop_token_ids")
_LIMITS: Final = ("max_tokens", "max_completion_tokens")
_DEFAULT_LIMIT: Final = 16  # of a completion; a chat may fill the context
_COMMON: Final = ("model", "stream", "stream_options", "seed", "n", "user", *_SAMPLING)
_FIELDS: Final = {
    COMPLETIONS: frozenset({*_COMMON, "prompt", "max_tokens"}),
    CHATS: frozenset({*_COMMON, "messages", "chat_template_kwargs", *_LIMITS}),
}  # fmt: skip
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_EMPTY: Final[tuple[Any, ...]] = (None, [], "", {})


def can_continue(path: str, content: bytes, *, has_seed: bool) -> bool:
    """Whether another vLLM can continue the stream of this request."""
    known = _FIELDS.get(path)
    if known is None:
        return False
    fields = {name: value for name, value in _decode(content).items() if value not in _EMPTY and value is not False}
    is_known = fields.keys() <= known and fields.get("n", 1) == 1
    is_repeatable = not has_seed or fields.get("temperature") == 0
    limits = [fields[name] for name in _LIMITS if name in fields]
    options = fields.get("stream_options", {})
    return (
        is_known
        and is_repeatable
        and all(type(limit) is int for limit in limits)
        and isinstance(options, dict)
        and options.keys() <= {"include_usage"}
        and (_is_text(fields.get("messages")) if path == CHATS else _is_one_prompt(fields.get("prompt")))
    )


def _is_one_prompt(prompt: Any) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and all(type(one) is int for one in prompt))


def _is_text(messages: Any) -> bool:
    """Whether the tokens of a chat's prompt are all of it: those of an image only keep its place."""
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        return False
    contents = [one.get("content") for one in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(isinstance(one, dict) and one.get("type") == "text" for one in parts)


class EngineJournal(Journal):
    """The journal of a stream of vLLM."""

    __slots__ = ("_fields", "_path", "include_usage", "is_chat", "prompt_ids", "resumed")

    def __init__(
        self, path: str, content: bytes, service: str, memory: JournalMemory, on_given_up: Callable[[str], None]
    ) -> None:
        super().__init__(with_field(content, "return_token_ids", True), 1, service, memory, on_given_up)
        self._path = path
        self._fields: Mapping[str, Any] = _decode(content)
        self.is_chat = path == CHATS
        self.include_usage = bool((self._fields.get("stream_options") or {}).get("include_usage"))
        self.prompt_ids: list[int] = []
        self.resumed = 0  # tokens that the replica of this attempt got as a part of its prompt

    def identify(self, reply: Identified, endpoint: Endpoint) -> None:
        """vLLM names its model only; replicas of one revision have the same tokenizer and weights."""
        if reply.status == 200 and reply.is_stream:
            reply.identity = f"{endpoint.engine} {endpoint.revision} {endpoint.served_name}"

    def path(self, path_qs: str) -> str:
        """A stream that has begun is continued as a completion."""
        return COMPLETIONS if self.has_begun else path_qs

    def keep_prompt(self, ids: list[int]) -> None:
        """The tokens of the prompt, which are a part of what another replica gets."""
        if not self.prompt_ids and self.can_resume and self._take(BYTES_PER_TOKEN_ID * len(ids)):
            self.prompt_ids = ids

    def body(self) -> bytes:
        """The request as it was, or the completion of prompt and answer so far."""
        self.resumed = self.tokens
        if not self.has_begun:
            return super().body()
        fields = self._fields
        limit = next((fields[name] for name in reversed(_LIMITS) if fields.get(name) is not None), None)
        if limit is None and not self.is_chat:
            limit = _DEFAULT_LIMIT
        kept = {name: fields[name] for name in ("model", "user", *_SAMPLING) if fields.get(name) is not None}
        return msgspec.json.encode(
            {
                **kept,
                "prompt": [*self.prompt_ids, *self.answers[0].token_ids],
                "max_tokens": None if limit is None else limit - self.tokens,
                "stream": True,
                "stream_options": {"include_usage": self.include_usage},
                "return_token_ids": True,
            }
        )

    def events(self) -> "EngineEvents":
        """Reads the stream of one attempt."""
        return EngineEvents(self)

    def close(self) -> None:
        """Forget the request and its tokens."""
        super().close()
        self._fields, self.prompt_ids = {}, []


class EngineEvents:
    """Takes the token ids out of the events of one attempt, and gives a continued stream the form of its beginning."""

    handover = ""

    def __init__(self, journal: EngineJournal) -> None:
        self.events = 0
        self.is_complete = False
        self.failure = ""
        self._journal = journal
        self._rest = b""
        self._uncommitted: list[int] = []  # tokens whose text has not come yet: an unfinished character
        self._is_continued = bool(journal.id)  # the client has read the beginning of another attempt

    def feed(self, chunk: bytes) -> bytes:
        """The whole events of the stream, without token ids."""
        if self.failure:
            return b""
        *whole, self._rest = (self._rest + chunk.replace(b"\r\n", b"\n")).split(b"\n\n")
        if len(self._rest) > MAX_PENDING:
            self.failure = "an event of the replica was too large"
            return b""
        return b"".join(self._event(one) for one in whole if one and not self.failure)

    def finish(self) -> bytes:
        """Completes a stream whose answer has ended, but not its bytes; drops an incomplete trailing event."""
        if self.is_complete or self._journal.open_answers or not self._journal.can_resume:
            return b""
        self.is_complete = True
        prompt, answer = len(self._journal.prompt_ids), self._journal.tokens
        usage = {"prompt_tokens": prompt, "total_tokens": prompt + answer, "completion_tokens": answer}
        form = {"id": self._journal.id, "object": self._object, "created": self._journal.created, "choices": []}
        last = _encoded(form | {"usage": usage}) if self._journal.include_usage and self._journal.id else b""
        return last + DONE + b"\n\n"

    @property
    def _object(self) -> str:
        return "chat.completion.chunk" if self._journal.is_chat else "text_completion"

    def _event(self, event: bytes) -> bytes:
        if event == DONE:
            self.is_complete = True
            return event + b"\n\n"
        if not event.startswith(b"data: "):
            return event + b"\n\n"
        try:
            fields = _decode(event[6:])
            return self._fail(fields, event) if "error" in fields else self._chunk(fields)
        except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
            self._journal.close()  # not the form that is known: forwarded as it is, and not continued
            return event + b"\n\n"

    def _fail(self, fields: dict[str, Any], event: bytes) -> bytes:
        """An error of the engine breaks the stream off; one of the request ends it."""
        code = fields["error"].get("code")
        if isinstance(code, int) and 400 <= code < 500:
            self.is_complete = True
            return event + b"\n\n"
        self.failure = "the engine of the replica failed"
        return b""

    def _chunk(self, fields: dict[str, Any]) -> bytes:
        journal = self._journal
        prompt = fields.pop("prompt_token_ids", None)
        for choice in fields["choices"]:
            prompt = choice.pop("prompt_token_ids", None) or prompt
            if prompt and not journal.resumed:
                journal.keep_prompt(prompt)
            self._keep(choice, choice.pop("token_ids", None) or [])
        if self._is_continued:
            self._rewrite(fields)
        return _encoded(fields)

    def _keep(self, choice: dict[str, Any], token_ids: list[int]) -> None:
        """Commit the tokens once the client has all of their text."""
        journal = self._journal
        delta = choice.get("delta") or {}
        has_text = bool(choice.get("text") or delta.get("content"))
        if any(delta.get(name) for name in ("reasoning", "reasoning_content", "tool_calls")):
            journal.close()
        self.events += len(token_ids)
        self._uncommitted += token_ids
        if has_text and not (self._uncommitted and journal.prompt_ids):
            journal.close()  # a version that does not report its tokens
        ended = choice.get("finish_reason") is not None
        if has_text or ended:
            journal.add(0, ",".join(map(str, self._uncommitted)).encode(), ended)
            self._uncommitted = []

    def _rewrite(self, fields: dict[str, Any]) -> None:
        """The form of the stream's beginning: its id, its kind, and the usage of the whole answer."""
        journal = self._journal
        fields |= {"id": journal.id, "object": self._object, "created": journal.created}
        if (usage := fields.get("usage")) is not None:
            usage["prompt_tokens"] -= journal.resumed
            usage["completion_tokens"] += journal.resumed
            usage["prompt_tokens_details"] = None  # the prompt of the first replica was another one
        if journal.is_chat:
            for choice in fields["choices"]:
                if "text" in choice:
                    choice["delta"] = {"content": choice.pop("text")}


def _encoded(fields: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"
