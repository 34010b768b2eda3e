"""Random checkpoints in the shapes of real families, with the `transformers` model that is the oracle for each."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_WINDOWS = {"sliding_window": 9, "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}  # fmt: skip
# Families that are compared with `transformers` in every way: name of a shape -> model_type, and its peculiar keys.
OTHER_FAMILIES = {
    "gemma": ("gemma", {"head_dim": 12}),
    "ministral": ("ministral", {**_WINDOWS, "head_dim": 12}),
    "ministral3 within its trained context": ("ministral3", {"head_dim": 12, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0, "original_max_position_embeddings": 192,
        "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "cwm": ("cwm", {**_WINDOWS, "head_dim": 12}),
    "seed_oss": ("seed_oss", {"head_dim": 12, "attention_bias": True, "attention_out_bias": False}),
    "seed_oss with a bias of o": ("seed_oss", {"head_dim": 12, "attention_out_bias": True}),
    "granite": ("granite", {"embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 0.22,
                            "logits_scaling": 8.0}),
    "granite with tied embeddings": ("granite", {"tie_word_embeddings": True, "residual_multiplier": 0.5}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {**_WINDOWS}),
    "olmo3 with stretched positions": ("olmo3", {**_WINDOWS, "rope_parameters": {
        "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "attention_factor": 1.2,
                           "original_max_position_embeddings": 16},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}}),
    "exaone4": ("exaone4", {**_WINDOWS}),
    "exaone4 without a window": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "ernie4_5": ("ernie4_5", {"head_dim": 12, "use_bias": True, "tie_word_embeddings": False}),
    "helium": ("helium", {"head_dim": 12}),
    "glm": ("glm", {"head_dim": 16}),
    "glm4": ("glm4", {"head_dim": 16, "attention_bias": True}),
}  # fmt: skip


def a_checkpoint(path: Path, family: str = "llama", *, seed: int = 0, **shape: object) -> PreTrainedModel:
    """Write a random checkpoint to `path`; every tensor is random, biases and norms too."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SMALL, **shape})
    return save_random(AutoModelForCausalLM.from_config(config, attn_implementation="eager"), path)


def save_random(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    """Give every tensor of a model random numbers, and write it to `path`."""
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2 if parameter.ndim < 2 else 0.3)
    model.generation_config.do_sample = False
    model.save_pretrained(path, safe_serialization=True)
    return model


def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """What `transformers` generates, ignoring end-of-sequence tokens."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return out[0, len(prompt) :].tolist()
