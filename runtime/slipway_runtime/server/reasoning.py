"""Splits the text of an answer into reasoning and content, where the model writes its thoughts in think tags. Pure.

    <think>\\nThe user wants …\\n</think>\\n\\nHere it is.

The tags, and the line breaks beside them, are dropped; every other character is sent, in order, as early as no later
text can change what it is. Only the beginning of an answer can be reasoning: tags in its content are text. Which of
three states an answer begins in, the end of its prompt says:

| the prompt ends with | as in                                           | the answer begins                        |
|----------------------|-------------------------------------------------|------------------------------------------|
| `<think>`            | DeepSeek-R1 distills, Qwen3-Thinking            | inside of the reasoning                  |
| `</think>`           | Qwen3 and SmolLM3 with `enable_thinking: false` | with content; no reasoning is looked for |
| anything else        | Qwen3, SmolLM3, Phi-4-reasoning                 | with `<think>`, or else with content     |

`harmony.py` does the same for the channels of gpt-oss, `answer_parts.py` joins it with the parsers of tool calls.
"""

from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Final, Protocol

from slipway_runtime.server.markers import MarkerFinder
from slipway_runtime.server.tool_calls import CallDelta, CallStart, TextEvent

BEGIN: Final = "<think>"
END: Final = "</think>"
MOST_LAYOUT: Final = 64  # characters of white space before `<think>`; after more, the answer is content
# Text in a chat template → how its model writes its reasoning. The first match holds.
_SIGNS: Final = (("<|channel|>", "harmony"), (END, "think"))


@dataclass(frozen=True)
class ReasoningEvent:
    """Event: text of the reasoning."""

    text: str


Part = ReasoningEvent | TextEvent | CallStart | CallDelta


class Splitter(Protocol):
    """Turns the text of an answer into its parts, which do not depend on the pieces that the text came in."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside of the reasoning."""

    def push(self, text: str) -> list[Part]:
        """More of the answer."""

    def finish(self) -> list[Part]:
        """The remaining parts, at the end of the answer. A second call returns none."""


def form_of(template_source: str, wanted: str = "auto") -> str:
    """How a model with this chat template writes its reasoning: `think`, `harmony`, or empty where it has none."""
    if wanted != "auto":
        return "" if wanted == "none" else wanted
    return next((form for sign, form in _SIGNS if sign in template_source), "")


class Begin(Enum):
    """What an answer begins with."""

    REASONING = "reasoning"
    CONTENT = "content"
    EITHER = "either"  # its first characters say it


def beginning_of(prompt: str, *, continued: str | None = None) -> Begin:
    """What the answer to a rendered prompt begins with. `continued`: the text of a last message that is continued."""
    end = prompt.rstrip()
    if end.endswith(BEGIN):
        return Begin.REASONING
    if continued is not None:
        is_open = continued.lstrip().startswith(BEGIN) and END not in continued
        return Begin.REASONING if is_open else Begin.CONTENT
    return Begin.CONTENT if end.endswith(END) else Begin.EITHER


class ThinkParser:
    """Splitter of answers with think tags."""

    def __init__(self, begins: Begin) -> None:
        self._where = {Begin.REASONING: "reasoning", Begin.CONTENT: "content", Begin.EITHER: "start"}[begins]
        self._finder = MarkerFinder((BEGIN, END))
        self._layout = ""  # white space at the start, held back
        self._has_reasoning = False  # whether any of its text was sent
        self._line_breaks = 0  # held back: they are dropped if `</think>` follows

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside of the reasoning."""
        return self._where == "reasoning"

    def push(self, text: str) -> list[Part]:
        """More of the answer."""
        if self._where == "content":
            return [TextEvent(text)] if text else []
        parts: list[Part] = []
        for piece, marker in self._finder.push(text):
            parts += self._read(piece)
            parts += self._mark(marker)
        if self._where == "content":
            parts += self._read(self._finder.flush())  # from here on nothing is a marker
        return merged(parts)

    def finish(self) -> list[Part]:
        """The remaining parts."""
        parts = self._read(self._finder.flush())
        if self._where == "start" and self._layout:
            parts.append(TextEvent(self._layout))
            self._layout = ""
        if self._line_breaks:
            parts.append(ReasoningEvent("\n" * self._line_breaks))
            self._line_breaks = 0
        return merged(parts)

    def _read(self, text: str) -> list[Part]:
        """The parts of a text without markers."""
        if not text:
            return []
        if self._where == "start":
            self._layout += text
            if self._layout.isspace() and len(self._layout) <= MOST_LAYOUT:
                return []
            text, self._layout, self._where = self._layout, "", "content"
        if self._where == "reasoning":
            return self._reason(text)
        if self._where == "gap":
            text = text.lstrip("\n")
            self._where = "content" if text else "gap"
        return [TextEvent(text)] if text else []

    def _reason(self, text: str) -> list[Part]:
        if not self._has_reasoning:
            text = text.lstrip("\n")
        kept = text.rstrip("\n")
        breaks, self._line_breaks = self._line_breaks, len(text) - len(kept)
        if not kept:
            self._line_breaks += breaks
            return []
        self._has_reasoning = True
        return [ReasoningEvent("\n" * breaks + kept)]

    def _mark(self, marker: str) -> list[Part]:
        """The parts of a marker: none, or its text where it stands for nothing."""
        if not marker:
            return []
        if self._where == "start":
            self._layout, self._where = "", "reasoning" if marker == BEGIN else "gap"
            return []
        if self._where == "reasoning" and marker == END:
            self._line_breaks, self._where = 0, "gap"
            return []
        if self._where == "reasoning" and not self._has_reasoning:
            return []  # a model that repeats the tag of its prompt
        return self._read(marker)


def merged(parts: list[Part]) -> list[Part]:
    """Merge consecutive parts of one kind."""
    if len(parts) < 2:  # as for nearly every token
        return parts
    return [_joined(list(run)) for _, run in groupby(parts, key=_kind)]


def _kind(part: Part) -> tuple[type[Part], int]:
    return type(part), part.index if isinstance(part, CallStart | CallDelta) else 0


def _joined(run: list[Part]) -> Part:
    first = run[0]
    if len(run) == 1 or isinstance(first, CallStart):
        return first
    if isinstance(first, CallDelta):
        return CallDelta(first.index, "".join(part.arguments for part in run if isinstance(part, CallDelta)))
    return type(first)("".join(part.text for part in run if isinstance(part, TextEvent | ReasoningEvent)))
