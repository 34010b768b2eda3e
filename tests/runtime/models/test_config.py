"""Every key of config.json is honoured, known to be inert, or a reason to refuse with its name."""

import json

import pytest

from slipway_runtime.layers.rotary import RopeScaling
from slipway_runtime.models.config import ModelRefusedError, parse_config, read_config

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


def test_reads_the_shape():
    config = parse_config(LLAMA)
    assert (config.head_dim, config.num_kv_heads, config.tied_embeddings) == (8, 2, False)
    assert config.rope_scaling == RopeScaling("default")
    assert config.rope_theta == 10_000


def test_kv_memory_counts_key_value_heads_not_attention_heads():
    assert parse_config(LLAMA).kv_bytes_per_token(2) == 2 * 2 * 2 * 8 * 2


def test_end_of_sequence_tokens_come_from_both_files():
    assert parse_config(LLAMA, {"eos_token_id": [7, 9]}).eos_token_ids == (2, 7, 9)
    assert parse_config({**LLAMA, "eos_token_id": None}).eos_token_ids == ()


def test_old_and_new_spellings_of_rope_mean_the_same():
    block = {"factor": 4.0, "rope_type": "linear"}
    old = parse_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"factor": 4.0, "type": "linear"}})
    new = parse_config({**LLAMA, "rope_parameters": {**block, "rope_theta": 5e5}})
    assert old.rope_scaling == new.rope_scaling == RopeScaling("linear", factor=4.0)
    assert old.rope_theta == new.rope_theta == 5e5


@pytest.mark.capability("ST-9")
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "mixtral"}, "model_type is 'mixtral': this engine runs llama"),
        ({"num_local_experts": 8}, "does not know: num_local_experts"),
        ({"kv_lora_rank": 512, "q_lora_rank": 8}, "does not know: kv_lora_rank, q_lora_rank"),
        ({"attn_logit_softcapping": 50.0}, "does not know: attn_logit_softcapping"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({"pretraining_tp": 2}, "pretraining_tp is 2"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn' is not supported; default, linear"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "default", "mscale": 1.0}}, "with mscale is not supported"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of type linear_attention"),
        ({"num_key_value_heads": 3}, "8 attention heads cannot be shared by 3 key-value heads"),
        ({"vocab_size": None}, "vocab_size is None; a positive whole number"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(change, sentence):
    with pytest.raises(ModelRefusedError, match=sentence):
        parse_config({**LLAMA, **change})


@pytest.mark.capability("ST-9")
@pytest.mark.parametrize(
    ("change", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 64}, 64),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, None),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True}, 64),
        ({"model_type": "qwen3", "sliding_window": 64, "use_sliding_window": True, "layer_types": ["full_attention"]},
         None),
    ],
)  # fmt: skip
def test_a_sliding_window_bounds_the_context_where_it_is_used(change, window):
    assert parse_config({**LLAMA, **change}).sliding_window == window


def test_a_missing_key_is_named():
    with pytest.raises(ModelRefusedError, match=r"config\.json lacks hidden_size"):
        parse_config({key: value for key, value in LLAMA.items() if key != "hidden_size"})


@pytest.mark.parametrize(("text", "sentence"), [("{", "config.json is not JSON"), ("[]", "holds no JSON object")])
def test_a_broken_file_is_refused(text, sentence, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelRefusedError, match=sentence):
        read_config(tmp_path)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelRefusedError, match=r"there is no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(tmp_path).vocab_size == 100
