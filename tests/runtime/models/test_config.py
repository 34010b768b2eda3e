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
        ({"model_type": "mamba"}, "model_type is 'mamba': this engine runs llama"),
        ({"num_local_experts": 8}, "does not know: num_local_experts"),
        ({"kv_lora_rank": 512, "q_lora_rank": 8}, "does not know: kv_lora_rank, q_lora_rank"),
        ({"attn_logit_softcapping": 50.0}, "does not know: attn_logit_softcapping"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({"pretraining_tp": 2}, "pretraining_tp is 2"),
        ({"quantization_config": "awq"}, "quantization_config is 'awq'; an object is needed"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4.0}}, "rope_type 'ntk' is not supported; default,"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "lacks short_factor"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "short_factor is not a list of 4 numbers",
        ),
        ({"rope_scaling": {"type": ["yarn"]}}, r"rope_type \['yarn'\] is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0, "beta_fast": 2}}, "'linear' with beta_fast is not"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0, "alpha": 2}}, "rope_type 'dynamic' with alpha is not"),
        ({"rope_parameters": {"rope_type": "default", "mscale": 1.0}}, "with mscale is not supported"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer"),
        ({"layer_types": ["full_attention"]}, "layer_types does not name each of the 2 layers"),
        ({"sliding_window": 64}, "sliding_window is 64; llama models have no window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "has sliding_attention, and there is no sliding_"),
        (
            {"model_type": "mistral", "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
            "a mistral model whose layer_types mix",
        ),
        ({"head_dim": 15}, "heads have 15 dimensions: rotary positions turn pairs"),
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
    ("change", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 64}, [64, 64]),
        ({"model_type": "mistral", "sliding_window": None}, [None, None]),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, [None, None]),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, [None, 64]),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}, [64, 64]),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True}, [None, None]),  # 28, the default
        ({"model_type": "qwen3", "sliding_window": 64, "use_sliding_window": True,
          "layer_types": ["sliding_attention", "full_attention"]}, [64, None]),
        ({"model_type": "qwen3", "sliding_window": 64, "use_sliding_window": True,
          "layer_types": ["full_attention"] * 2}, [None, None]),
    ],
)  # fmt: skip
def test_a_window_belongs_to_the_layers_that_the_family_gives_it(change, windows):
    config = parse_config({**LLAMA, **change})
    assert [config.window_of(layer) for layer in range(2)] == windows
    assert (config.sliding_window is None) == (windows == [None, None])


@pytest.mark.capability("ST-9")
@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "default"}, 256),
        ({"rope_type": "linear", "factor": 4.0}, 1024),
        ({"rope_type": "dynamic", "factor": 4.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 4.0}, 1024),
        ({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}, 256),
    ],
)  # fmt: skip
def test_stretching_positions_gives_the_context_it_was_made_for(rope, context):
    assert parse_config({**LLAMA, "rope_scaling": rope}).max_position == context


def test_dynamic_scaling_is_plain_within_the_trained_context():
    config = parse_config({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 4.0}})
    assert config.rope_scaling == RopeScaling("default")


@pytest.mark.capability("ST-9")
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_hidden_layers": 10**30}, "num_hidden_layers is 10{30}; more than 1024 makes no"),
        ({"hidden_size": 10**5000}, "hidden_size is a number of more than 38 digits; more than"),
        ({"vocab_size": 1 << 40}, "vocab_size is 1099511627776; more than"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings is 1000000000000; more than 16777216"),
        ({"num_attention_heads": 10**6}, "num_attention_heads is 1000000; more than 4096"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0; a positive whole number"),
        ({"num_key_value_heads": True}, "num_key_value_heads is True; a positive whole number"),
        ({"hidden_size": "64" * 1000}, r"hidden_size is '[64]{76}…; a positive whole number"),
        ({"hidden_size": 4, "num_attention_heads": 8}, "heads have 0 dimensions"),
        ({"rope_theta": float("nan")}, "rope_theta is nan; a number above 1 is needed"),
        ({"rope_theta": float("inf")}, "rope_theta is inf; a number above 1"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0; a number above 1"),
        ({"rope_theta": "1e4"}, "rope_theta is '1e4'; a number above 1"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0; a number above 0"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor is nan"),
        ({"rope_scaling": {"type": "linear"}}, "config.json lacks factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 3}},
         "high_freq_factor is 3; a number from low_freq_factor, 4, is needed"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "truncate": "no"}}, "truncate is 'no'; true or false"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; true or false"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id is neither a token id nor a short list"),
        ({"eos_token_id": list(range(1000))}, "eos_token_id is neither a token id nor a short list"),
        ({"model_type": ["llama"] * 10**6}, r"model_type is \['llama', 'llama', .{40,60}…: this engine"),
    ],
)  # fmt: skip
def test_values_that_make_no_sense_are_refused_before_anything_is_computed(change, sentence):
    with pytest.raises(ModelRefusedError, match=sentence):
        parse_config({**LLAMA, **change})


def test_a_missing_key_is_named():
    with pytest.raises(ModelRefusedError, match=r"config\.json lacks hidden_size"):
        parse_config({key: value for key, value in LLAMA.items() if key != "hidden_size"})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "config.json is not JSON"),
        ("[]", "holds no JSON object"),
        ("[" * 100_000, "config.json is not JSON"),
        ('{"vocab_size": ' + "1" * 100_000 + "}", "config.json is not JSON"),  # a number of too many digits
        (" " * (17 << 20), "config.json has 17825792 bytes: no configuration is that long"),
    ],
)
def test_a_broken_file_is_refused(text, sentence, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelRefusedError, match=sentence):
        read_config(tmp_path)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelRefusedError, match=r"there is no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(tmp_path).vocab_size == 100


