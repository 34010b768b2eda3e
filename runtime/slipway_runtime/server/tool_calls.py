"""Streaming parsers for tool calls: split an answer's text into plain text, function names and arguments. Pure.

Most models use one of these forms; `tool_parsers.py` has the others. Calls are objects such as
`{"name": "f", "arguments": {…}}`:

    hermes    some words <tool_call>{…}</tool_call> <tool_call>{…}</tool_call>
    llama3    {…}; {…}                     either the whole answer is calls, or none of it
    mistral   some words [TOOL_CALLS] [{…}, {…}]    or    [TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g{}
    array     [{…}, {…}]                   enforced by a grammar for a forced call

Where a grammar constrains the text (`live`), arguments are streamed as they are generated. Elsewhere a call is sent
when it is complete and its arguments are valid JSON; text that turns out not to be a call is sent as text.

One call is parsed incrementally as a JSON object: the function's name, and its arguments so far.
"""

import ast
import json
import secrets
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, Protocol

from slipway_runtime.engine.detokenizer import StopStrings

_LONGEST_PYTHON: Final = 64 * 1024  # characters of a call in Python's quotes; a longer one is text
_ARGUMENTS: Final = ("arguments", "parameters")
MOST_LAYOUT: Final = 1024  # characters of white space that may be layout before or between calls; more is text


class CallObject:
    """Reads `{"name": "f", "arguments": {…}}` one character at a time; lists of characters grow in constant time."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_complete = False
        self.is_broken = False
        self._raw: list[str] = []
        self._arguments: list[str] = []  # the part that has been read
        self._where = "start"
        self._raw_key: list[str] = []
        self._key: str | None = None
        self._value: list[str] = []
        self._depth = 0
        self._in_string = False
        self._quote = ""  # of the string: a double quote, or a single one of Python
        self._escaped = False

    @property
    def raw(self) -> str:
        """All characters so far, as the model wrote them."""
        return "".join(self._raw)

    @property
    def num_arguments(self) -> int:
        """Characters of the arguments so far."""
        return len(self._arguments)

    def arguments(self, start: int = 0) -> str:
        """The arguments so far, from a character on."""
        return "".join(self._arguments[start:])

    def note(self, text: str) -> None:
        """Keep text that the model wrote in another form; what it means is pushed with `is_written=False`."""
        self._raw.extend(text)

    def push(self, char: str, *, is_written: bool = True) -> None:
        """Parse one more character."""
        assert not self.is_complete
        if is_written:
            self._raw.append(char)
        if self._in_string:
            self._inside_a_string(char)
        elif self._where == "value":
            self._inside_a_value(char)
        elif char in "\"'" and self._where == "key":
            self._in_string, self._quote, self._raw_key = True, char, [char]
        elif self._where == "start" and char == "{":
            self._where = "key"
        elif self._where == "colon" and char == ":":
            self._begin_value()
        elif self._where == "key" and char == "}":
            self.is_complete = True
        elif not (char.isspace() or (self._where == "key" and char == ",")):
            self.is_broken = True

    @property
    def value_is_whole(self) -> bool:
        """Whether the arguments are a complete object."""
        return self._where == "value" and self._depth == 0 and not self._in_string and self._value[-1:] == ["}"]

    def _inside_a_string(self, char: str) -> None:
        (self._raw_key if self._where == "key" else self._value).append(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == self._quote:
            self._in_string = False
            if self._where == "key":
                self._where, self._key = "colon", _text_of("".join(self._raw_key))

    def _begin_value(self) -> None:
        self._where, self._value = "value", []

    def _inside_a_value(self, char: str) -> None:
        if self._depth == 0 and char in ",}":
            self._end_value()
            self._where = "key"
            self.is_complete = char == "}"
            return
        if char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        elif char in "\"'":
            self._in_string, self._quote = True, char
        elif char.isspace() and not self._value:
            return
        self._value.append(char)
        if len(self._value) == 1 and self._key in _ARGUMENTS:
            self._arguments = self._value  # grows with it
        self.is_broken |= self._depth < 0

    def _end_value(self) -> None:
        if self._key == "name":
            self.name = _text_of("".join(self._value).strip())
            self.is_broken |= self.name is None
        elif self._key in _ARGUMENTS and self._value[:1] in (['"'], ["'"]):
            # Some models write the object as a JSON string.
            self._arguments = list(_text_of("".join(self._value).strip()) or "")


def _text_of(raw: str) -> str | None:
    value = value_of(raw)
    return value if isinstance(value, str) else None


def value_of(raw: str) -> Any:
    """The value of a text in JSON as models write it; None if it is not a value, or is null.

    Line breaks and tabs may stand in strings, NaN is null, and a literal of Python counts too.
    """
    try:
        return json.loads(raw, strict=False, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        pass
    if len(raw) > _LONGEST_PYTHON or not any(sign in raw for sign in ("'", "True", "False", "None")):
        return None
    try:
        value = ast.literal_eval(raw.strip())
        json.dumps(value, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return value


@dataclass(frozen=True)
class TextEvent:
    """Event: text outside of calls."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """Event: a call begins, and its function is known."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallDelta:
    """Event: the next part of the arguments, as JSON text."""

    index: int
    arguments: str


