"""Reads the text of one answer: reasoning, content and tool calls, token by token, and counts tokens of reasoning.

The reasoning is split off first; what is left of the answer goes through the parser of tool calls. gpt-oss writes
calls in channels too, so there one parser does both. Where a model thinks in tags, a grammar binds what follows the
thought; an answer of gpt-oss thinks on its channel before a bound final message or a forced call.
"""

import json
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from slipway_runtime.messages import Grammar, TokenLogprobs
from slipway_runtime.server.generation import Delta
from slipway_runtime.server.harmony import HarmonyParser
from slipway_runtime.server.prompt import Prompt
from slipway_runtime.server.reasoning import (
    BEGIN,
    END,
    Begin,
    Part,
    ReasoningEvent,
    Splitter,
    ThinkParser,
    beginning_of,
    merged,
)
from slipway_runtime.server.tool_calls import Parser, TextEvent
from slipway_runtime.server.tools import ToolUse


def binds_at_once(grammar: Grammar | None) -> bool:
    """Whether a grammar binds the first token of an answer, instead of calls only, wherever they begin."""
    if grammar is None or grammar.kind in {"structural_tag", "harmony"}:
        return False
    return grammar.kind != "calls" or not json.loads(grammar.text)["is_free"]


@dataclass(frozen=True, kw_only=True)
class ReasoningUse:
    """How the reasoning of one request's answers is found, and whether the client gets it."""

    form: str = ""  # think or harmony; empty: an answer has none
    is_bound: bool = False  # by a grammar, from the first token: there is no reasoning
    is_shown: bool = True
    has_logprobs: bool = True  # whether its tokens are among those of the answer
    continued: str | None = None  # the text of the last message, where it is continued

    def splitter(self, prompt: Prompt, tools: ToolUse) -> Splitter | None:
        """A new splitter for one answer to this prompt; None where there is no reasoning."""
        if self._has_channels:
            functions = {tool.function.name for tool in tools.shown}
            return HarmonyParser(prompt.text, functions, most_calls=tools.most)
        if self.form == "think":
            return ThinkParser(beginning_of(prompt.text, continued=self.continued))
        return None

    def bound(self, grammar: Grammar, prompt: Prompt) -> Grammar:
        """The grammar of a whole answer to this prompt, which may think before `grammar` binds it."""
        if not binds_at_once(grammar) or self.is_bound:
            return grammar
        if self.form == "harmony":
            form = {"kind": grammar.kind, "text": grammar.text}
            bound = {"functions": [], "format": form, "is_bound": True}
            return Grammar(kind="harmony", text=json.dumps(bound, ensure_ascii=False))
        if self.form != "think":
            return grammar
        begins = beginning_of(prompt.text, continued=self.continued)
        if begins is Begin.CONTENT:
            return grammar
        then = {"kind": grammar.kind, "text": grammar.text}
        thought = {"begin": BEGIN, "end": END, "is_open": begins is Begin.REASONING, "then": then}
        return Grammar(kind="thought", text=json.dumps(thought, ensure_ascii=False))

    def needs_special_tokens(self, tokenizer: Tokenizer) -> bool:
        """Whether the markers are special tokens, which are otherwise removed from the text."""
        if self.form == "think":
            token_id = tokenizer.token_to_id(BEGIN)
            added = tokenizer.get_added_tokens_decoder().get(token_id) if token_id is not None else None
            return added is not None and added.special
        return self._has_channels

    @property
    def _has_channels(self) -> bool:
        return self.form == "harmony" and not self.is_bound


@dataclass
class Segment:
    """Parts of consecutive tokens that all are reasoning, or all are not."""

    is_reasoning: bool
    parts: list[Part]
    logprobs: list[TokenLogprobs] = field(default_factory=list)


def _segment(segments: list[Segment], *, is_reasoning: bool) -> Segment:
    """The last segment, or a new one where it is of the other kind."""
    if not segments or segments[-1].is_reasoning != is_reasoning:
        segments.append(Segment(is_reasoning, []))
    return segments[-1]


class AnswerParser:
    """Reads one answer. Its state depends on the text so far only, so a replica that resumes an answer restores it."""

    def __init__(self, splitter: Splitter | None, calls: Parser | None, use: ReasoningUse) -> None:
        self.reasoning_tokens = 0
        self._splitter = splitter
        self._calls = calls
        self._use = use

    @property
    def splits(self) -> bool:
        """Whether reasoning is looked for."""
        return self._splitter is not None

    def read(self, delta: Delta) -> list[Segment]:
        """The parts of a delta; several segments where the reasoning begins or ends in it. Never empty."""
        if self._splitter is None:
            segments = [Segment(False, self._content(delta.text), [*delta.logprobs])]
        else:
            segments = self._split(self._splitter, delta)
        if delta.finish_reason is not None:
            rest = self._sorted(self._splitter.finish()) if self._splitter is not None else []
            rest += self._calls.finish() if self._calls is not None else []
            segments[-1].parts += rest
        for segment in segments:
            segment.parts = merged(segment.parts)
        return segments

    def _split(self, splitter: Splitter, delta: Delta) -> list[Segment]:
        segments: list[Segment] = []
        at = 0
        # Token by token: where the reasoning ends must not depend on how many tokens came in one step.
        for number in range(len(delta.token_ids)):
            end = delta.text_ends[number] if number < len(delta.text_ends) else len(delta.text)
            was_reasoning = splitter.is_reasoning
            parts = self._sorted(splitter.push(delta.text[at:end]))
            self.reasoning_tokens += was_reasoning and splitter.is_reasoning  # tokens of tags and headers are neither
            at = end
            segment = _segment(segments, is_reasoning=splitter.is_reasoning)
            segment.parts += parts
            if self._use.has_logprobs or not segment.is_reasoning:
                segment.logprobs += delta.logprobs[number : number + 1]
        rest = self._sorted(splitter.push(delta.text[at:]))
        _segment(segments, is_reasoning=splitter.is_reasoning).parts += rest
        return segments

    def _sorted(self, parts: list[Part]) -> list[Part]:
        """The parts for the client: without hidden reasoning, and with the calls in the content."""
        out: list[Part] = []
        for part in parts:
            if isinstance(part, TextEvent):
                out += self._content(part.text)
            elif self._use.is_shown or not isinstance(part, ReasoningEvent):
                out.append(part)
        return out

    def _content(self, text: str) -> list[Part]:
        if self._calls is not None:
            return [*self._calls.push(text)]
        return [TextEvent(text)] if text else []
