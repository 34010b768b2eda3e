"""A config.json with the old and the new name of a key: computed as transformers computes it, or refused.

review/api-users.md 3: `rope_scaling` beside `rope_parameters` was ignored.
"""

import itertools
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from slipway_runtime.layers.rotary import inverse_frequencies
from slipway_runtime.models.config import ModelConfig, ModelRefusedError, parse_config
from tests.runtime.models.test_config import LLAMA

pytestmark = pytest.mark.capability("ST-9")

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"type": "linear", "factor": 2.0}
NEW: list[dict[str, Any] | None] = [
    None,
    {},
    {"rope_type": "default", "rope_theta": 10_000.0},
    {"rope_type": "default", "rope_theta": 5e5},
    {**YARN, "factor": 2.0, "rope_theta": 5e5},
]
OLD: list[dict[str, Any] | None] = [None, {}, LINEAR, YARN, {**YARN, "rope_theta": 2e5}]
OUTER: list[dict[str, Any]] = [{}, {"rope_theta": 3e5}, {"original_max_position_embeddings": 128}]


def read(model_type: str, *, new: object, old: object, outer: dict[str, Any]) -> ModelConfig | None:
    """None: refused."""
    raw = {**LLAMA, "model_type": model_type, "num_attention_heads": 8, "rope_parameters": new, "rope_scaling": old}
    raw = {key: value for key, value in {**raw, **outer}.items() if value is not None}
    try:
        return parse_config(raw)
    except ModelRefusedError:
        return None


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral"])
def test_positions_are_those_of_transformers_or_the_file_is_refused(model_type: str):
    computed = 0
    for new, old, outer in itertools.product(NEW, OLD, OUTER):
        ours = read(model_type, new=new, old=old, outer=outer)
        if ours is None:
            continue
        computed += 1
        given = {"rope_parameters": new, "rope_scaling": old, **outer}
        given = {key: dict(value) if isinstance(value, dict) else value for key, value in given.items()}
        theirs = CONFIG_MAPPING[model_type](
            hidden_size=64, num_attention_heads=8, num_hidden_layers=2, head_dim=8, max_position_embeddings=256,
            **{key: value for key, value in given.items() if value is not None},
        )  # fmt: skip
        rotary = LlamaRotaryEmbedding(theirs)
        frequencies = inverse_frequencies(8, ours.rope_theta, ours.rope_scaling)
        assert torch.allclose(frequencies.float(), rotary.inv_freq, rtol=1e-5), (new, old, outer)
        assert ours.rope_scaling.attention_scale == pytest.approx(rotary.attention_scaling), (new, old, outer)
    assert computed > 40


def test_a_theta_that_only_the_replaced_block_has_is_not_lost_silently():
    new = {"rope_type": "default", "rope_theta": 1e6}
    with pytest.raises(ModelRefusedError, match=r"whose rope_theta 1000000\.0 it lacks; repeat rope_theta"):
        parse_config({**LLAMA, "rope_parameters": new, "rope_scaling": YARN})
    config = parse_config({**LLAMA, "rope_parameters": new, "rope_scaling": {**YARN, "rope_theta": 1e6}})
    assert (config.rope_scaling.kind, config.rope_theta, config.max_position) == ("yarn", 1e6, 256)


def test_two_counts_of_experts_that_differ_are_refused():
    moe = {**LLAMA, "model_type": "qwen3_moe", "num_experts_per_tok": 2, "num_local_experts": 8, "num_experts": 8,
           "moe_intermediate_size": 32}  # fmt: skip
    assert parse_config(moe).experts.count == 8
    with pytest.raises(ModelRefusedError, match="num_experts is 4 and num_local_experts is 8"):
        parse_config({**moe, "num_experts": 4})


def test_gemma_3_merges_both_blocks_as_transformers_does():
    gemma = {**LLAMA, "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 16,
             "query_pre_attn_scalar": 8, "sliding_window_pattern": 2}  # fmt: skip
    nested = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    linear = {"rope_type": "linear", "factor": 8.0}
    ours = parse_config({**gemma, "rope_parameters": nested, "rope_scaling": linear})
    theirs = CONFIG_MAPPING["gemma3_text"](
        hidden_size=64, num_attention_heads=8, num_hidden_layers=2, head_dim=8, max_position_embeddings=256,
        rope_parameters={key: dict(value) for key, value in nested.items()}, rope_scaling=dict(linear),
    )  # fmt: skip
    theirs.layer_types = ["full_attention", "sliding_attention"]
    frequencies = inverse_frequencies(8, ours.rope_theta, ours.rope_scaling).float()
    assert torch.allclose(frequencies, Gemma3RotaryEmbedding(theirs).full_attention_inv_freq, rtol=1e-5)