Event = TextEvent | CallStart | CallDelta


class Parser(Protocol):
    """Turns the text of an answer into events."""

    def push(self, text: str) -> list[Event]:
        """More of the answer."""

    def finish(self) -> list[Event]:
        """The remaining events, at the end of the answer."""


def _object_of(raw: str) -> str | None:
    """The arguments as JSON text; None if they are not an object. Null stands for no arguments."""
    try:
        if isinstance(json.loads(raw, parse_constant=_not_json), dict):
            return raw
    except (ValueError, RecursionError):
        pass
    if raw.strip() in {"null", "None"}:
        return "{}"
    value = value_of(raw)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else None


def _not_json(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


@dataclass
class Calls:
    """The calls of one answer: numbers them and makes their events."""

    names: Collection[str]
    live: bool
    most: int | None
    new_id: Callable[[], str]
    count: int = 0
    sent: int = 0  # characters of the current call's arguments that were sent
    began: bool = False

    def begin(self) -> CallObject:
        """A new call, of which nothing was sent."""
        self.sent, self.began = 0, False
        return CallObject()

    def progress(self, call: CallObject) -> Iterator[Event]:
        """The events of an incomplete call that can be sent already."""
        if not self.live or self._is_one_too_many or call.name not in self.names or not call.num_arguments:
            return
        if not self.began:
            self.began = True
            yield CallStart(self.count, self.new_id(), call.name or "")
        if call.num_arguments > self.sent:
            yield CallDelta(self.count, call.arguments(self.sent))
            self.sent = call.num_arguments

    def end(self, call: CallObject) -> Iterator[Event]:
        """The remaining events of a complete call."""
        if self._is_one_too_many:
            return
        if self.began:
            yield from self.progress(call)
            self.count += 1
        elif call.name in self.names and (arguments := _object_of(call.arguments() or "{}")) is not None:
            yield from self.whole(call.name or "", arguments)
        else:
            yield TextEvent(call.raw)

    def whole(self, name: str, arguments: str) -> Iterator[Event]:
        """The events of a call that is complete."""
        if self._is_one_too_many:
            return
        yield CallStart(self.count, self.new_id(), name)
        yield CallDelta(self.count, arguments)
        self.count += 1

    @property
    def _is_one_too_many(self) -> bool:
        return self.most is not None and self.count >= self.most


@dataclass
class ToolCallParser:
    """Parser for all forms but `NamedCall`, configured by their markers and separators."""

    calls: Calls
    markers: tuple[str, ...] = ()  # a call begins after one of these; empty: with the first character
    as_list: bool = False  # calls may be in a JSON list
    named: bool = False  # a bare function name and its arguments may follow the marker
    closing: str = ""  # the text after a call
    objects: tuple[str, ...] = ()  # how a call without a marker begins within a text
    is_whole: bool = False  # the answer may begin with a call
    _where: str = "text"
    _held: list[str] = field(default_factory=list)  # characters that may be layout, a marker or a function name
    _seen: str = ""  # of these, in a gap: without white space around them
    _call: CallObject | None = None
    _search: StopStrings = field(init=False)

    def __post_init__(self) -> None:
        self._search = StopStrings((*self.markers, *self.objects))
        if not self.markers or self.is_whole:
            self._where = "gap"

    def push(self, text: str) -> list[Event]:
        """More of the answer."""
        events: list[Event] = []
        for char in text:
            events.extend(self._take(char))
        if self._call is not None:
            events.extend(self.calls.progress(self._call))
        return joined(events)

    def finish(self) -> list[Event]:
        """The remaining events: an incomplete call is text, unless a part of it was sent already."""
        if self._call is not None:
            if self.calls.began:
                return list(self.calls.progress(self._call))
            return [TextEvent(self._before + self._call.raw)] if self._call.raw and not self.calls.live else []
        rest = self._mark + "".join(self._held) + self._search.flush()
        is_layout = self._where == "gap" and not self._mark and self.calls.count > 0
        self._held, self._mark = [], ""
        if is_layout and any(text.startswith(rest.strip()) for text in (*self.markers, self.closing)):
            return []  # the beginning of what stands after a call
        return [TextEvent(rest)] if rest and (rest.strip() or not self.calls.count) else []

    def _take(self, char: str) -> Iterator[Event]:
        if self._call is not None:
            yield from self._in_a_call(self._call, char)
        elif self._where == "text":
            yield from self._in_text(char)
        else:
            yield from self._between(char)

    def _in_text(self, char: str) -> Iterator[Event]:
        released = self._search.push(char)
        for each in released.text:
            # White space is held back: before a call it is dropped as layout.
            self._held.append(each)
            if not each.isspace() or len(self._held) > MOST_LAYOUT:
                yield TextEvent("".join(self._held))
                self._held = []
        if released.stop in self.objects:
            yield TextEvent("".join(self._held))
            self._mark = ""
            yield from self._open_with(released.stop or "")
        elif released.stop is not None:
            self._begin_gap("".join(self._held) + released.stop)

    def _begin_gap(self, mark: str = "") -> None:
        """Look for the next call. `mark`: the marker, and the white space before it, which are text if none comes."""
        self._held, self._seen, self._where, self._mark = [], "", "gap", mark

    def _open_with(self, start: str) -> Iterator[Event]:
        self._call = self.calls.begin()
        self._held, self._has_bare_name = [], False
        self._bracket = start[: start.index("{")]
        for char in start[start.index("{") :]:
            yield from self._in_a_call(self._call, char)

    def _between(self, char: str) -> Iterator[Event]:
        """State after a marker or between two calls: layout, a function name, a new call, or plain text."""
        self._held.append(char)
        if char.isspace():
            if len(self._held) > MOST_LAYOUT:
                yield from self._turn_to_text()
            return  # what was seen before is still what may go on
        # White space inside of it counts. It is short: what may go on is a marker or the name of a function.
        self._seen = "".join(self._held).lstrip() if self._seen else char
        if char == "{":
            yield from self._open(self._seen[:-1])
        elif self.closing and self._seen == self.closing:
            if self._mark:  # nothing was called
                yield from self._turn_to_text()
            self._held, self._where = [], "text"
        elif self._is_separator(self._seen):
            # Before the first call it may turn out to be the beginning of a text.
            self._begin_gap(self._mark + "".join(self._held) if self._mark or not self.calls.count else "")
        elif not self._may_go_on(self._seen):
            yield from self._turn_to_text()

    def _turn_to_text(self) -> Iterator[Event]:
        held, self._held, self._where = self._held, [], "text"
        mark, self._mark = self._mark, ""
        if mark:
            yield TextEvent(mark)
        for each in held:  # there may be a marker among them, after which calls are looked for again
            yield from self._take(each)

    def _is_separator(self, seen: str) -> bool:
        return (
            seen in self.markers or (self.as_list and seen in {",", "]"}) or (not self.closing and seen in {";", ","})
        )

    def _may_go_on(self, seen: str) -> bool:
        if self.as_list and seen == "[":
            return True
        if any(text.startswith(seen) for text in (*self.markers, self.closing)):
            return True
        # A function name, and marks that models write between it and its arguments, such as [ARGS].
        return self.named and len(seen) < 200 and "\n" not in seen

    def _open(self, before: str) -> Iterator[Event]:
        written, self._held = "".join(self._held)[:-1], []
        self._bracket = before if self.as_list and not self.named else ""
        self._call = self.calls.begin()
        if self.named:
            self._call.note(written)
        name = before.split("[", 1)[0].strip() if self.named else ""
        head = json.dumps({"name": name})[:-1] + ', "arguments": ' if name else ""
        for char in head:
            self._call.push(char, is_written=False)
        self._call.push("{")
        self._has_bare_name = bool(name)
        return iter(())

    def _in_a_call(self, call: CallObject, char: str) -> Iterator[Event]:
        call.push(char)
        if self._has_bare_name and call.value_is_whole:
            call.push("}", is_written=False)
        if call.is_broken:
            before, self._call, self._where, self._mark = self._before, None, "text", ""
            yield TextEvent(before + call.raw)
        elif call.is_complete:
            before, self._call = self._before, None
            self._begin_gap()
            for event in self.calls.end(call):
                if isinstance(event, TextEvent):  # it is not a call of a known function
                    self._where = "gap" if self.as_list and self.markers and not self.is_whole else "text"
                    yield TextEvent(before)
                yield event

    @property
    def _before(self) -> str:
        """The text before an object that may be a call: the marker, and the bracket of a list."""
        return self._mark + self._bracket

    _has_bare_name: bool = False
    _mark: str = ""
    _bracket: str = ""


@dataclass
class NamedCall:
    """Parser where the whole answer is the arguments of one function, enforced by a grammar."""

    name: str
    id: str
    _began: bool = False

    def push(self, text: str) -> list[Event]:
        """More of the arguments."""
        if not text:
            return []
        begins = [] if self._began else [CallStart(0, self.id, self.name)]
        self._began = True
        return [*begins, CallDelta(0, text)]

    def finish(self) -> list[Event]:
        """No events: this parser holds nothing back."""
        return []


def joined(events: list[Event]) -> list[Event]:
    """Merge consecutive text events."""
    joined: list[Event] = []
    for is_text, group in groupby(events, key=lambda event: isinstance(event, TextEvent)):
        if is_text:
            joined.append(TextEvent("".join(event.text for event in group if isinstance(event, TextEvent))))
        else:
            joined.extend(group)
    return joined


def call_id() -> str:
    """A new id of a call."""
    return f"call_{secrets.token_hex(12)}"


def short_id() -> str:
    """A call id of nine letters and digits, the only form that Mistral's templates accept."""
    return secrets.token_hex(5)[:9]
