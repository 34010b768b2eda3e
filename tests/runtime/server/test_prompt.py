"""Prompts are written as the model was trained to read them: exactly as `transformers` would."""

import asyncio
import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from slipway_runtime.server.chat_types import ChatMessage, Tool
from slipway_runtime.server.errors import ApiError
from slipway_runtime.server.prompt import ChatTemplate, PromptEncoder
from slipway_runtime.server.tokenizer import TokenizerMismatch, load_tokenizer
from tests.runtime.server.serving import TINY, tiny_tokenizer

THREADS = ThreadPoolExecutor(1)
TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=30)


@cache
def transformers_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


def encoder(template: str = "") -> PromptEncoder:
    files = load_tokenizer(TINY, chat_template=template) if template else tiny_tokenizer()
    return PromptEncoder(files, max_model_len=2048, threads=THREADS)


@pytest.mark.capability("API-11")
@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXT), min_size=1, max_size=4), st.booleans()
)
def test_a_chat_has_the_ids_that_transformers_gives_it(turns: list[tuple[str, str]], generate: bool):
    messages = [{"role": role, "content": content} for role, content in turns]
    theirs = transformers_tokenizer().apply_chat_template(messages, add_generation_prompt=generate, return_dict=True)

    ours = asyncio.run(encoder().chat([ChatMessage(**m) for m in messages], add_generation_prompt=generate))

    assert list(ours.token_ids) == theirs["input_ids"]


@settings(deadline=None)
@given(TEXT)
def test_a_text_has_the_ids_that_transformers_gives_it(text: str):
    assert list(asyncio.run(encoder().text(text)).token_ids) == transformers_tokenizer()(text)["input_ids"]


TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}{{ m.role | upper }}: {{ m['content'] | trim }}\n{% endfor %}",
    "{%- for m in messages -%}\n  {%- if loop.first and m.role == 'system' -%}\n{{ m.content }}{% continue %}\n"
    "  {%- endif %}\n{{ m | tojson }}{% if loop.last %}{% break %}{% endif %}\n{%- endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}<{{ m.content }}>{% endif %}{% endfor %}{% if add_generation_prompt %}go{{ eos_token }}{% endif %}",
    "{% if tools %}tools{% endif %}{% if not documents %}none{% endif %}{{ mood | default('calm') }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_of_other_models_render_as_in_transformers(template: str):
    messages = [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "<b>é & ü</b>"},
        {"role": "assistant", "content": "Yes."},
    ]
    theirs = transformers_tokenizer().apply_chat_template(
        messages, chat_template=template, add_generation_prompt=True, tokenize=False, mood="wild"
    )

    ours = encoder(template).template.render([ChatMessage(**m) for m in messages], arguments={"mood": "wild"})

    assert ours == theirs


def test_a_template_that_refuses_says_why_and_gives_nothing_away():
    refusing = encoder("{{ raise_exception('only users may speak') }}")
    with pytest.raises(ApiError) as refusal:
        refusing.template.render([ChatMessage(role="user", content="secret")])

    assert refusal.value.status == 400
    assert "only users may speak" in refusal.value.message


def test_a_template_cannot_leave_its_sandbox():
    for template in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"):
        with pytest.raises(ApiError):
            encoder(template).template.render([ChatMessage(role="user", content="x")])


def test_a_model_without_a_template_takes_no_chats(tmp_path: Path):
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    bare = PromptEncoder(load_tokenizer(tmp_path), max_model_len=2048, threads=THREADS)

    with pytest.raises(ApiError) as refusal:
        bare.template.render([ChatMessage(role="user", content="x")])

    assert "/v1/completions" in refusal.value.message


