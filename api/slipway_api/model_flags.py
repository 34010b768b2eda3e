"""Converts a `ModelSpec` to the flags of `slipway-runtime serve`: the operator writes them, the runtime parses them.

A flag is the name of its field. The fields of the first release are written wherever they have a value. Those that came
later are written only where they differ from their default, because a revision keeps its image, and an older one does
not know them (ADR 17).
"""

import json
from typing import Final

from slipway_api.runtime_api import ModelSpec
from slipway_api.runtime_spec import SpeculationMethod

FIRST_RELEASE: Final = (
    "served_name",
    "revision",
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "max_output_tokens",
    "kv_cache_bytes",
    "gpu_memory_utilization",
    "model_digest",
    "tokenizer_uri",
    "tokenizer_sha256",
    "chat_template",
)
LATER: Final = ("quantization", "kv_cache_dtype", "kv_cache_host_bytes", "task", "pooling")
OF_SPECULATION: Final = ("speculation", "speculation_max_tokens")
OF_ADAPTERS: Final = ("max_adapters", "max_cpu_adapters", "max_rank")


def model_flags(spec: ModelSpec) -> list[str]:
    """The flags of a model; its address is no flag."""
    flags = [part for name in FIRST_RELEASE if getattr(spec, name) not in (0, "") for part in _flag(spec, name)]
    if spec.sampling_defaults:
        flags += ["--sampling-defaults", json.dumps(dict(spec.sampling_defaults), separators=(",", ":"))]
    default = ModelSpec(uri=spec.uri)
    flags += [part for name in LATER if getattr(spec, name) != getattr(default, name) for part in _flag(spec, name)]
    if spec.deterministic:
        flags += ["--deterministic"]
    if spec.tensor_parallel_size > 1:
        flags += _flag(spec, "tensor_parallel_size")
    if spec.speculation is not SpeculationMethod.NONE:
        flags += [part for name in OF_SPECULATION for part in _flag(spec, name)]
        flags += _flag(spec, "draft_model_uri") if spec.draft_model_uri else []
    if spec.max_adapters:
        flags += [part for name in OF_ADAPTERS for part in _flag(spec, name)]
        flags += ["--lora-experts"] if spec.lora_experts else []
    # One flag each: together they could be longer than Linux lets one argument be.
    for prompt in spec.warm_prompts:
        one = prompt if isinstance(prompt, str) else [dict(message) for message in prompt]
        flags += ["--warm-prompts", json.dumps([one], ensure_ascii=False, separators=(",", ":"))]
    return flags


def _flag(spec: ModelSpec, name: str) -> list[str]:
    """`max_rank` as `--max-rank 16`; a value that looks like a flag is joined with `=`."""
    flag, value = "--" + name.replace("_", "-"), str(getattr(spec, name))
    return [f"{flag}={value}"] if value.startswith("-") else [flag, value]
