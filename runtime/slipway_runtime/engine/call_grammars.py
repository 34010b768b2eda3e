"""Grammars of tool calls in the form that a model was trained to write, in llguidance's Lark. Pure.

A request's tools come as `{"form", "functions": [{"name", "schema"}], "is_free"}`; a function without a schema takes
any arguments. `is_free`: text may stand before, between and after the calls; else the answer is calls, or the format.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from slipway_runtime.engine.schemas import prepared

# The form → the trigger by which a call is recognised, the text before the arguments, the text after them, and the text
# between two calls.
_TAGS: Final = {
    "hermes": ("<tool_call>", '\n{{"name": {name}, "arguments": ', "}\n</tool_call>", "\n"),
    "mistral": ("[TOOL_CALLS]", ' [{{"name": {name}, "arguments": ', "}]", ""),
    "llama3": ('{"name"', ': {name}, "parameters": ', "}", "; "),
    "phi4_mini": ("<|tool_call|>", '[{{"name": {name}, "arguments": ', "}]<|/tool_call|>", ""),
}
_XML: Final = ("<tool_call>", "</function>\n</tool_call>", "\n")
_ANY: Final = {"type": "object"}
FORMS: Final = (*_TAGS, "qwen3_coder")
Marker = Callable[[str], str]  # a text as a terminal of Lark: its special token if it is one


def grammar_of_calls(
    form: str,
    functions: Sequence[Mapping[str, Any]],
    *,
    is_free: bool,
    has_format: bool,
    most: int | None = None,
    marker: Marker,
) -> str:
    """The Lark grammar of an answer. With `has_format` the answer may follow the grammar `@format` instead.

    `most`: of calls, if text may not stand between them; 1, or no limit.
    """
    trigger, _, separator = _outline(form)
    opening = marker(trigger)
    rules: list[str] = []
    for number, function in enumerate(functions):
        rules += _call(number, form, function)
    names = " | ".join(f"call_{number}" for number in range(len(functions)))
    if is_free and opening.startswith("<"):
        head = ["start: (TEXT call)* TEXT"]
    elif is_free:
        head = ["start: (begin body)* TEXT", f"begin[lazy]: TEXT {opening}"]
    else:
        between = f"{_text(separator)} " if separator else ""
        head = [
            "start: calls" + (" | @format" if has_format else ""),
            "calls: call" + ("" if most == 1 else f" ({between}call)*"),
        ]
    return "\n".join(
        ["%llguidance {}", *head, f"call: {opening} body", f"body: {names}", "TEXT: /(.|\\n)*/", *rules, ""]
    )


def with_options(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema with the compiler's options: a weak model could repeat spaces without end."""
    own = schema.get("x-guidance")
    options = {"whitespace_pattern": " ?", "coerce_one_of": True}
    return {**schema, "x-guidance": {**options, **(own if isinstance(own, Mapping) else {})}}


def _outline(form: str) -> tuple[str, str, str]:
    if form == "qwen3_coder":
        return _XML
    trigger, _, end, separator = _TAGS[form]
    return trigger, end, separator


def _call(number: int, form: str, function: Mapping[str, Any]) -> list[str]:
    name, schema = str(function["name"]), function.get("schema")
    if form == "qwen3_coder":
        begin = _text(f"\n<function={name}>\n")
        if schema is None:
            return [f"call_{number}: {begin} rest_{number} {_text(chr(10) + '</tool_call>')}",
                    f'rest_{number}[suffix="</function>"]: /(.|\\n)*/']  # fmt: skip
        return _xml_call(number, begin, schema)
    _, before, after, _ = _TAGS[form]
    begin = before.replace("{name}", json.dumps(name, ensure_ascii=False)).replace("{{", "{")
    return [f"call_{number}: {_text(begin)} %json {json.dumps(with_options(schema or _ANY))} {_text(after)}"]


def _xml_call(number: int, begin: str, schema: Mapping[str, Any]) -> list[str]:
    """A call with a parameter for each property, in the order of the schema; text stands without quotes."""
    root = prepared(schema, base="#/$defs/root").schema
    properties = schema.get("properties")
    required = schema.get("required") or []
    body, rules = "", []
    for index, (name, given) in enumerate(properties.items() if isinstance(properties, Mapping) else ()):
        rule = f"p_{number}_{index}"
        end = "\n</parameter>\n"
        value = _plain_text(_target(given, schema), end)
        if value is None:
            path = name.replace("~", "~0").replace("/", "~1")
            pointer = {"$ref": prepared({"$ref": f"#/properties/{path}"}, base="#/$defs/root").schema["$ref"]}
            value = f"%json {json.dumps(with_options(pointer | {'$defs': {'root': root}}))} {_text(end)}"
        elif value.startswith("/"):
            rules.append(f"{rule}_text[suffix={_text(end)}]: {value}")
            value = f"{rule}_text"
        rules.append(f"{rule}: {_text(f'<parameter={name}>' + chr(10))} ({value})")
        body += f" {rule}" + ("" if name in required else "?")
    return [f"call_{number}: {begin}{body} {_text(_XML[1])}", *rules]


def _plain_text(schema: Any, end: str) -> str | None:
    """The value of a parameter that is text: alternatives or an expression; None: it is written as JSON."""
    if not isinstance(schema, Mapping):
        return None
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(listed, list) and listed and all(isinstance(value, str) for value in listed):
        return " | ".join(_text(value + end) for value in listed)
    if schema.get("type") != "string":
        return None
    if isinstance(pattern := schema.get("pattern"), str):
        # A pattern matches anywhere in a text, unless it is anchored.
        inner = pattern.removeprefix("^").removesuffix("$").replace("/", "\\/")
        before = "" if pattern.startswith("^") else "(.|\\n)*"
        return f"/{before}({inner}){'' if pattern.endswith('$') else '(.|' + chr(92) + 'n)*'}/"
    least, most = schema.get("minLength"), schema.get("maxLength")
    if least is None and most is None:
        return "/(.|\\n)*/"
    return f"/(.|\\n){{{int(least or 0)},{'' if most is None else int(most)}}}/"


def _target(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema that a reference leads to, within the root."""
    for _ in range(8):
        target = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(target, str) or not target.startswith("#/"):
            return schema
        schema = root
        for step in target[2:].split("/"):
            schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return schema


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
