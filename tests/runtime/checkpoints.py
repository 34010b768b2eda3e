"""Random checkpoints in the shapes of real families, with the `transformers` model that is the oracle for each."""

from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

_SMALL = {
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
# Their configuration classes fill in what a file leaves out.
OTHER_FAMILIES = (
    *("gemma", "ministral", "ministral3", "cwm", "seed_oss", "granite", "olmo2", "olmo3"),
    *("exaone4", "ernie4_5", "helium", "glm", "glm4"),
)
_FAMILIES: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "smollm3": SmolLM3Config,
    "phi3": Phi3Config,
    "gemma2": Gemma2Config,
    "gemma3_text": Gemma3TextConfig,
    "mixtral": MixtralConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "gpt_oss": GptOssConfig,
}


def a_checkpoint(path: Path, family: str = "llama", *, seed: int = 0, **shape: object) -> PreTrainedModel:
    """Write a random checkpoint to `path`; every tensor is random, biases and norms too."""
    torch.manual_seed(seed)
    config = (
        AutoConfig.for_model(family, **{**_SMALL, **shape})
        if family in OTHER_FAMILIES
        else _FAMILIES[family](**{**_SMALL, **shape})
    )
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