# Keys of published files without effect on the output tokens, by where they come from.
INERT = {
    "people and publishers": """is_llama_config unsloth_version unsloth_fixed comment_of_the_author
        conversation_template artifact_path transformers.js_config tokenizer_model_max_length max_sequence_length
        model_max_length seq_length active_since exact_name lineage rescaled_by statement""",
    "libraries that attend faster": """_flash_attn_2_enabled use_flash_attention use_flash_attn use_flash_attention_2
        flash_attention _attn_implementation_internal _experts_implementation use_sdpa_attention use_xformers_attention
        use_memory_efficient_attention use_liger_kernel use_fused_rms_norm fused_mlp _flash_attn_uses_top_left_mask""",
    "training": """activation_checkpointing activation_checkpointing_layers attn_pdrop attention_probs_dropout_prob
        hidden_dropout_prob classifier_dropout router_z_loss_coef max_grad_norm v_head_initializer_range
        embedding_init_std noisy_embedding_alpha neftune_noise_alpha lora_alpha lora_r loss_scale use_reentrant
        gradient_accumulation_steps z_loss_weight""",
    "several devices": """model_parallel tensor_parallel tensor_parallel_size tensor_model_parallel_size
        pipeline_parallel_size sequence_parallel expert_parallel_size fsdp ep_size""",
    "defaults of generate()": """output_scores output_logits num_logits_to_keep no_repeat_ngram_size
        encoder_no_repeat_ngram_size bad_words_ids forced_eos_token_id suppress_tokens diversity_penalty
        num_beam_groups remove_invalid_values exponential_decay_length_penalty""",
}


@pytest.mark.parametrize("key", [key for keys in INERT.values() for key in keys.split()])
def test_a_key_that_computes_nothing_does_not_keep_a_model_from_being_served(key):
    """Finding 5: SmolLM2 and fine-tunes by common tools have keys of their own."""
    assert parse_config(LLAMA | {key: "2024.9"}) == parse_config(LLAMA)


@pytest.mark.capability("ST-9")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("clip_qkv", 8.0),  # OLMo
        ("qk_clip", 100.0),
        ("swiglu_limit", 7.0),
        ("use_qk_norm", True),
        ("qk_layernorm", True),
        ("use_qkv_bias", True),
        ("bias", True),
        ("use_mrope", True),  # Qwen2-VL
        ("use_logn_attn", True),  # Qwen
        ("use_dynamic_ntk", True),
        ("dual_chunk_attention_config", {"chunk_size": 8192}),  # Qwen2.5-1M
        ("no_rope_layers", [1, 0]),
        ("rope_interleaved", True),
        ("attention_multiplier", 0.1),  # Granite
        ("embedding_multiplier", 12.0),
        ("logits_scaling", 8.0),
        ("logit_scale", 0.06),  # Cohere
        ("residual_multiplier", 0.2),
        ("scale_depth", 1.4),  # MiniCPM
        ("scale_emb", 12),
        ("use_parallel_residual", True),
        ("parallel_attn", True),
        ("activation_function", "gelu"),
        ("mlpActivation", "gelu"),
        ("layer_norm_eps", 1e-5),
        ("norm_type", "layernorm"),
        ("n_routed_experts", 64),
        ("num_kv_shared_layers", 10),
        ("attn_temperature_tuning", True),
        ("conv_L_cache", 3),  # LFM2
        ("ssm_cfg", {"layer": 1}),
        ("mamba_d_state", 16),
        ("vision_config", {"depth": 2}),
        ("mm_vision_tower", "clip"),  # LLaVA
        ("quantization", {"bits": 4, "group_size": 64}),  # MLX
        ("compression_config", {"format": "int-quantized"}),  # compressed-tensors before 0.6
        ("sparsity_config", {"format": "sparse-24-bitmask"}),
        ("use_bidirectional_attention", True),
        ("final_logit_softcapping", 30.0),
        ("num_nextn_predict_layers", 1),
    ],
)  # fmt: skip
def test_an_unknown_key_that_may_compute_is_refused_by_name(key, value):
    with pytest.raises(ModelRefusedError, match=f"asks for what this engine does not know: {key}"):
        parse_config(LLAMA | {key: value})


@pytest.mark.parametrize("value", [None, False, 0, [], {}, ""])
@pytest.mark.parametrize("key", ["use_mrope", "clip_qkv", "alibi", "cross_attention_hidden_size", "vision_config"])
def test_a_key_that_is_switched_off_computes_nothing(key, value):
    assert parse_config(LLAMA | {key: value}) == parse_config(LLAMA)


@pytest.mark.capability("ST-9")
def test_attention_in_both_directions_is_refused_however_it_is_spelled():
    """gte-Qwen2 switches causal attention off: false, which for other keys means that nothing is asked for."""
    assert parse_config(LLAMA | {"is_causal": True, "partial_rotary_factor": 1.0}) == parse_config(LLAMA)
    with pytest.raises(ModelRefusedError, match="is_causal is False; only True is supported"):
        parse_config(LLAMA | {"is_causal": False})


@pytest.mark.parametrize(("heads", "head_dim", "is_refused"), [(256, 64, False), (257, 2, True), (128, 256, True)])
def test_heads_that_share_a_key_value_head_are_bounded(heads, head_dim, is_refused):
    """review/engine.md F14: 4,096 heads on one overflowed the stack of compiled attention, at warm-up."""
    raw = LLAMA | {"num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": head_dim}
    if not is_refused:
        assert parse_config(raw).num_q_heads == heads
        return
    with pytest.raises(ModelRefusedError, match=f"{heads} attention heads of size {head_dim} share a key-value head"):
        parse_config(raw)
