"""A checkpoint that writes scripts: whole loops of agents run with real programs, and every byte is known in advance.

Its weights are a bigram made by hand: after each token of a script comes the next one. The chat template chooses the
script by its first token: the call of the first tool in `CALLS` that the request offers, and after the
result of a call the sentence `ANSWER`. The grammar of forced calls works too: digits and brackets are likely enough.
"""

import json
import shutil
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

TINY: Final = Path(__file__).parents[1] / "models" / "tiny"
ANSWER: Final = "The weather in Paris is sunny today, 21 degrees."
# The name of a tool -> the arguments with which the model calls it. Programs name their shells in different ways.
CALLS: Final[dict[str, dict[str, Any]]] = {
    "get_weather": {"city": "Paris"},
    "team__get_weather": {"city": "Bern"},  # a function of the namespace `team`
    "exec_command": {"cmd": "echo slipway-codex > proof.txt"},  # Codex
    "shell": {"command": ["sh", "-c", "echo slipway-codex > proof.txt"]},  # Codex, an older name
    "Bash": {"command": "echo slipway-claude > proof.txt", "description": "Write a word"},  # Claude Code
    "bash": {"command": "echo slipway-opencode > proof.txt", "description": "Write a word"},  # opencode
}
CONTEXT: Final = 131_072
_FIRST: Final = 3072  # the vocabulary of the tiny model; the tokens of scripts come after it
_ROOM: Final = 64
_HIDDEN: Final = 256
_END: Final = 2


def write_checkpoint(folder: Path) -> Path:
    """Write the checkpoint, in the Hermes form of calls, and return its folder."""
    shutil.copytree(TINY, folder, dirs_exist_ok=True)
    scripts = {"answer": ANSWER} | {
        name: f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in CALLS.items()
    }
    after, added = _tokens(scripts)
    _update(folder / "tokenizer.json", lambda whole: whole["added_tokens"].extend(added))
    # A window makes prompts of agents cheap: tens of thousands of tokens of tools.
    window = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 64}
    size = window | {"vocab_size": _FIRST + _ROOM, "num_hidden_layers": 1, "max_position_embeddings": CONTEXT}
    _update(folder / "config.json", lambda whole: whole.update(size, tie_word_embeddings=False, dtype="float32"))
    _update(folder / "tokenizer_config.json", lambda whole: whole.update(model_max_length=CONTEXT))
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
    )
    (folder / "chat_template.jinja").write_text(_template())
    save_file(_weights(after), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _tokens(scripts: dict[str, str]) -> tuple[dict[int, int], list[dict[str, Any]]]:
    """The token that follows each token of a script, and the tokens to add: a start and two halves for each script."""
    after: dict[int, int] = {}
    added: list[dict[str, Any]] = []

    def add(content: str, *, special: bool) -> int:
        token = {"id": _FIRST + len(added), "content": content, "special": special}
        added.append(token | {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False})
        return int(token["id"])

    for name, text in scripts.items():
        before = add(_start(name), special=True)
        half = len(text) // 2 + 1
        for piece in (text[:half], text[half:]):
            after[before] = add(piece, special=False)
            before = after[before]
        after[before] = _END
    while len(added) < _ROOM:
        add(f"<|unused {len(added)}|>", special=True)
    return after, added


def _weights(after: dict[int, int]) -> dict[str, torch.Tensor]:
    """One layer that adds nothing: the logits are the product of the last token's embedding and the output matrix."""
    noise = torch.Generator().manual_seed(3)
    size = _FIRST + _ROOM
    embedding = (torch.randint(0, 2, (size, _HIDDEN), generator=noise) * 2 - 1).float()
    output = torch.randn(size, _HIDDEN, generator=noise) * 0.02
    embedding[:, 0], output[:, 0] = 1, 0
    for token, following in after.items():
        output[following, 1:] += embedding[token, 1:] * 0.2
    # Without a script: what ends an answer, a text and the parts of JSON, from the likeliest down.
    words = json.loads((TINY / "tokenizer.json").read_text())["model"]["vocab"]
    for token, weight in {_END: 6.0, words["}"]: 5.5, words["]"]: 5.5, words['"']: 5.0, words["1"]: 4.0}.items():
        output[token, 0] = weight
    layer = "model.layers.0."
    shapes = {
        "self_attn.q_proj": (256, _HIDDEN), "self_attn.k_proj": (128, _HIDDEN), "self_attn.v_proj": (128, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, 256), "mlp.gate_proj": (512, _HIDDEN), "mlp.up_proj": (512, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, 512),
    }  # fmt: skip
    norms = ("model.norm", f"{layer}input_layernorm", f"{layer}post_attention_layernorm")
    return {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": output,
        **{f"{name}.weight": torch.ones(_HIDDEN) for name in norms},
        **{f"{layer}{name}.weight": torch.zeros(shape) for name, shape in shapes.items()},
    }


def _start(name: str) -> str:
    return f"<|script {name}|>"


def _template() -> str:
    """The chat template: tools, messages with calls, and the start of the script."""
    starts = "".join(
        f"{{% if t.function.name == {name!r} %}}{{% set ns.start = {_start(name)!r} %}}{{% endif %}}" for name in CALLS
    )
    return (
        "{{ bos_token }}{% if tools %}<|system|>Tools, to be called inside <tool_call> and </tool_call>: "
        "{% for t in tools %}{{ t | tojson }}{% endfor %}<|end|>{% endif %}"
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('A system message has to be the first message.') }}{% endif %}"
        "{{ '<|' + m.role + '|>' }}{% if m.content %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}"
        "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>"
        f"{{% set ns = namespace(start={_start('answer')!r}) %}}"
        "{% if tools and messages[-1].role != 'tool' %}{% for t in tools %}"
        f"{starts}{{% endfor %}}{{% endif %}}{{{{ ns.start }}}}{{% endif %}}"
    )


def _update(file: Path, change: Any) -> None:
    whole = json.loads(file.read_text())
    change(whole)
    file.write_text(json.dumps(whole, ensure_ascii=False))
