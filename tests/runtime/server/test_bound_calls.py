"""Grammars of calls: in the form of the model, of strict functions only, and beside a response format."""

import json
from typing import Any

import pytest

from slipway_runtime.engine.grammar import GrammarCompiler
from slipway_runtime.messages import Grammar
from slipway_runtime.server.errors import ApiError
from slipway_runtime.server.openai_types import ChatRequest
from slipway_runtime.server.prompt import ChatTemplate
from slipway_runtime.server.structured import GrammarValidator
from slipway_runtime.server.tools import ToolUse, bound_of, check_bound, tool_use, unenforced_keywords
from tests.runtime.server.serving import TINY
from tests.runtime.server.test_tool_format import FORMS, PYTHONIC

COMPILER = GrammarCompiler((TINY / "tokenizer.json").read_text(), eos_token_ids=(2,))
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
    "additionalProperties": False,
}
STRICT = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}
FREE = {
    "type": "function",
    "function": {"name": "scale", "parameters": {"type": "object", "dependentRequired": {"a": ["b"]}}},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "integer"}}}


def bound(form: str, **fields: Any) -> tuple[ToolUse, Grammar]:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [STRICT, FREE], "tool_choice": "auto"} | fields
    request = ChatRequest.model_validate(body)
    tools = tool_use(request, ChatTemplate(FORMS[form][0], {}))
    grammar = bound_of(request, tools)
    assert grammar is not None
    return tools, grammar[0]


def takes(grammar: Grammar, text: str) -> bool:
    matcher = COMPILER.matcher(grammar)
    tokens = COMPILER.vocabulary.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def call(form: str, name: str, **arguments: Any) -> str:
    """A call as the model of a form writes it."""
    as_json = json.dumps(arguments)
    parameters = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return {
        "qwen3": f'<tool_call>\n{{"name": "{name}", "arguments": {as_json}}}\n</tool_call>',
        "qwen3_coder": f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>",
        "llama3": f'{{"name": "{name}", "parameters": {as_json}}}',
        "mistral": f'[TOOL_CALLS] [{{"name": "{name}", "arguments": {as_json}}}]',
        "phi4_mini": f'<|tool_call|>[{{"name": "{name}", "arguments": {as_json}}}]<|/tool_call|>',
    }[form]


FORMS_OF_CALLS = ["qwen3", "qwen3_coder", "llama3", "mistral", "phi4_mini"]


@pytest.mark.parametrize("form", FORMS_OF_CALLS)
def test_a_strict_function_binds_only_itself(form: str):
    """review/api-users.md 10: one strict function bound, and could refuse, all the others."""
    _, grammar = bound(form)

    assert takes(grammar, "No call.")
    assert takes(grammar, "Well. " + call(form, "weather", city="Bern", days=2, unit="C"))
    assert not takes(grammar, call(form, "weather", city="Bern", days="two"))
    assert not takes(grammar, call(form, "weather", days=2))
    assert not takes(grammar, call(form, "weather", city="Bern", unit="K"))
    assert takes(grammar, call(form, "scale", anything="goes", a=[1]))


@pytest.mark.parametrize("form", FORMS_OF_CALLS)
def test_with_a_response_format_the_model_calls_or_answers_in_the_format(form: str):
    """review/api-users.md 7: no function could be called."""
    _, grammar = bound(form, response_format=FORMAT)

    assert takes(grammar, "12")
    assert takes(grammar, call(form, "weather", city="Bern"))
    assert takes(grammar, call(form, "scale", a=1))
    assert not takes(grammar, "Words.")
    assert not takes(grammar, call(form, "weather", city="Bern", days="two"))


@pytest.mark.parametrize("form", FORMS_OF_CALLS)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_is_in_the_form_of_the_model_and_drops_the_format(form: str, choice: Any):
    tools, grammar = bound(form, tool_choice=choice, response_format=FORMAT)
    text = call(form, "weather", city="Bern", days=2)
    parser = tools.parser()

    assert takes(grammar, text)
    assert not takes(grammar, "12")
    assert not takes(grammar, call(form, "weather", city="Bern", days="two"))
    assert takes(grammar, call(form, "scale", a=1)) == (choice == "required" and form != "qwen3_coder")
    assert parser is not None
    events = [*parser.push(text), *parser.finish()]
    assert [event.name for event in events if hasattr(event, "name")] == ["weather"]
    assert json.loads("".join(e.arguments for e in events if hasattr(e, "arguments"))) == {"city": "Bern", "days": 2}
    assert tools.finish_reason == ("tool_calls" if choice == "required" else "stop")


def test_gpt_oss_answers_in_the_format_on_its_final_channel_or_calls():
    _, grammar = bound("gpt_oss", response_format=FORMAT)

    assert grammar.kind == "harmony"
    assert json.loads(grammar.text)["format"]["kind"] == "json_schema"


def test_a_strict_function_that_cannot_be_enforced_is_named_with_the_path():
    strict = {"type": "function", "function": FREE["function"] | {"strict": True}}
    with pytest.raises(ApiError, match="scale is strict, but #/dependentRequired"):
        bound("qwen3", tools=[STRICT, strict])


def test_what_a_forced_function_does_not_enforce_is_named():
    """review/api-users.md 9. The names hold no text of the client."""
    tools, grammar = bound("qwen3", tool_choice="required")
    schema = {"type": "object", "properties": {"secret": {"uniqueItems": True}}}
    answer = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"json": schema}}
    )

    assert unenforced_keywords(answer, tools) == {"tools[].function.parameters.dependentRequired"}
    assert unenforced_keywords(answer, ToolUse()) == {"structured_outputs.json.uniqueItems"}
    COMPILER.check(grammar)


def test_a_form_without_a_grammar_is_refused_where_one_is_needed():
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "tools": [STRICT]})
    with pytest.raises(ApiError, match="form pythonic cannot be bound"):
        tool_use(request, ChatTemplate(PYTHONIC, {}))


@pytest.mark.asyncio
async def test_a_schema_that_cannot_be_compiled_is_refused_by_the_name_of_its_function():
    """review/api-users.md 8, 9."""
    broken = {"type": "object", "properties": {"a": {"$ref": "#/$defs/nowhere"}}}
    wrong = {"type": "function", "function": {"name": "broken", "parameters": broken}}
    tools, grammar = bound("qwen3", tools=[STRICT, wrong], tool_choice="required")

    with pytest.raises(ApiError, match="the function broken: ") as refusal:
        await check_bound(GrammarValidator(lambda: COMPILER), (grammar, "tools"), tools)
    assert (refusal.value.status, refusal.value.param) == (400, "tools")
