"""The form of tool calls is found by rendering the template with a probe, whatever words its source contains.

review/api-users.md 6, review/peer-suites.md 4. The templates are abridged; each keeps how its family shows tools and
calls.
"""

import json
from typing import Any

import pytest

from slipway_runtime.command_line import parse_arguments, serve_settings
from slipway_runtime.server.chat_types import ChatMessage, Tool
from slipway_runtime.server.errors import ApiError
from slipway_runtime.server.openai_types import ChatRequest
from slipway_runtime.server.prompt import ChatTemplate
from slipway_runtime.server.template_tools import PARSERS
from slipway_runtime.server.tools import tool_use
from slipway_runtime.settings import TOOL_CALL_PARSERS
from tests.runtime.server.thinking_models import GPT_OSS, QWEN3

SHOWN = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
TURN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
CALLS = "{% for c in m.tool_calls or [] %}"
QWEN3_CODER = (
    "{% if tools %}<|system|><tools>{% for t in tools %}<function><name>{{ t.function.name }}</name></function>"
    "{% endfor %}</tools>Call as <tool_call>\n<function=name>\n...{% endif %}" + TURN + CALLS + "\n<tool_call>\n"
    "<function={{ c.function.name }}>\n{% for key, value in c.function.arguments | items %}<parameter={{ key }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    "{% endfor %}<|end|>\n{% endfor %}"
)
PHI4_MINI = (
    "{% for m in messages %}{% if m['role'] == 'system' and 'tools' in m and m['tools'] is not none %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}<|tool|>{{ m['tools'] }}<|/tool|><|end|>"
    "{% else %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LLAMA3 = (
    '<|begin|>{% if tools %}Respond in the format {"name": function name, "parameters": dictionary}.'
    + SHOWN
    + "{% endif %}{% for m in messages %}<|header|>{{ m.role }}<|/header|>\n\n{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call only') }}{% endif %}"
    "{% set c = m.tool_calls[0].function %}"
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}<|eot|>{% endfor %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.first %}[AVAILABLE_TOOLS]"
    + SHOWN
    + "[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS] ["
    + CALLS
    + "{% if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]</s>{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
MISTRAL_SMALL = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.first %}" + SHOWN + "{% endif %}"
    "[INST]{{ m.content }}[/INST]{% else %}{{ m.content or '' }}"
    + CALLS
    + "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>"
    "{% endif %}{% endfor %}"
)
PYTHONIC = (
    "{% if tools %}Functions:"
    + SHOWN
    + "{% endif %}"
    + TURN
    + "{% if m.tool_calls %}["
    + CALLS
    + "{{ c.function.name }}({% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }}{% endfor %})"
    "{% endfor %}]{% endif %}<|end|>{% endfor %}"
)
SMOLLM3 = "{% if tools %}Call within <tool_call></tool_call> tags:" + SHOWN + "{% endif %}" + TURN + "{% endfor %}"
DEEPSEEK_V3 = (
    "{% if tools %}" + SHOWN + "{% endif %}" + TURN + CALLS + "<call_begin>{{ c.function.name }}<sep>"
    "{{ c.function.arguments | tojson }}<call_end>{% endfor %}{% endfor %}"
)
FORMS = {
    "qwen3": (QWEN3, "hermes"),
    "qwen3_coder": (QWEN3_CODER, "qwen3_coder"),
    "phi4_mini": (PHI4_MINI, "phi4_mini"),
    "llama3": (LLAMA3, "llama3"),
    "mistral": (MISTRAL, "mistral"),
    "mistral_small": (MISTRAL_SMALL, "mistral"),
    "pythonic": (PYTHONIC, "pythonic"),
    "smollm3": (SMOLLM3, "hermes"),
    "gpt_oss": (GPT_OSS, "harmony"),
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def a_request(**fields: Any) -> ChatRequest:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [WEATHER], "tool_choice": "auto"}
    return ChatRequest.model_validate(body | fields)


@pytest.mark.parametrize(("source", "form"), FORMS.values(), ids=FORMS)
def test_a_template_shows_the_form_of_its_models_calls(source: str, form: str):
    assert tool_use(a_request(), ChatTemplate(source, {})).form == form


@pytest.mark.parametrize(
    "source",
    ["{# tools <tool_call> #}" + TURN + "{% endfor %}", "{{ 'tools' if false }}" + TURN + "{% endfor %}"],
)
def test_a_word_in_the_source_shows_no_tools(source: str):
    with pytest.raises(ApiError, match="shows no tools"):
        tool_use(a_request(), ChatTemplate(source, {}))


def test_an_unknown_form_is_refused_by_the_name_of_the_flag_and_the_flag_sets_it():
    with pytest.raises(ApiError, match="--tool-call-parser"):
        tool_use(a_request(), ChatTemplate(DEEPSEEK_V3, {}))

    assert tool_use(a_request(), ChatTemplate(DEEPSEEK_V3, {}, tool_call_parser="hermes")).form == "hermes"
    assert tool_use(a_request(), ChatTemplate(QWEN3, {}, tool_call_parser="llama3_json")).form == "llama3"
    assert tool_use(a_request(tool_choice="required"), ChatTemplate(DEEPSEEK_V3, {})).grammar is not None


def test_every_name_of_the_flag_is_a_form():
    assert set(TOOL_CALL_PARSERS) == {"auto", *PARSERS}
    arguments = parse_arguments(["serve", "file:///model", "--tool-call-parser", "qwen3_xml"])
    assert serve_settings(arguments, {}).tool_call_parser == "qwen3_xml"


def render(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    tools = [Tool.model_validate(WEATHER)]
    return ChatTemplate(source, {}).render([ChatMessage.model_validate(m) for m in messages], tools=tools, **options)


def test_tools_of_phi_4_mini_are_in_the_system_message_which_is_added_if_there_is_none():
    alone = render(PHI4_MINI, [{"role": "user", "content": "x"}])
    beside = render(PHI4_MINI, [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "x"}])

    shown = json.loads(alone.split("<|tool|>")[1].split("<|/tool|>")[0])
    assert shown == [WEATHER["function"]]
    assert beside.startswith("<|system|>Be kind.<|tool|>")


@pytest.mark.parametrize("name", ["phi4_mini", "smollm3"])
def test_calls_that_the_template_leaves_out_are_in_the_text_in_the_models_own_form(name: str):
    source, form = FORMS[name]
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    history = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
    ]
    text = render(source, history)

    parser = tool_use(a_request(), ChatTemplate(source, {})).parser()
    assert parser is not None
    assert form in {"phi4_mini", "hermes"}
    events = [*parser.push(text[text.index("<|assistant|>") + 13 :]), *parser.finish()]
    assert [event.name for event in events if hasattr(event, "name")] == ["weather"]
    assert '"city": "Bern"' in text
