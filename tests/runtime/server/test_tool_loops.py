"""A tool loop goes on through all three APIs, also where the assistant called a tool and said nothing with it."""

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
import pytest_asyncio

from slipway_runtime.server.chat_types import ChatMessage, Tool
from slipway_runtime.server.prompt import ChatTemplate
from slipway_runtime.server.tokenizer import load_tokenizer
from tests.runtime.server.serving import TINY, Running, a_replica

# As SmolLM2: contents are appended to texts, and calls are not shown.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are SmolLM<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen2.5: calls in <tool_call>, results in <tool_response> of a user's turn, which takes the results that follow.
QWEN = (
    "{%- if tools %}<|im_start|>system\n# Tools\n{%- for tool in tools %}\n{{ tool | tojson }}{%- endfor %}<|im_end|>\n"
    "{%- endif %}{%- for message in messages %}"
    "{%- if message.role == 'user' or message.role == 'system' or (message.role == 'assistant' and"
    " not message.tool_calls) %}\n{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>' + message.role }}"
    "{%- if message.content %}{{- '\n' + message.content }}{%- endif %}"
    "{%- for tool_call in message.tool_calls %}{%- set tool_call = tool_call.function %}"
    '{{- \'\n<tool_call>\n{"name": "\' }}{{- tool_call.name }}{{- \'", "arguments": \' }}'
    "{{- tool_call.arguments | tojson }}{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# As DeepSeek-V3: a message without a content is one that calls tools.
DEEPSEEK = (
    "{% for message in messages %}{% if message['role'] == 'assistant' and message['content'] is none %}"
    "{% for call in message['tool_calls'] %}[call {{ call['function']['name'] }}]{% endfor %}"
    "{% else %}[{{ message['content'] }}]{% endif %}{% endfor %}"
)
# As Gemma and many more: the content goes through a filter, which makes the word None of None.
TRIMMING = "{% for message in messages %}[{{ message['content'] | trim }}]{% endfor %}"

CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Bern"}'}}
LOOP: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL | {"id": "call_2"}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
    {"role": "tool", "tool_call_id": "call_2", "content": "None of it rains."},
]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALLS = '<tool_call>\n{"name": "weather", "arguments": {"place": "Bern"}}\n</tool_call>\n' * 2
RENDERED = {
    SMOLLM2: (
        "<|im_start|>system\nYou are SmolLM<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\nSunny.<|im_end|>\n"
        "<|im_start|>tool\nNone of it rains.<|im_end|>\n<|im_start|>assistant\n"
    ),
    QWEN: (
        "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n" + CALLS.removesuffix("\n") + "<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nSunny.\n</tool_response>\n"
        "<tool_response>\nNone of it rains.\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    ),
    DEEPSEEK: "[Weather?][call weather][call weather][Sunny.][None of it rains.]",
    TRIMMING: "[Weather?][][Sunny.][None of it rains.]",
}


@pytest.mark.capability("API-11")
@pytest.mark.parametrize("template", RENDERED, ids=["smollm2", "qwen", "deepseek", "trimming"])
def test_templates_of_published_models_render_a_tool_loop_without_text(template: str):
    messages = [ChatMessage.model_validate(message) for message in LOOP]

    rendered = ChatTemplate(template, {}).render(messages)

    assert rendered == RENDERED[template]


def test_a_template_shows_the_tools_beside_the_loop():
    messages = [ChatMessage.model_validate(message) for message in LOOP]

    rendered = ChatTemplate(QWEN, {}).render(messages, tools=[Tool.model_validate(WEATHER)])

    assert rendered.startswith('<|im_start|>system\n# Tools{"type": "function", "function": {"name": "weather"')
    assert rendered.endswith(RENDERED[QWEN])


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def replica() -> AsyncIterator[Running]:
    async with a_replica(tokenizer=load_tokenizer(TINY, chat_template=SMOLLM2)) as running:
        yield running


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.capability("API-1", "API-18")
async def test_all_three_apis_continue_a_loop_whose_call_has_no_text(replica: Running):
    items = [
        {"role": "user", "content": "Weather?"},
        *({"type": "function_call", "call_id": id, "name": "weather", "arguments": "{}"} for id in ("c1", "c2")),
        {"type": "function_call_output", "call_id": "c1", "output": "Sunny."},
        {"type": "function_call_output", "call_id": "c2", "output": "None of it rains."},
    ]
    blocks = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": i, "name": "weather", "input": {}} for i in "12"]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "Sunny."},
                {"type": "tool_result", "tool_use_id": "2", "content": [{"type": "text", "text": "None of it rains."}]},
            ],
        },
    ]
    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    async with anthropic.AsyncAnthropic(base_url=replica.url, api_key="none", max_retries=0, http_client=http) as other:
        chat = await replica.openai.chat.completions.create(model="tiny", messages=LOOP, max_tokens=4)
        response = await replica.openai.responses.create(model="tiny", input=items, max_output_tokens=4)
        message = await other.messages.create(model="tiny", messages=blocks, max_tokens=4)
        counted = await other.messages.count_tokens(model="tiny", messages=blocks)
    input_tokens = await replica.openai.responses.input_tokens.count(model="tiny", input=items)

    assert chat.usage is not None
    assert response.usage is not None
    assert input_tokens.object == "response.input_tokens"
    cached = message.usage.cache_read_input_tokens or 0
    prompts = [chat.usage.prompt_tokens, response.usage.input_tokens, message.usage.input_tokens + cached]
    assert {*prompts, counted.input_tokens, input_tokens.input_tokens} == {prompts[0]}
