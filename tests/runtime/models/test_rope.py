"""Every way to stretch positions turns heads as `transformers` turns them, far beyond the trained context too."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slipway_runtime.layers.rotary import Rotary, inverse_frequencies
from slipway_runtime.models.config import parse_config

CPU = torch.device("cpu")
BASE = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 512, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 4, "max_position_embeddings": 4096,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 1024}
VARIANTS = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
    "llama3": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 2048},
    "yarn": YARN,
    "yarn of a large theta": {**YARN, "rope_theta": 1e6, "factor": 40.0},
    "yarn that is not rounded": {**YARN, "truncate": False},
    "yarn with other bounds": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn with equal bounds, as Kimi K2": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0},
    "llama3 with equal bounds, as Llama 4": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
        "original_max_position_embeddings": 64},
    "yarn with its own sharpness": {**YARN, "attention_factor": 0.9},
    "yarn with mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn with half of mscale": {**YARN, "mscale": 1.0},
    "yarn that shrinks": {**YARN, "factor": 0.5},
    "yarn of a short training": {**YARN, "original_max_position_embeddings": 4},
}  # fmt: skip


@pytest.mark.capability("ST-9")
@pytest.mark.parametrize("name", VARIANTS)
def test_frequencies_and_sharpness_equal_transformers(name):
    config = parse_config({**BASE, "rope_parameters": VARIANTS[name]})
    theirs, sharpness = ROPE_INIT_FUNCTIONS[VARIANTS[name]["rope_type"]](
        LlamaConfig(**{**BASE, "rope_parameters": dict(VARIANTS[name])}), CPU
    )
    ours = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    torch.testing.assert_close(ours, theirs)
    assert config.rope_scaling.attention_scale == pytest.approx(sharpness)


@pytest.mark.capability("ST-9")
def test_the_table_reaches_to_the_end_of_the_stretched_context():
    config = parse_config({**BASE, "rope_parameters": {**YARN, "original_max_position_embeddings": 4096}})
    rotary = Rotary(config.head_dim, config.rope_theta, config.rope_scaling, config.max_position, torch.float32, CPU)
    cos, sin = rotary(torch.tensor([16_383]))
    angle = 16_383 * inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    sharp = config.rope_scaling.attention_scale
    torch.testing.assert_close(cos[0, 0, :64], angle.cos() * sharp, atol=2e-3, rtol=0)
    torch.testing.assert_close(sin[0, 0, 64:], angle.sin() * sharp, atol=2e-3, rtol=0)
    with pytest.raises(IndexError):
        rotary(torch.tensor([16_384]))


@pytest.mark.capability("API-28")
@pytest.mark.parametrize(
    "block",
    [
        {"rope_type": "default"},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ],
    ids=lambda block: block["rope_type"],
)
def test_queries_scaled_by_position_limit_the_context_whatever_the_rope_type(block):
    """review/engine.md F1: with rope_type default the limit was that of the file, and tokens beyond were wrong."""
    scaled = {"rope_theta": 1e6, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}
    config = parse_config({
        "model_type": "ministral3", "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "head_dim": 12,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "rope_parameters": {**scaled, **block},
    })  # fmt: skip
    assert config.max_position == 16
