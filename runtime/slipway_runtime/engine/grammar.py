"""Compiler of grammars for structured output, with limits of their cost. No torch: the API process checks with it.

A grammar is refused with one sentence: for what it is (not JSON, an unknown keyword), or for what it would cost.
llguidance has no time limit, so the costs are bounded before it sees the text: by size, by nesting, and by counts of
what makes it slow; costs that show only while it works are bounded by its own counters. Measured on one core, with
128,000 tokens, and what would happen without the bound:

| what grows                                           | at the bound              | beyond                           |
|------------------------------------------------------|---------------------------|----------------------------------|
| members of a schema                                  | 1,000: compiles in 0.3 s  | 5,000: 14 s                      |
| `multipleOf`: a state for each remainder             | 10,000: 0.1 s             | 500,000: 4 s and 200 MB          |
| rules of a written grammar, each calling the next    | 500: 0.02 s               | 3,000: the stack overflows       |
| symbols of a written grammar, if all may be empty    | 1,200: a mask in 0.3 s    | 3,200: a mask in 6 s             |
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag
from llguidance.gbnf_to_lark import gbnf_to_lark

from slipway_runtime.engine.call_grammars import grammar_of_calls, with_options
from slipway_runtime.messages import Grammar

KINDS: Final = (
    "json_object", "json_schema", "regex", "choice", "lark", "structural_tag", "harmony", "calls", "thought",
)  # fmt: skip
_REMEMBERED: Final = 64  # compiled grammars, and refusals, that are kept
# Between the parts of JSON: a space, or a new line and its indentation. A weak model left free to go on with spaces
# would do so until its tokens are spent.
_WHITESPACE: Final = r"\x20|\n(\x20{0,32}|\t{0,16})"
_LEXER: Final[dict[str, Any]] = {
    "initial_lexer_fuel": 300_000,  # 6 ms of regular expressions; the default of 1,000,000 lets a first mask take 30 ms
    "max_lexer_states": 50_000,  # up to 2 kB each
    "verbose_errors": False,  # its details quote the grammar and the parser's state
}
# Four items for each optional member of an object, and few rules that are empty: rows are long, and quickly made.
_GENERATED: Final = LLParserLimits(max_items_in_row=8_000, **_LEXER)
# Where rules may be empty, the time for a row grows with the cube of its length; see above.
_WRITTEN: Final = LLParserLimits(max_items_in_row=1_000, step_max_items=20_000, max_grammar_size=1_200, **_LEXER)
# The head of a rule; no line of Lark begins so. The indent is of one line: `\s*` would search from every empty line.
_OF_GBNF: Final = re.compile(r"^[^\S\n]*[\w-]+\s*::=", re.MULTILINE)
# An answer of gpt-oss after `<|start|>assistant`: messages, and at the end one more, or a call of a function. Its names
# between <| and |> are special tokens; the token that ends the answer is none of the grammar's.
_HARMONY: Final = r"""%llguidance {}
start: message* (last | call)
message: last <|end|> <|start|> "assistant"
last: <|channel|> CHANNEL <|message|> TEXT
CHANNEL: /analysis|commentary|final/
TEXT: /(.|\n)*/
"""
_HARMONY_WITH_FORMAT: Final = r"""%llguidance {}
start: message* (final | call)
message: <|channel|> CHANNEL <|message|> TEXT <|end|> <|start|> "assistant"
final: <|channel|> "final" <|message|> @format
CHANNEL: /analysis|commentary/
TEXT: /(.|\n)*/
"""
# A bound answer of gpt-oss: thoughts, then one call, or the final message in a format.
_HARMONY_BOUND: Final = r"""%llguidance {}
start: thought* ANSWER
thought: <|channel|> "analysis" <|message|> TEXT <|end|> <|start|> "assistant"
TEXT: /(.|\n)*/
"""
# An answer that may think before its grammar binds it, as vLLM has it. Models end their thoughts with line breaks.
_THOUGHT: Final = r"""%llguidance {}
start: START @answer
GAP: /\n{0,2}/
TEXT: /(.|\n)*/
"""
_SCHEMA_INSIDE: Final = re.compile(r"%json\b\s*")


class GrammarRefusedError(ValueError):
    """A grammar that cannot be followed here; the message is a sentence for the client."""


@dataclass(frozen=True)
class GrammarLimits:
    """Limits of the size of a grammar."""

    text_bytes: int = 64 * 1024
    depth: int = 64  # of nested JSON in a schema; llguidance itself stops at 128
    members: int = 1000  # of all the objects in a schema together, at any one key: properties, $defs, …
    alternatives: int = 2000  # of all lists in a schema together (enum, anyOf, required), and of a choice
    multiple: int = 10_000  # the least common multiple of all `multipleOf` in a schema, in units of its last decimal
    rules: int = 500  # of a written grammar


class GrammarCompiler:
    """Compiles grammars over one model's vocabulary. Calls take milliseconds, rarely 0.5 s; thread-safe."""

    def __init__(
        self, tokenizer_json: str, *, eos_token_ids: tuple[int, ...], limits: GrammarLimits | None = None
    ) -> None:
        """tokenizer_json: the text of the model's `tokenizer.json`. Takes 0.1 s for 3,000 tokens, 1 s for 150,000."""
        self.eos_token_ids = eos_token_ids
        self.vocabulary = LLTokenizer(tokenizer_json, eos_token=list(eos_token_ids) or None)
        self._limits = limits or GrammarLimits()
        self._compiled = lru_cache(_REMEMBERED)(self._compile)
        self._verdict = lru_cache(_REMEMBERED)(self._judge)

    @property
    def words(self) -> int:
        """32-bit words of a mask over the vocabulary."""
        return -(-self.vocabulary.vocab_size // 32)

    def check(self, grammar: Grammar) -> None:
        """Raise GrammarRefusedError unless answers can follow the grammar. Blocks: call it off the event loop."""

        if sentence := self._verdict(grammar):
            raise GrammarRefusedError(sentence)

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """A new matcher at the start of the grammar. Raises GrammarRefusedError."""
        return self._compiled(grammar).deep_copy()

    def _judge(self, grammar: Grammar) -> str:
        try:
            self._compile(grammar)
        except GrammarRefusedError as refusal:
            return str(refusal)
        return ""

    def _compile(self, grammar: Grammar) -> LLMatcher:
        source = self._source(grammar)
        kinds = _kinds(grammar)
        kind = next(kind for kind in kinds if kind != "thought")
        limits = _WRITTEN if "lark" in kinds else _GENERATED
        matcher = LLMatcher(self.vocabulary, source, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # limits of the lexer show with the first mask
        if matcher.is_error():
            raise GrammarRefusedError(f"the {kind} cannot be compiled: {_one_line(matcher.get_error())}")
        return matcher

    def _source(self, grammar: Grammar) -> str:
        """The grammar in llguidance's own form, after the limits that are cheap to check."""
        kind, text = grammar.kind, grammar.text
        if kind not in KINDS:
            raise GrammarRefusedError(f"{kind!r} is not a kind of grammar: {', '.join(KINDS)} are known")
        if kind == "thought":
            return self._thought(json.loads(text))
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > self._limits.text_bytes:
            raise GrammarRefusedError(
                f"the {kind} has {size} bytes; at most {self._limits.text_bytes} are compiled here"
            )
        if kind == "json_object":
            return _schema_source('{"type": "object"}')
        if kind == "json_schema":
            self._look_through(kind, _json(kind, text))
            return _schema_source(text)
        if kind == "choice":
            return LLMatcher.grammar_from_lark(self._choice(_json(kind, text)))
        if kind == "structural_tag":
            return self._structural_tag(_json(kind, text))
        if kind == "harmony":
            return self._harmony(_json(kind, text))
        if kind == "calls":
            return self._calls(_json(kind, text))
        if not text.strip():
            raise GrammarRefusedError(f"the {kind} is empty")
        if kind == "regex":
            return LLMatcher.grammar_from_regex(text)
        return LLMatcher.grammar_from_lark(self._written(text))

    def _written(self, text: str) -> str:
        """The Lark form of a grammar in Lark or in GBNF, which other servers accept."""
        if text.lstrip().startswith("{"):
            # llguidance would read its own JSON form here, in which a schema has none of our limits.
            raise GrammarRefusedError("a grammar is written in Lark or GBNF, and neither starts with {")
        if not _OF_GBNF.search(text):
            own, schemas = _without_schemas(text)
            self._count_rules(own, ":")  # a colon in a string counts too, because only a parser could tell
            for schema in schemas:
                self._look_through("lark", schema)
            return text
        self._count_rules(text, "::=")
        try:
            return gbnf_to_lark(text)
        except Exception as error:  # noqa: BLE001  whatever its rewriting trips over, the text is at fault
            raise GrammarRefusedError(f"the grammar cannot be read: {_one_line(str(error))}") from None

    def _count_rules(self, text: str, sign: str) -> None:
        if (rules := text.count(sign)) > self._limits.rules:
            raise GrammarRefusedError(
                f"the lark has {rules} rules, or {sign}; at most {self._limits.rules} are compiled"
            )

    def _look_through(self, kind: str, schema: Any) -> Any:
        if not isinstance(schema, dict):
            raise GrammarRefusedError(f"the {kind} must be a JSON object")
        members = alternatives = 0
        multiples: list[Any] = []
        level: list[Any] = [schema]
        for _ in range(self._limits.depth):
            members += sum(len(node) for node in level if isinstance(node, dict))
            alternatives += sum(len(node) for node in level if isinstance(node, list))
            multiples += [node["multipleOf"] for node in level if isinstance(node, dict) and "multipleOf" in node]
            level = [child for node in level for child in _children(node)]
        if level:
            raise GrammarRefusedError(f"the {kind} is nested deeper than {self._limits.depth} levels")
        if members > self._limits.members:
            raise GrammarRefusedError(f"the {kind} has {members} members; at most {self._limits.members} are compiled")
        if alternatives > self._limits.alternatives:
            raise GrammarRefusedError(
                f"the {kind} lists {alternatives} values; at most {self._limits.alternatives} are compiled here"
            )
        if _common_multiple(multiples) > self._limits.multiple:
            raise GrammarRefusedError(
                f"the common multiple of every multipleOf in the {kind} is larger than {self._limits.multiple}, "
                "counted in units of the last decimal"
            )
        return schema

    def _choice(self, choices: Any) -> str:
        if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
            raise GrammarRefusedError("a choice must be a list of strings, none of them empty")
        if len(choices) > self._limits.alternatives:
            raise GrammarRefusedError(
                f"the choice has {len(choices)} strings; at most {self._limits.alternatives} are compiled here"
            )
        # One terminal: as alternatives of a rule they would all stand in the parser's first row.
        return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)

    def _structural_tag(self, tag: Any) -> str:
        """`{"structures": [{"begin", "schema", "end"}], "triggers": […]}`: free text, in which a trigger starts one."""
        try:
            triggers, structures = tag["triggers"], tag["structures"]
            tags = [
                StructTag(
                    trigger=next(t for t in triggers if s["begin"].startswith(t)),
                    begin=s["begin"],
                    grammar=self._look_through("structural_tag", s["schema"]),
                    end=s["end"],
                )
                for s in structures
            ]
            special = {self._is_special(tag.trigger) for tag in tags}
            if len(special) != 1:
                raise GrammarRefusedError("the triggers of a structural_tag are all special tokens, or all plain text")
            return LLMatcher.grammar_from_lark(StructTag.to_grammar(tags, assume_special=special.pop()))
        except (KeyError, TypeError, AttributeError, AssertionError, StopIteration):
            raise GrammarRefusedError(
                "a structural_tag has triggers (strings) and structures with begin, schema and end, "
                "each beginning with one of the triggers"
            ) from None

    def _calls(self, calls: Any) -> str:
        """`{"form", "functions", "is_free", "format"}`: see `call_grammars`; the format is a grammar of its own."""
        for function in calls["functions"]:
            if function.get("schema") is not None:
                self._look_through("tools", function["schema"])
        given = calls.get("format")
        lark = grammar_of_calls(
            calls["form"],
            calls["functions"],
            is_free=calls["is_free"],
            most=calls.get("most"),
            has_format=given is not None,
            marker=self._marker,
        )
        return self._with_format(lark, given)

    def _with_format(self, lark: str, given: Any) -> str:
        """A Lark grammar whose `@format` is another grammar, if one is given."""
        if given is None:
            return LLMatcher.grammar_from_lark(lark)
        [other] = self._parts(given)
        return json.dumps({"grammars": [{"name": "calls", "lark_grammar": lark}, other | {"name": "format"}]})

    def _marker(self, text: str) -> str:
        """A text in Lark: its special token, if it is one."""
        tokens = self.vocabulary.tokenize_str(text, parse_special=True)
        if self._is_special(text):
            return f"<[{tokens[0]}]>"
        return json.dumps(text, ensure_ascii=False)

    def _harmony(self, given: Any) -> str:
        """`[{"name", "schema"}]`: free text on the channels of gpt-oss, and calls with arguments of these schemas.

        `{"functions", "format"}`: the same, and the message of the channel `final` follows a grammar. With `is_bound`
        the answer is thoughts and then one call, or, without functions, a final message in the format.
        """
        functions = given["functions"] if isinstance(given, dict) else given
        form = given["format"] if isinstance(given, dict) else None
        lark = _HARMONY if form is None else _HARMONY_WITH_FORMAT
        if isinstance(given, dict) and given.get("is_bound"):
            lark = _HARMONY_BOUND.replace("ANSWER", "call" if functions else '<|channel|> "final" <|message|> @format')
        if functions:
            lark += f"call: {' | '.join(f'call_{number}' for number in range(len(functions)))}\n"
        for number, function in enumerate(functions):
            to = json.dumps(f" to=functions.{function['name']}", ensure_ascii=False)
            schema = json.dumps(with_options(self._look_through("harmony", function["schema"])))
            header = f'({to} <|channel|> "commentary" | <|channel|> /commentary|analysis/ {to})'
            lark += f'call_{number}: {header} (" " <|constrain|>? "json")? <|message|> %json {schema}\n'
        return self._with_format(lark, form)

    def _parts(self, given: Any) -> list[Any]:
        """llguidance's own form of a grammar inside of another: the first part may refer to the others by name."""
        source = self._source(Grammar(kind=given["kind"], text=given["text"]))
        return json.loads(source)["grammars"] if source.startswith("{") else [{"lark_grammar": source}]

    def _thought(self, given: Any) -> str:
        """`{"begin", "end", "is_open", "then"}`: text up to the marker `end`, then an answer that follows a grammar.

        `is_open`: the prompt has begun the thought; else the answer may begin with one, after the marker `begin`.
        """
        begin, end = self._marker(given["begin"]), self._marker(given["end"])
        thought = f"thought: TEXT {end}" if end.startswith("<") else f"thought[suffix={end}]: TEXT"
        start = "thought GAP" if given["is_open"] else f"({begin} thought GAP)?"
        lark = _THOUGHT.replace("START", start) + thought + "\n"
        first, *others = self._parts(given["then"])
        return json.dumps(
            {"grammars": [{"name": "thought", "lark_grammar": lark}, first | {"name": "answer"}, *others]}
        )

    def _is_special(self, text: str) -> bool:
        tokens = self.vocabulary.tokenize_str(text, parse_special=True)
        return len(tokens) == 1 and self.vocabulary.is_special_token(tokens[0])


def _kinds(grammar: Grammar) -> tuple[str, ...]:
    """The kind of a grammar, and of the one that it binds an answer with: after a thought, or instead of calls."""
    if grammar.kind == "thought":
        then = json.loads(grammar.text)["then"]
        return grammar.kind, *_kinds(Grammar(kind=then["kind"], text=then["text"]))
    given = json.loads(grammar.text) if grammar.kind in {"calls", "harmony"} else None
    form = given.get("format") if isinstance(given, dict) else None
    return (grammar.kind, form["kind"]) if form else (grammar.kind,)


def _without_schemas(lark: str) -> tuple[str, list[Any]]:
    """A grammar's own text, and the schemas in it: `%json { … }`."""
    own, schemas, position = "", [], 0
    while (found := _SCHEMA_INSIDE.search(lark, position)) is not None:
        try:
            schema, end = json.JSONDecoder().raw_decode(lark, found.end())
        except (ValueError, RecursionError):
            raise GrammarRefusedError("a %json in a grammar is followed by a schema") from None
        own += lark[position : found.start()]
        schemas.append(schema)
        position = end
    return own + lark[position:], schemas


def _common_multiple(multiples: Sequence[Any]) -> int:
    """The least one, in units of the last decimal that any has: 0.25 and 5 → 500. Non-numbers are skipped."""
    numbers = [Decimal(str(m)) for m in multiples if type(m) in {int, float} and 0 < m < math.inf]
    unit = min((int(number.normalize().as_tuple().exponent) for number in numbers), default=0)
    return math.lcm(*(int(number.scaleb(-min(unit, 0))) for number in numbers))


def _schema_source(text: str) -> str:
    try:
        # An answer to oneOf fits at least one branch: the compiler cannot count them.
        return LLMatcher.grammar_from_json_schema(
            text, defaults={"whitespace_pattern": _WHITESPACE, "coerce_one_of": True}
        )
    except ValueError as error:  # numbers that only Python accepts as JSON
        raise GrammarRefusedError(f"the json_schema is not JSON: {_one_line(str(error))}") from None


def _json(kind: str, text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise GrammarRefusedError(f"the {kind} is nested too deeply") from None
    except ValueError as error:
        raise GrammarRefusedError(f"the {kind} is not JSON: {_one_line(str(error))}") from None


def _children(node: object) -> list[Any]:
    nested = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [child for child in nested if isinstance(child, dict | list)]


def _one_line(message: str) -> str:
    """The lines of an llguidance message that state the error; the others point into the text of the client."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no reason given"]
    line = " ".join([lines[0], *(line for line in lines[1:] if line.startswith("error:"))])
    return line if len(line) <= 200 else f"{line[:199]}…"
