"""Warnings about weights that were quantized twice: each rounding costs quality, and evaluations of one miss the other.

| the checkpoint holds | its origin, by config.json   | requested | warning                            |
|----------------------|------------------------------|-----------|------------------------------------|
| codes                |                              | int8, fp8 | codes are rounded again            |
| codes                | a model in another format    |           | rounded numbers were rounded again |
| numbers              | a model in four bits (NF4 …) | int8, fp8 | the same                           |
| anything else        |                              |           | none                               |

A model that was tuned on NF4 weights (QLoRA) and merged into bfloat16 looks like any other: the only trace is the name
of its base model in config.json.
"""

import re
from typing import Final

from slipway_runtime.models.config import ModelConfig
from slipway_runtime.models.quantized_checkpoint import parse_quantization

_ORIGINS: Final = (
    ("bitsandbytes NF4", re.compile(r"bnb|nf4|4-?bit|qlora", re.IGNORECASE)),
    ("AWQ", re.compile(r"awq", re.IGNORECASE)),
    ("GPTQ", re.compile(r"gptq", re.IGNORECASE)),
    ("GGUF", re.compile(r"gguf|q4_k|q4_0", re.IGNORECASE)),
)


def name_of_format(config: ModelConfig, asked: str) -> str:
    """Display name of the weights' quantization: the requested one, else the format of the checkpoint."""
    form = parse_quantization(config.quantization)
    return asked if asked != "none" or form is None else form.name


def quantization_warnings(config: ModelConfig, asked: str) -> tuple[str, ...]:
    """Warnings, as sentences, about weights that were quantized more than once."""
    form = parse_quantization(config.quantization)
    own = "" if form is None or config.quantization is None else str(config.quantization["quant_method"])
    found = []
    if form is not None and asked != "none":
        found.append(
            f"the checkpoint is quantized ({own}, {form.name}) and --quantization {asked} rounds it again: "
            "leave it at none, or use a checkpoint in high precision"
        )
    if form is not None or asked != "none":
        last = asked if asked != "none" else own
        found.extend(
            f"the weights were made from {config.derived_from[:120]}, which looks like {name}, and are quantized again "
            f"({last}): start from the model in high precision"
            for name, words in _ORIGINS
            if words.search(config.derived_from) and name.lower() != own
        )
    return tuple(found)
