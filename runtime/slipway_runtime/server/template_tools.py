"""Finds how a chat template shows tools and writes calls, by rendering it with a probe tool and a probe call. Pure.

| the probe                                            | the template                                                |
|------------------------------------------------------|-------------------------------------------------------------|
| `tools` changes the prompt                           | shows tools: the variable (most models)                     |
| a system message with `tools` changes it             | shows tools: the message (Phi-4-mini)                       |
| neither                                              | shows no tools: `auto` would have no effect, so it is a 400 |
| one parser reads the probe call that it has written  | has the form of that parser                                 |
| no call is written, but the prompt explains a form   | has that form; calls of the history are added to the text   |
| anything else                                        | has no known form: `--tool-call-parser` names it            |
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from jinja2 import TemplateError

from slipway_runtime.server.tool_calls import CallDelta, CallStart
from slipway_runtime.server.tool_parsers import parser_of

# The values of --tool-call-parser, vLLM's names among them → the form.
PARSERS: Final = {
    "hermes": "hermes",
    "qwen3_coder": "qwen3_coder",
    "qwen3_xml": "qwen3_coder",
    "mistral": "mistral",
    "llama3_json": "llama3",
    "llama4_json": "llama3",
    "phi4_mini_json": "phi4_mini",
    "pythonic": "pythonic",
    "llama4_pythonic": "pythonic",
    "openai": "harmony",
}
# The forms that a probe call is read with; the first that reads it is the form. `llama3` takes any bare object.
_PROBED: Final = ("qwen3_coder", "hermes", "mistral", "phi4_mini", "pythonic", "llama3")
# For templates that write no calls: an explanation in the rendered prompt → the form.
_EXPLAINED: Final = (
    ("<|channel|>", "harmony"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool|>", "phi4_mini"),
    ("functools[", "phi4_mini"),
    ("<|python_tag|>", "llama3"),
    ('"parameters": dictionary', "llama3"),
)
_NAME: Final = "slipway_probe"
_ARGUMENTS: Final = {"probe_city": "Bern"}
_FUNCTION: Final = {
    "name": _NAME,
    "description": "A probe.",
    "parameters": {"type": "object", "properties": {"probe_city": {"type": "string"}}, "required": ["probe_city"]},
}
_CANNOT_RENDER: Final = (TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError, OverflowError)
Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str]


@dataclass(frozen=True)
class ToolFormat:
    """How a chat template shows tools, and how its model writes calls."""

    place: str = ""  # variable or message; empty: the template shows no tools
    form: str = ""  # of calls; empty: unknown
    writes_calls: bool = True  # whether calls of the history are in the prompt


def tool_format(render: Render, chosen: str = "auto") -> ToolFormat:
    """Probe a template. `render` gets messages and tools; `chosen` is the setting, and overrides the form."""
    tool = {"type": "function", "function": _FUNCTION}
    user = {"role": "user", "content": "x"}
    system = {"role": "system", "content": "y"}
    plain = _try(render, [user], [])
    place = ""
    with_tools = _try(render, [user], [tool])
    if with_tools is not None and with_tools != plain:
        place = "variable"
    else:
        shown = with_tools_in_message([system, user], [tool])
        with_tools = _try(render, shown, [])
        if with_tools is not None and with_tools != _try(render, [system, user], []):
            place = "message"
    written = _written_call(render, user, tool if place == "variable" else None)
    form = PARSERS.get(chosen, "")
    if not form and written:
        form = _form_of(written)
    if not form and not written:
        form = next((form for sign, form in _EXPLAINED if place and sign in (with_tools or "")), "")
    return ToolFormat(place, form, bool(written))


def with_tools_in_message(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The messages with the functions as JSON in the system message, which is added if there is none."""
    text = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    head, rest = (messages[0], messages[1:]) if messages and messages[0]["role"] == "system" else (None, messages)
    return [{**(head or {"role": "system", "content": ""}), "tools": text}, *rest]


def text_of_calls(calls: Sequence[Mapping[str, Any]], form: str) -> str:
    """The calls as the model has written them, for a template that writes none."""
    bare = [{"name": c["function"]["name"], "arguments": c["function"]["arguments"]} for c in calls]
    whole = json.dumps(bare, ensure_ascii=False)
    match form:
        case "phi4_mini":
            return f"<|tool_call|>{whole}<|/tool_call|>"
        case "mistral":
            return f"[TOOL_CALLS] {whole}"
        case "hermes":
            return "\n".join(f"<tool_call>\n{json.dumps(c, ensure_ascii=False)}\n</tool_call>" for c in bare)
        case _:
            return "; ".join(
                json.dumps({"name": c["name"], "parameters": c["arguments"]}, ensure_ascii=False) for c in bare
            )


def _written_call(render: Render, user: Mapping[str, Any], tool: Mapping[str, Any] | None) -> str:
    """The text that the template writes for a call in the history; empty: none."""
    function = {"name": _NAME, "arguments": _ARGUMENTS}
    call = {"id": "abcDEF123", "type": "function", "function": function}  # Mistral's ids have nine characters
    result = {"role": "tool", "tool_call_id": "abcDEF123", "name": _NAME, "content": "z"}
    tools = [tool] if tool is not None else []
    before = _try(render, [user], tools) or ""
    for content in ("", None):
        said = {"role": "assistant", "content": content, "tool_calls": [call]}
        for history in ([user, said], [user, said, result]):
            text = _try(render, history, tools)
            if text is None:
                continue
            same = next((i for i, (a, b) in enumerate(zip(text, before, strict=False)) if a != b), len(before))
            after = text[same:]
            if _NAME in after:
                return after
    return ""


def _form_of(written: str) -> str:
    """The form whose parser reads the probe call in a text; empty: none."""
    if "<|message|>" in written and f"functions.{_NAME}" in written:
        return "harmony"
    for form in _PROBED:
        start = min((at for sign in "{[<" if (at := written.find(sign)) >= 0), default=0)
        # Forms without a marker begin with the answer: after the header of the turn, which the tail may contain.
        for text in (written, written[start:], *_tails(written)):
            parser = parser_of(form, {_NAME: _FUNCTION["parameters"]})
            events = [*parser.push(text), *parser.finish()]
            names = [event.name for event in events if isinstance(event, CallStart)]
            arguments = "".join(event.arguments for event in events if isinstance(event, CallDelta))
            if names == [_NAME] and json.loads(arguments) == _ARGUMENTS:
                return form
    return ""


def _tails(written: str) -> list[str]:
    """The text from each bracket that is near before the probe's name."""
    at = written.find(_NAME)
    return [written[i:] for i in range(max(0, at - 16), at) if written[i] in "[{"]


def _try(render: Render, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str | None:
    try:
        return render(messages, tools)
    except _CANNOT_RENDER:
        return None
