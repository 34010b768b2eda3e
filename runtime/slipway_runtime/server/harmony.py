"""Splits the text of a gpt-oss answer into reasoning, content and tool calls: OpenAI's harmony format. Pure.

An answer is a list of messages, each with a header, which names its channel and, for a call, its function:

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bern"}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>

| message                                      | is                                                     |
|----------------------------------------------|--------------------------------------------------------|
| to a function that the request offers        | a call, on any channel; its text is the arguments      |
| channel `analysis`                           | reasoning                                              |
| channel `final`, or `commentary` to nobody   | content: an answer, or a preamble before calls         |
| to anything else, such as an unknown tool    | content, so that nothing of an answer is lost          |

The recipient stands before or after the channel. Markers and headers are dropped; two messages of one kind are
joined by a line break. An answer without any header, as a grammar makes it, is content.
"""

import re
import secrets
from collections.abc import Collection
from typing import Any, Final

from slipway_runtime.server.markers import MarkerFinder
from slipway_runtime.server.reasoning import Part, ReasoningEvent, merged
from slipway_runtime.server.tool_calls import CallDelta, CallStart, TextEvent

ASSISTANT: Final = "<|start|>assistant"  # how generation prompts end, before the header of the answer's first message
START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS: Final = ("<|end|>", "<|return|>", "<|call|>")
LONGEST_HEADER: Final = 256  # characters; what is longer is no header, but text
_CHANNEL_NAME: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")


class HarmonyParser:
    """Splitter of answers in the harmony format."""

    def __init__(self, prompt: str, functions: Collection[str] = (), *, most_calls: int | None = None) -> None:
        """`prompt`: its end may hold the first header of the answer; calls beyond `most_calls` are dropped."""
        self._functions = functions
        self._most_calls = most_calls
        self._finder = MarkerFinder((START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS))
        self._where = "message"
        self._kind = "content"  # of the message: reasoning, content, call or dropped
        self._header = ""
        self._is_header = False  # whether a marker has shown that it is one
        self._calls = 0
        self._has_arguments = False
        self._sent: set[str] = set()  # the kinds of messages with text
        self._needs_break = False
        _, assistant, begun = prompt.rpartition(ASSISTANT)
        if assistant:
            self._begin_header()
            self.push(begun)
            self._finder.flush()

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside of the reasoning."""
        return self._where == "message" and self._kind == "reasoning"

    def push(self, text: str) -> list[Part]:
        """More of the answer."""
        parts: list[Part] = []
        for piece, marker in self._finder.push(text):
            parts += self._read(piece)
            if marker:
                parts += self._mark(marker)
        return merged(parts)

    def finish(self) -> list[Part]:
        """The remaining parts. An incomplete header is dropped, as a complete one is."""
        parts = self._read(self._finder.flush())
        if self._where == "header" and not self._is_header and self._header.strip():
            parts += self._as_content()
        parts += self._end_message()
        self._where = "between"
        return merged(parts)

    def _begin_header(self) -> None:
        self._where, self._header, self._is_header = "header", "", False

    def _read(self, text: str) -> list[Part]:
        """The parts of a text without markers."""
        if not text:
            return []
        if self._where == "between":
            text = text.lstrip()
            if not text:
                return []
            self._where, self._kind, self._needs_break = "message", "content", "content" in self._sent
        if self._where == "message":
            return self._say(text)
        return self._add_to_header(text)

    def _add_to_header(self, text: str) -> list[Part]:
        self._header += text
        begun = self._header.lstrip()
        may_be_header = self._is_header or begun.startswith("to=") or "to=".startswith(begun)
        return [] if may_be_header and len(self._header) <= LONGEST_HEADER else self._as_content()

    def _as_content(self) -> list[Part]:
        """The text of a header that is none, and the message it begins."""
        text, self._where, self._kind = self._header, "message", "content"
        self._needs_break = "content" in self._sent
        return self._say(text)

    def _say(self, text: str) -> list[Part]:
        """The parts of a message's text."""
        if self._kind == "dropped":
            return []
        if self._kind == "call":
            self._has_arguments |= not text.isspace()
            return [CallDelta(self._calls, text)]
        if self._needs_break:
            text, self._needs_break = "\n" + text, False
        self._sent.add(self._kind)
        return [ReasoningEvent(text) if self._kind == "reasoning" else TextEvent(text)]

    def _mark(self, marker: str) -> list[Part]:
        if marker == MESSAGE and self._where == "header":
            return self._begin_message()
        if marker == START or marker in ENDS:
            parts = self._end_message()
            self._begin_header()
            # After `<|start|>` the role follows, so whatever comes is a header. After an end nothing should.
            self._is_header = marker == START
            if marker in ENDS:
                self._where = "between"
            return parts
        parts = []
        if marker == CHANNEL and self._where != "header":
            parts = self._end_message()  # a model that left out the end of the message before
            self._begin_header()
        if self._where != "header":
            return []  # a marker that stands for nothing in a message's text
        self._is_header = True
        return parts + self._add_to_header(marker)

    def _begin_message(self) -> list[Part]:
        channel = found[1] if (found := _CHANNEL_NAME.search(self._header)) else ""
        recipient = found[1] if (found := _RECIPIENT.search(self._header)) else ""
        function = recipient.removeprefix("functions.")
        self._where, self._header = "message", ""
        if function in self._functions:
            if self._most_calls is not None and self._calls >= self._most_calls:
                self._kind = "dropped"
                return []
            self._kind, self._has_arguments = "call", False
            return [CallStart(self._calls, f"call_{secrets.token_hex(12)}", function)]
        self._kind = "reasoning" if channel == "analysis" else "content"
        self._needs_break = self._kind in self._sent
        return []

    def _end_message(self) -> list[Part]:
        if self._where != "message" or self._kind != "call":
            return []
        self._kind = "dropped"
        self._calls += 1
        return [] if self._has_arguments else [CallDelta(self._calls - 1, "{}")]


def header_of_bound_answer(function: str = "") -> str:
    """The header, after `<|start|>assistant`, of an answer that a grammar binds: of a call, or of the final message.

    Without it the grammar would make the model write text where it only knows headers.
    """
    if function:
        return f" to=functions.{function}{CHANNEL}commentary {CONSTRAIN}json{MESSAGE}"
    return f"{CHANNEL}final{MESSAGE}"


def template_message(message: dict[str, Any]) -> dict[str, Any]:
    """The variables of an earlier message; gpt-oss's template refuses calls that have both reasoning and content."""
    if not (message.get("tool_calls") and message.get("thinking") and message.get("content")):
        return message
    thoughts = f"{message['thinking']}\n{message['content']}"
    return message | {"content": "", "thinking": thoughts, "reasoning_content": thoughts}
