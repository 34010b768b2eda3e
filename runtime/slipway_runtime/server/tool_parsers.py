"""The parser of each form of tool calls, and the forms that are not JSON objects: Qwen3-Coder's XML and Python. Pure.

    qwen3_coder   some words <tool_call>\\n<function=f>\\n<parameter=a>\\n1\\n</parameter>\\n</function>\\n</tool_call>
    pythonic      [f(a=1), g()]            the whole answer
    phi4_mini     <|tool_call|>[{…}]<|/tool_call|>    or    functools[{…}]
    llama3        {…}; {…}    [{…}]    some words {"name": …}
    the others    see `tool_calls.py`

Both parsers hold a call back until it is complete. Text that turns out not to be a call is sent as text.
"""

import ast
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from slipway_runtime.engine.detokenizer import StopStrings
from slipway_runtime.server.tool_calls import (
    Calls,
    Event,
    NamedCall,
    Parser,
    TextEvent,
    ToolCallParser,
    call_id,
    joined,
    short_id,
    value_of,
)

FORMS: Final = ("hermes", "qwen3_coder", "mistral", "llama3", "phi4_mini", "pythonic")
_OPEN, _FUNCTION, _CLOSE = "<tool_call>", "<function=", "</tool_call>"
_FUNCTION_END: Final = "</function>"
_ONE_FUNCTION: Final = re.compile(r"<function=([^>\n]*)>(.*?)</function>", re.DOTALL)
_PARAMETER: Final = re.compile(r"<parameter=([^>\n]*)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_OBJECTS: Final = ('{"name"', '{ "name"', "{'name'", '[{"name"', '[{ "name"')  # how calls begin within a text
MOST_HELD: Final = 256 * 1024  # characters of one call; more is text


def parser_of(
    form: str, names: Collection[str], *, live: bool = False, most: int | None = None, name: str = ""
) -> Parser:
    """Make a parser for one answer. `names`: of the functions, with the schemas of their arguments if it is a mapping.

    `most`: further calls are dropped; `name`: the function of the form `named`.
    """
    calls = Calls(names, live, most, new_id=short_id if form == "mistral" else call_id)
    match form:
        case "named":
            return NamedCall(name, call_id())
        case "array":
            return ToolCallParser(calls, as_list=True)
        case "hermes":
            return ToolCallParser(calls, markers=(_OPEN,), closing=_CLOSE)
        case "mistral":
            return ToolCallParser(calls, markers=("[TOOL_CALLS]",), as_list=True, named=True)
        case "llama3":
            return ToolCallParser(calls, markers=("<|python_tag|>",), objects=_OBJECTS, as_list=True, is_whole=True)
        case "phi4_mini":
            markers = ("<|tool_call|>", "functools")
            return ToolCallParser(calls, markers=markers, as_list=True, closing="<|/tool_call|>")
        case "qwen3_coder":
            return XmlParser(calls)
        case "pythonic":
            return PythonicParser(calls)
        case _:
            raise ValueError(f"there is no form of tool calls named {form!r}")


@dataclass
class XmlParser:
    """Parser of Qwen3-Coder's form."""

    calls: Calls
    _held: list[str] = field(default_factory=list)  # from the marker on; empty: in text
    _space: list[str] = field(default_factory=list)  # white space that is layout if a call follows
    _search: StopStrings = field(default_factory=lambda: StopStrings((_OPEN, _FUNCTION)))
    _end: StopStrings = field(default_factory=lambda: StopStrings((_CLOSE, _FUNCTION_END)))
    _in_function: bool = False
    _function_has_ended: bool = False

    def push(self, text: str) -> list[Event]:
        """More of the answer."""
        events: list[Event] = []
        for char in text:
            events += self._in_a_call(char) if self._held else self._in_text(char)
        return joined(events)

    def finish(self) -> list[Event]:
        """The remaining events. A call without its last marker counts; one that is cut off is text."""
        if self._held:
            if self._function_has_ended:
                return joined(self._end_call())
            return [] if self.calls.live else joined(self._as_text())
        rest = "".join(self._space) + self._search.flush()
        self._space = []
        return [TextEvent(rest)] if rest and (rest.strip() or not self.calls.count) else []

    def _in_text(self, char: str) -> list[Event]:
        released = self._search.push(char)
        events: list[Event] = []
        for each in released.text:
            self._space.append(each)
            if not each.isspace() or len(self._space) > 1024:
                events.append(TextEvent("".join(self._space)))
                self._space = []
        if released.stop is not None:
            self._held = [*released.stop]
            self._in_function = released.stop == _FUNCTION
            self._function_has_ended = False
            self._end = StopStrings((_CLOSE, _FUNCTION_END))
        return events

    def _in_a_call(self, char: str) -> list[Event]:
        self._held.append(char)
        if not self._in_function:
            # Between the marker and the function there is white space only; else the marker is a part of the text.
            after = "".join(self._held[len(_OPEN) :]).lstrip() if len(self._held) < 256 else "."
            self._in_function = after == _FUNCTION
            return [] if _FUNCTION.startswith(after) else self._as_text(search=True)
        if len(self._held) > MOST_HELD:
            return self._as_text()
        ended = self._end.push(char).stop
        if self._function_has_ended and ended is None:
            tail = self._tail()
            if tail and not _CLOSE.startswith(tail) and not _FUNCTION.startswith(tail):
                if self._held[: len(_OPEN)] != [*_OPEN] or not tail.startswith("<"):
                    return self._end_call(len(tail))
                self._function_has_ended = False  # `</function>` was a part of a value
        elif ended == _FUNCTION_END:
            self._function_has_ended = True
            self._function_end = len(self._held)
        elif ended == _CLOSE and self._function_has_ended:
            return self._end_call()
        return []

    _function_end: int = 0

    def _tail(self) -> str:
        """The text after `</function>`, without white space around it."""
        return "".join(self._held[self._function_end :]).strip() if len(self._held) - self._function_end < 1024 else "."

    def _end_call(self, rest: int = 0) -> list[Event]:
        """The events of a complete call; `rest`: so many characters at the end are text after it."""
        whole = "".join(self._held)
        after = whole[len(whole) - rest :] if rest else ""
        raw = whole[: len(whole) - rest] if rest else whole
        functions = _ONE_FUNCTION.findall(raw)
        calls = [(name.strip(), self._arguments(name.strip(), body)) for name, body in functions]
        if not calls or any(name not in self.calls.names for name, _ in calls):
            return self._as_text()
        self._held, self._space = [], []
        events: list[Event] = []
        for name, arguments in calls:
            events += self.calls.whole(name, json.dumps(arguments, ensure_ascii=False))
        return events + [event for char in after for event in self.push(char)]

    def _as_text(self, *, search: bool = False) -> list[Event]:
        """What was held, as text. `search`: a call may begin in it, after the marker."""
        held = "".join(self._space) + "".join(self._held)
        end = len(self._space) + len(_OPEN) if search else len(held)
        self._held, self._space = [], []
        events: list[Event] = [TextEvent(held[:end])]
        for char in held[end:]:
            events += self._in_a_call(char) if self._held else self._in_text(char)
        return events

    def _arguments(self, function: str, body: str) -> dict[str, Any]:
        names = self.calls.names
        schema = names.get(function) if isinstance(names, Mapping) else None
        return {
            key.strip(): _argument(value, schema, key.strip()) for key, value in _PARAMETER.findall(body) if key.strip()
        }


def _argument(text: str, schema: Any, name: str) -> Any:
    """The value of a parameter: text if its schema takes only text, else JSON, else text."""
    text = text.removeprefix("\n").removesuffix("\n")
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    types = _types((properties or {}).get(name), schema, 8) if isinstance(properties, Mapping) else set()
    if types == {"string"}:
        return text
    value = value_of(text)
    if value is None and text.strip() not in {"null", "None"}:
        return {"true": True, "false": False}.get(text.strip().lower(), text)
    if types and "string" in types and _type_of(value) not in types:
        return text
    return value


def _types(schema: Any, root: Any, depth: int) -> set[str]:
    """The JSON types that a schema takes; empty: any."""
    if not isinstance(schema, Mapping) or not depth:
        return set()
    if isinstance(target := schema.get("$ref"), str) and target.startswith("#/"):
        for step in target[2:].split("/"):
            root_step = root.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
            root = root_step
        return _types(root, root, depth - 1)
    if "type" in schema:
        named = schema["type"]
        types = {named} if isinstance(named, str) else {t for t in named if isinstance(t, str)}
        return types | ({"integer"} if "number" in types else set())
    if isinstance(values := schema.get("enum"), list):
        return {_type_of(value) for value in values}
    if "const" in schema:
        return {_type_of(schema["const"])}
    found: set[str] = set()
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        for branch in branches if isinstance(branches, list) else []:
            inner = _types(branch, root, depth - 1)
            if not inner:
                return set()
            found |= inner
    return found


def _type_of(value: Any) -> str:
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "object"


@dataclass
class PythonicParser:
    """Parser of calls as a list of Python: the whole answer is calls, or all of it is text."""

    calls: Calls
    _held: list[str] = field(default_factory=list)
    _is_text: bool = False
    _depth: int = 0
    _quote: str = ""
    _escaped: bool = False

    def push(self, text: str) -> list[Event]:
        """More of the answer."""
        events: list[Event] = []
        for char in text:
            events += [TextEvent(char)] if self._is_text else self._take(char)
        return joined(events)

    def finish(self) -> list[Event]:
        """The remaining events: a list that is cut off is text."""
        rest, self._held, self._is_text = "".join(self._held), [], True
        return [TextEvent(rest)] if rest.strip() else []

    def _take(self, char: str) -> list[Event]:
        self._held.append(char)
        if not self._depth:
            if char.isspace() and len(self._held) < 1024:
                return []
            start = "".join(self._held).strip()
            self._depth = int(start in {"[", "<|python_tag|>["})
            return [] if self._depth or "<|python_tag|>".startswith(start) else self._as_text()
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == self._quote:
                self._quote = ""
        elif char in "'\"":
            self._quote = char
        else:
            self._depth += (char in "([{") - (char in ")]}")
        if self._depth and len(self._held) <= MOST_HELD:
            return []
        calls = self._read() if not self._depth else None
        if calls is None:
            return self._as_text()
        self._held = []
        return [event for name, arguments in calls for event in self.calls.whole(name, arguments)]

    def _as_text(self) -> list[Event]:
        held, self._held, self._is_text = "".join(self._held), [], True
        return [TextEvent(held)]

    def _read(self) -> list[tuple[str, str]] | None:
        try:
            tree = ast.parse("".join(self._held).strip().removeprefix("<|python_tag|>"), mode="eval").body
            if not isinstance(tree, ast.List) or not tree.elts:
                return None
            calls = [self._call(node) for node in tree.elts]
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return None
        return calls if all(name in self.calls.names for name, _ in calls) else None

    def _call(self, node: ast.expr) -> tuple[str, str]:
        if not isinstance(node, ast.Call) or node.args:
            raise ValueError("not a call with named arguments")
        arguments = {keyword.arg or "": _literal(keyword.value) for keyword in node.keywords}
        return ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _literal(node: ast.expr) -> Any:
    """The value of a Python literal; `true`, `false` and `null` of JSON count too."""
    match node:
        case ast.Name("true" | "false" | "null" as name):
            return {"true": True, "false": False, "null": None}[name]
        case ast.List() | ast.Tuple():
            return [_literal(item) for item in node.elts]
        case ast.Dict():
            return {ast.literal_eval(k): _literal(v) for k, v in zip(node.keys, node.values, strict=True) if k}
        case _:
            return ast.literal_eval(node)
