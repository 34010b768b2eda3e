"""Creates checkpoints with random weights in the shapes of real models: speed depends on shapes, not on weights.

They are made once, into the user's cache; the tokenizer is the embedded model's, since the answers are not read.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.servers import EMBEDDED_MODEL

SHAPES: Final[dict[str, dict[str, Any]]] = {
    "135m": {  # SmolLM2-135M
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rope_theta": 100000.0,
    },
    "0.6b": {  # Qwen3-0.6B
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1000000.0,
    },
}
_COMMON: Final = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def cache_directory() -> Path:
    """Where checkpoints and the peers' environments stay between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipway" / "bench"


def checkpoint(shape: str) -> Path:
    """The folder of the random checkpoint in this shape; written at the first call (bfloat16, seeded)."""
    folder = cache_directory() / shape
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from safetensors.torch import save_file

    config = _COMMON | SHAPES[shape]
    torch.manual_seed(0)
    tensors = {
        name: (torch.ones(size) if len(size) == 1 else torch.randn(size) * 0.02).to(torch.bfloat16)
        for name, size in _tensors(config).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, folder / name)
    save_file(tensors, folder / "unfinished", metadata={"format": "pt"})
    (folder / "unfinished").rename(folder / "model.safetensors")
    return folder


def adapter(shape: str, number: int, *, rank: int, modules: Sequence[str]) -> Path:
    """The folder of a random adapter for this shape, in PEFT's layout; written at the first call."""
    folder = cache_directory() / f"{shape}-adapters" / f"{number}-r{rank}-{'-'.join(modules)}"
    if (folder / "adapter_model.safetensors").exists():
        return folder
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(number)
    tensors = {}
    for name, (out, size) in _matrices(_COMMON | SHAPES[shape]).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in modules:
            tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, size) * 0.02
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(out, rank) * 0.02
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(modules)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def linear_sizes(shape: str) -> list[tuple[int, int]]:
    """(out, in) of each linear of one step, merged as the runtime merges them; the output layer comes last."""
    config = SHAPES[shape]
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = [(q + 2 * kv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner)]
    return layer * config["num_hidden_layers"] + [(config["vocab_size"], hidden)]


def _matrices(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {name: (size[0], size[1]) for name, size in _tensors(config).items() if len(size) == 2 and "layers" in name}


def _tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        sizes |= {
            f"{layer}.self_attn.q_proj.weight": (q, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, q),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
        }
        if config["model_type"] == "qwen3":
            sizes |= {f"{layer}.self_attn.{part}_norm.weight": (head,) for part in "qk"}
    return sizes | {"model.norm.weight": (hidden,)}
