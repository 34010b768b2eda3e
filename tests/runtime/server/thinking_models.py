"""The tiny model with chat templates of models that think, and with a script that says what it answers.

The engine computes as always; a grammar that the server does not know of makes it say the script, token by token.
"""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from slipway_runtime.engine.stream import OutputStream
from slipway_runtime.messages import Grammar, Request
from slipway_runtime.server.tokenizer import TokenizerFiles, load_tokenizer
from tests.runtime.server.serving import TINY, Running

# As Qwen3's, abridged: tools and calls, the reasoning of earlier messages, and a switch.
QWEN3 = (
    "{{ bos_token }}{% if tools %}<|system|>Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "Call as <tool_call>...</tool_call>.<|end|>{% endif %}"
    "{% for message in messages %}{{ '<|' + message.role + '|>' }}"
    "{% if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ message.content or '' }}{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% endif %}"
)
# As DeepSeek-R1's: the generation prompt opens the tag.
DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message.role + '|>' + message.content.split('</think>')[-1] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif %}"
)
# As gpt-oss's, abridged: tools, calls on the channel commentary, and no content beside the thoughts of a call.
GPT_OSS = (
    "{% if tools %}<|start|>developer<|message|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "<|end|>{% endif %}{% for message in messages %}{% if message.role == 'assistant' and message.tool_calls %}"
    "{% if message.content and message.thinking %}"
    "{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}"
    "{% if message.content or message.thinking %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + (message.content or message.thinking) + '<|end|>' }}"
    "{% endif %}"
    "{% set call = message.tool_calls[0].function %}"
    "{{ '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{ call.arguments | tojson }}<|call|>"
    "{% elif message.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# The special tokens of the tiny model -> those of gpt-oss. Ids 2 and 5 end an answer, as in its generation_config.
_OF_GPT_OSS = {
    "<|pad|>": "<|constrain|>", "<|bos|>": "<|start|>", "<|end|>": "<|return|>", "<|system|>": "<|channel|>",
    "<|user|>": "<|message|>", "<|assistant|>": "<|call|>", "<|tool|>": "<|end|>",
}  # fmt: skip
_SPECIAL = re.compile(r"(<\|[a-z]+\|>)")


def with_template(template: str) -> TokenizerFiles:
    return load_tokenizer(TINY, chat_template=template)


def gpt_oss_checkpoint(folder: Path) -> Path:
    """A checkpoint with the tiny model's weights and gpt-oss's special tokens and chat template."""
    shutil.copytree(TINY, folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(re.sub(r"<\|[a-z]+\|>", lambda found: _OF_GPT_OSS[found[0]], text))
    (folder / "chat_template.jinja").write_text(GPT_OSS)
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": [2, 5]}))
    return folder


@contextmanager
def saying(replica: Running, script: str) -> Iterator[list[Request]]:
    """Answers to requests without a grammar are the script; the requests that the engine got are noted."""
    pieces = (piece for piece in _SPECIAL.split(script) if piece)
    said = " ".join(piece if _SPECIAL.fullmatch(piece) else json.dumps(piece) for piece in pieces)
    grammar = Grammar(kind="lark", text=f"%llguidance {{}}\nstart: {said}\n")
    generate, requests = replica.client.generate, []

    def generate_script(request: Request) -> OutputStream:
        requests.append(request)
        return generate(request if request.grammar else msgspec.structs.replace(request, grammar=grammar))

    replica.client.generate = generate_script  # type: ignore[method-assign]  the seam between server and engine
    try:
        yield requests
    finally:
        del replica.client.generate
