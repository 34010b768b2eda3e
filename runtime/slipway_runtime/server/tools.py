"""Resolves `tools` and `tool_choice`: the form of tool calls, which the chat template decides, and their grammar.

| tool_choice | shown to the model | bound by a grammar                   | finish_reason          |
|-------------|--------------------|--------------------------------------|------------------------|
| none        | no                 | no                                   | stop                   |
| auto        | yes                | calls of `strict` functions          | tool_calls, if any     |
| required    | yes                | calls, and nothing else              | tool_calls             |
| a function  | yes                | a call of it, and nothing else       | stop, as vLLM answers  |

Grammars write calls in the form that the model was trained on. If the template shows no tools or the form has no
grammar, `required` is a JSON list of calls, and a named function its arguments alone. With a response format, `auto`
lets the model call functions or answer in the format.

`auto` requires a chat template that shows tools to the model: without one it would have no effect, so it is refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipway_runtime.engine.call_grammars import FORMS as FORMS_WITH_GRAMMAR
from slipway_runtime.engine.schemas import prepared
from slipway_runtime.messages import Grammar
from slipway_runtime.server.chat_types import NamedTool, Tool
from slipway_runtime.server.errors import ApiError
from slipway_runtime.server.openai_types import ChatRequest
from slipway_runtime.server.prompt import ChatTemplate
from slipway_runtime.server.structured import GrammarValidator, compact, grammar_of, keywords_of, unenforced_of
from slipway_runtime.server.template_tools import PARSERS
from slipway_runtime.server.tool_calls import Parser
from slipway_runtime.server.tool_parsers import FORMS, parser_of


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """The tool use of one request."""

    shown: tuple[Tool, ...] = ()
    form: str = ""  # empty: no tools
    name: str = ""  # of the forced function
    live: bool = False  # a grammar enforces the calls
    most: int | None = None
    grammar: Grammar | None = None

    def parser(self) -> Parser | None:
        """A new parser for one answer; None where no tool may be called."""
        if not self.form or self.form == "harmony":
            return None
        names = {tool.function.name: tool.function.schema_of_arguments for tool in self.shown}
        return parser_of(self.form, names, live=self.live, most=self.most, name=self.name)

    @property
    def needs_special_tokens(self) -> bool:
        """Whether markers of calls may be special tokens, which are otherwise removed from the text."""
        return self.form in FORMS

    @property
    def finish_reason(self) -> str:
        """The `finish_reason` of an answer with calls."""
        return "stop" if self.name else "tool_calls"


def tool_use(body: ChatRequest, template: ChatTemplate, *, has_channels: bool = False) -> ToolUse:
    """Resolve the tool use of a request; raises ApiError 400 where it is not possible.

    `has_channels`: the answer may think on a channel of its own before a forced call.
    """
    tools = tuple(body.tools or ())
    if not tools or body.tool_choice == "none":
        return ToolUse()
    most = 1 if body.parallel_tool_calls is False else None
    form = template.tools.form if template.shows_tools else ""
    if isinstance(body.tool_choice, NamedTool):
        [tool] = [tool for tool in tools if tool.function.name == body.tool_choice.function.name]
        name = tool.function.name
        if form in FORMS_WITH_GRAMMAR:
            grammar = _forced((tool,), form, 1)
            return ToolUse(shown=tools, form=form, name=name, live=True, most=1, grammar=grammar)
        if form == "harmony" and has_channels:
            grammar = _forced_on_channels((tool,))
            return ToolUse(shown=tools, form=form, name=name, live=True, most=1, grammar=grammar)
        grammar = Grammar(kind="json_schema", text=_dumps(compact(arguments_of(tool))))
        return ToolUse(shown=tools, form="named", name=name, live=True, grammar=grammar)
    if body.tool_choice == "required":
        if form in FORMS_WITH_GRAMMAR:
            return ToolUse(shown=tools, form=form, live=True, most=most, grammar=_forced(tools, form, most))
        if form == "harmony" and has_channels:
            return ToolUse(shown=tools, form=form, live=True, most=1, grammar=_forced_on_channels(tools))
        grammar = Grammar(kind="json_schema", text=_dumps(compact(schema_of_calls(tools, most))))
        return ToolUse(shown=tools, form="array", live=True, most=most, grammar=grammar)
    form = form_of(template)
    strict = any(tool.function.strict for tool in tools)
    return ToolUse(shown=tools, form=form, most=most, grammar=_grammar_of_calls(tools, form) if strict else None)


def form_of(template: ChatTemplate) -> str:
    """The form of tool calls of a model with this template; raises ApiError 400 if `auto` could have no effect."""
    if not template.shows_tools:
        raise ApiError(
            400,
            "this model's chat template shows no tools to the model: only tool_choice 'required' or a named function"
            " work with it",
            param="tools",
        )
    if not template.tools.form:
        raise ApiError(
            400,
            "the form of tool calls of this model's chat template is not known: start the server with"
            f" --tool-call-parser ({', '.join(PARSERS)}), or use tool_choice 'required' or a named function",
            param="tools",
        )
    return template.tools.form


def schema_of_calls(tools: tuple[Tool, ...], most: int | None) -> dict[str, Any]:
    """JSON schema of a list of calls. The schema of each function is a definition, and its references move with it."""
    definitions = {str(number): arguments_of(tool, base=f"#/$defs/{number}") for number, tool in enumerate(tools)}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "parameters": {"$ref": f"#/$defs/{number}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for number, tool in enumerate(tools)
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}
    return schema | ({"maxItems": most} if most is not None else {})


def arguments_of(tool: Tool, *, base: str = "#") -> dict[str, Any]:
    """The schema of a function's arguments, for the compiler.

    What cannot be enforced is ignored, and refused by name if the function is `strict`.
    """
    ready = prepared(tool.function.schema_of_arguments, base=base)
    if tool.function.strict and ready.unenforced:
        raise ApiError(
            400,
            f"the function {tool.function.name} is strict, but {ready.unenforced[0]} of its parameters cannot be"
            " enforced; remove it or set strict to false",
            param="tools",
        )
    return dict(ready.schema) if isinstance(ready.schema, Mapping) else {"not": {}}


def unenforced_keywords(body: ChatRequest, tools: ToolUse) -> set[str]:
    """The keywords of the schemas of a request that its grammar does not enforce."""
    if not tools.live:
        return unenforced_of(body)
    bound = [tool for tool in tools.shown if tools.name in {"", tool.function.name}]
    paths = [path for tool in bound for path in prepared(tool.function.schema_of_arguments).unenforced]
    return keywords_of("tools[].function.parameters", paths)


def bound_of(body: ChatRequest, tools: ToolUse) -> tuple[Grammar, str] | None:
    """The grammar of an answer, and the name of the field that has it; None: the answer is free.

    A forced call drops the response format, as in vLLM. With `auto` the model calls functions or answers in the format.
    """
    format_ = None if tools.live else grammar_of(body)
    if format_ is None:
        return (tools.grammar, "tools") if tools.grammar is not None else None
    if not tools.form:
        return format_
    return _grammar_of_calls(tools.shown, tools.form, format_[0]), format_[1]


def _forced(tools: tuple[Tool, ...], form: str, most: int | None) -> Grammar:
    """The grammar of an answer that is calls of these functions and nothing else, in the form of the model."""
    functions = [{"name": tool.function.name, "schema": arguments_of(tool)} for tool in tools]
    return Grammar(kind="calls", text=_dumps({"form": form, "functions": functions, "is_free": False, "most": most}))


def _forced_on_channels(tools: tuple[Tool, ...]) -> Grammar:
    """The grammar of an answer of gpt-oss that thinks and then calls one of these functions."""
    functions = [{"name": tool.function.name, "schema": arguments_of(tool)} for tool in tools]
    return Grammar(kind="harmony", text=_dumps({"functions": functions, "format": None, "is_bound": True}))


async def check_bound(grammars: GrammarValidator, bound: tuple[Grammar, str], tools: ToolUse) -> None:
    """Check the grammar of an answer; raises ApiError, which names the function that is at fault."""
    try:
        await grammars.check(*bound)
    except ApiError as refusal:
        if refusal.status != 400 or bound[1] != "tools":
            raise
        for tool in tools.shown:
            if tool.function.strict or tools.live:
                schema = _dumps(arguments_of(tool))
                await grammars.check(
                    Grammar(kind="json_schema", text=schema), f"tools: the function {tool.function.name}"
                )
        raise


def _grammar_of_calls(tools: tuple[Tool, ...], form: str, format_: Grammar | None = None) -> Grammar:
    """The grammar of calls in free text, or of calls or an answer in a format. Only strict functions are bound."""
    other = {"kind": format_.kind, "text": format_.text} if format_ is not None else None
    if form == "harmony":
        functions = [{"name": tool.function.name, "schema": _bound(tool) or {"type": "object"}} for tool in tools]
        return Grammar(kind="harmony", text=_dumps({"functions": functions, "format": other} if other else functions))
    if form not in FORMS_WITH_GRAMMAR:
        raise ApiError(
            400,
            f"calls of the form {form} cannot be bound by a grammar: set strict to false, and leave out the response"
            " format, or use tool_choice 'required'",
            param="tools",
        )
    calls = {
        "form": form,
        "functions": [{"name": tool.function.name, "schema": _bound(tool)} for tool in tools],
        "is_free": format_ is None,
        "format": other,
    }
    return Grammar(kind="calls", text=_dumps(calls))


def _bound(tool: Tool) -> dict[str, Any] | None:
    """The schema of a call's arguments: a strict function binds its own; None: others take any object."""
    return arguments_of(tool) if tool.function.strict else None


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