@pytest.mark.capability("PF-12")
def test_the_digest_covers_tokenizer_and_template_and_a_mismatch_refuses(tmp_path: Path):
    shutil.copytree(TINY, tmp_path / "m")
    files = load_tokenizer(tmp_path / "m")
    raw = (TINY / "tokenizer.json").read_bytes() + (TINY / "chat_template.jinja").read_bytes()
    assert files.sha256 == hashlib.sha256(raw).hexdigest()

    assert load_tokenizer(tmp_path / "m", expected_sha256=f"sha256:{files.sha256}").sha256 == files.sha256
    (tmp_path / "m" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(TokenizerMismatch, match="refusing to start"):
        load_tokenizer(tmp_path / "m", expected_sha256=files.sha256)


def test_templates_are_found_where_checkpoints_keep_them(tmp_path: Path):
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    config = tmp_path / "tokenizer_config.json"

    config.write_text(json.dumps({"chat_template": "one", "bos_token": {"content": "<b>"}, "eos_token": "<e>"}))
    single = load_tokenizer(tmp_path)
    config.write_text(
        json.dumps({"chat_template": [{"name": "tools", "template": "t"}, {"name": "default", "template": "two"}]})
    )
    several = load_tokenizer(tmp_path)

    assert single.chat_template == "one"
    assert single.special_tokens == {"bos_token": "<b>", "eos_token": "<e>"}
    assert several.chat_template == "two"
    assert load_tokenizer(tmp_path, chat_template="inline").chat_template == "inline"


@pytest.mark.parametrize("kept_in", ["list", "folder"])
def test_a_template_named_tool_use_is_used_for_requests_with_tools(tmp_path: Path, kept_in: str):
    """review/api-users.md 12."""
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    plain = "plain {{ image_token }}"
    with_tools = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    if kept_in == "list":
        named = [{"name": "default", "template": plain}, {"name": "tool_use", "template": with_tools}]
        config = {"chat_template": named}
    else:
        config = {}
        (tmp_path / "chat_template.jinja").write_text(plain)
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(with_tools)
    config["extra_special_tokens"] = {"image_token": "<image>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    files = load_tokenizer(tmp_path)
    template = ChatTemplate(files.chat_template, files.special_tokens, tool_source=files.tool_template)
    function = {"strict": True, "name": "f", "parameters": {"type": "object"}, "description": "d"}
    tool = Tool.model_validate({"type": "function", "function": function})
    messages = [ChatMessage(role="user", content="x")]

    assert template.render(messages) == "plain <image>"
    assert json.loads(template.render(messages, tools=[tool]))["function"] == function
    assert list(json.loads(template.render(messages, tools=[tool]))["function"]) == list(function), "in their order"
    assert template.shows_tools


def test_no_prompt_shorter_than_the_context_is_refused_by_its_bytes():
    longest = max(tiny_tokenizer().tokenizer.get_vocab(), key=lambda piece: len(piece.encode()))
    assert tiny_tokenizer().longest_token >= len(longest)
    dense = " Kubernetes" * 900

    assert 0 < len(asyncio.run(encoder().text(dense)).token_ids) < 2048


HERMES = (
    "{%- if tools %}<|system|># Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|end|>{% endif %}"
    "{%- for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The <weather> of a place & its days",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
]


@pytest.mark.capability("API-11")
def test_tools_and_calls_render_as_in_transformers():
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"place": "Zürich"}}}
    theirs_messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "Sunny", "tool_call_id": "c1"},
    ]
    theirs = transformers_tokenizer().apply_chat_template(
        theirs_messages, tools=TOOLS, chat_template=HERMES, add_generation_prompt=True, tokenize=False
    )

    as_text = call | {"function": {"name": "weather", "arguments": json.dumps({"place": "Zürich"})}}
    messages = [ChatMessage.model_validate(m) for m in theirs_messages if m["role"] != "assistant"]
    messages.insert(1, ChatMessage.model_validate({"role": "assistant", "tool_calls": [as_text]}))
    ours = encoder(HERMES).template.render(messages, tools=[Tool.model_validate(tool) for tool in TOOLS])

    assert ours == theirs


@pytest.mark.capability("API-11")
@pytest.mark.parametrize("template", [TEMPLATES[0], HERMES, "{% for m in messages %}{{ m.content }}|{% endfor %}"])
@pytest.mark.parametrize("final", ["A pod is", "A pod is "])
def test_a_message_is_continued_as_in_transformers(template: str, final: str):
    messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": final}]
    theirs = transformers_tokenizer().apply_chat_template(
        messages, chat_template=template, continue_final_message=True, tokenize=False
    )

    ours = encoder(template).template.render(
        [ChatMessage.model_validate(m) for m in messages], add_generation_prompt=False, continue_final_message=True
    )

    assert ours == theirs
