"""The keys of published config.json files are read as their authors meant them, without a published file at hand.

The keys and sizes were written from memory and could not be compared with the published files, because no hub was
within reach; `published/` has files of other families.
"""

import pytest

from slipway_runtime.models.config import ModelRefusedError, parse_config

_COMMON = {"initializer_range": 0.02, "use_cache": True, "torch_dtype": "bfloat16", "attention_dropout": 0.0}
FILES = {
    "c4ai-command-r-v01": {
        "architectures": ["CohereForCausalLM"], "attention_bias": False, "bos_token_id": 5, "eos_token_id": 255001,
        "hidden_act": "silu", "hidden_size": 8192, "intermediate_size": 22528, "layer_norm_eps": 1e-05,
        "logit_scale": 0.0625, "max_position_embeddings": 8192, "model_max_length": 131072, "model_type": "cohere",
        "num_attention_heads": 64, "num_hidden_layers": 40, "num_key_value_heads": 64, "pad_token_id": 0,
        "pretraining_tp": 1, "rope_theta": 8000000.0, "use_qk_norm": False, "vocab_size": 256000},
    "c4ai-command-r7b-12-2024": {
        "architectures": ["Cohere2ForCausalLM"], "attention_bias": False, "bos_token_id": 5, "eos_token_id": 255001,
        "cache_implementation": "hybrid", "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "layer_norm_eps": 1e-05, "layer_switch": 4, "logit_scale": 0.25,
        "max_position_embeddings": 8192, "model_type": "cohere2", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "order_of_interleaved_layers": "local_attn_first", "pad_token_id": 0,
        "position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0,
        "sliding_window": 4096, "sliding_window_pattern": 4, "use_embedding_sharing": True,
        "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": True,
        "vocab_size": 256000},
    "starcoder2-7b": {
        "architectures": ["Starcoder2ForCausalLM"], "activation_function": None, "attention_softmax_in_fp32": None,
        "bos_token_id": 0, "embedding_dropout": 0.1, "eos_token_id": 0, "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 4608, "intermediate_size": 18432, "max_position_embeddings": 16384, "mlp_type": "default",
        "model_type": "starcoder2", "norm_epsilon": 1e-05, "norm_type": "layer_norm", "num_attention_heads": 36,
        "num_hidden_layers": 32, "num_key_value_heads": 4, "residual_dropout": 0.1, "rope_theta": 1000000,
        "sliding_window": 4096, "use_bias": True, "vocab_size": 49152},
    "granite-3.1-3b-a800m-instruct": {
        "architectures": ["GraniteMoeForCausalLM"], "attention_bias": False, "attention_multiplier": 0.015625,
        "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 1536,
        "intermediate_size": 512, "logits_scaling": 6.0, "max_position_embeddings": 131072,
        "model_type": "granitemoe", "num_attention_heads": 24, "num_experts_per_tok": 8, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "num_local_experts": 40, "output_router_logits": False, "pad_token_id": 0,
        "residual_multiplier": 0.22, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000,
        "router_aux_loss_coef": 0.0, "tie_word_embeddings": True, "vocab_size": 49155},
    "glm-4.5-air": {
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "eos_token_id": [151329, 151336, 151338],
        "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 10944, "max_position_embeddings": 131072, "model_type": "glm4_moe",
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46,
        "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "pad_token_id": 151329,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
        "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": False,
        "vocab_size": 151552},
    "minimax-m2": {
        "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * 62, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 3072, "intermediate_size": 1536, "layernorm_full_attention_beta": 1.0,
        "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0, "max_position_embeddings": 196608,
        "mlp_intermediate_size": 8192, "model_type": "minimax_m2", "mtp_transformer_layers": 1,
        "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8,
        "num_local_experts": 256, "num_mtp_modules": 3, "output_router_logits": False, "qk_norm_type": "per_layer",
        "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64, "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0, "scoring_func": "sigmoid", "shared_intermediate_size": 0,
        "shared_moe_mode": "sigmoid", "sliding_window": None, "tie_word_embeddings": False, "use_mtp": True,
        "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064},
    "ernie-4.5-21b-a3b": {
        "architectures": ["Ernie4_5_MoeForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 2560, "intermediate_size": 12288, "max_position_embeddings": 131072,
        "model_type": "ernie4_5_moe", "moe_capacity": [64, 64, 64], "moe_intermediate_size": 1536, "moe_k": 6,
        "moe_layer_end_index": 27, "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64,
        "moe_num_shared_experts": 2, "moe_use_aux_free": True, "num_attention_heads": 20, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "num_nextn_predict_layers": 1, "pad_token_id": 0, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": True, "use_bias": False,
        "vocab_size": 103424},
    "llama-4-scout-17b-16e": {
        "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080, "eoi_token_index": 200081,
        "image_token_index": 200092, "model_type": "llama4", "tie_word_embeddings": False,
        "vision_config": {"model_type": "llama4_vision_model"}, "text_config": {
            "attention_bias": False, "attention_chunk_size": 8192, "bos_token_id": 200000,
            "eos_token_id": [200001, 200007, 200008], "for_llm_compressor": False, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 5120, "interleave_moe_layer_step": 1, "intermediate_size": 8192,
            "intermediate_size_mlp": 16384, "max_position_embeddings": 10485760, "model_type": "llama4_text",
            "no_rope_layers": [], "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48,
            "num_key_value_heads": 8, "num_local_experts": 16, "output_router_logits": False, "pad_token_id": 200018,
            "rms_norm_eps": 1e-05, "rope_scaling": {
                "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3"},
            "rope_theta": 500000.0, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "use_qk_norm": True,
            "vocab_size": 202048}},
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "aux_loss_alpha": 0.001,
        "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
        "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
        "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
        "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06, "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn"},
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128,
        "vocab_size": 129280},
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "aux_loss_alpha": 0.001,
        "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "model_type": "deepseek_v2", "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
        "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "pretraining_tp": 1,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "type": "yarn"},
        "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128,
        "vocab_size": 102400},
}  # fmt: skip
# Kimi K2 has the keys of DeepSeek-V3.
FILES["kimi-k2"] = FILES["deepseek-v3"] | {
    "model_type": "kimi_k2", "first_k_dense_replace": 1, "max_position_embeddings": 131072, "n_group": 1,
    "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
    "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "topk_group": 1, "vocab_size": 163840,
}  # fmt: skip
ROWS = [
    # file, parameters in billions (as its publisher says), longest context
    ("c4ai-command-r-v01", 35.0, 131072),
    ("c4ai-command-r7b-12-2024", 8.03, 8192),
    ("starcoder2-7b", 7.17, 16384),
    ("granite-3.1-3b-a800m-instruct", 3.30, 131072),
    ("glm-4.5-air", 107.0, 131072),
    ("minimax-m2", 229.0, 196608),
    ("ernie-4.5-21b-a3b", 21.8, 131072),
    ("llama-4-scout-17b-16e", 107.8, 8191),
    ("deepseek-v3", 671.0, 163840),
    ("deepseek-v2-lite", 15.7, 163840),
    ("kimi-k2", 1026.0, 131072),
]


@pytest.mark.capability("API-28")
@pytest.mark.parametrize(("name", "billions", "context"), ROWS)
def test_the_keys_of_a_published_file_give_its_size_and_context(name, billions, context):
    config = parse_config(_COMMON | FILES[name])
    assert config.num_parameters == pytest.approx(billions * 1e9, rel=0.03)
    assert config.max_position == context


@pytest.mark.capability("API-28")
@pytest.mark.parametrize(
    ("name", "changed", "sentence"),
    [
        ("minimax-m2", {"attn_type_list": [0, 1]}, r"attn_type_list is \[0, 1\]; only 1 \(softmax attention\)"),
        ("glm-4.5-air", {"topk_method": "greedy"}, "topk_method is 'greedy'; only 'noaux_tc' is supported"),
        ("glm-4.5-air", {"n_group": 7, "topk_group": 3}, "128 experts in n_group 7"),
        ("glm-4.5-air", {"moe_layer_freq": 2}, "moe_layer_freq is 2; only 1 is supported"),
        ("c4ai-command-r7b-12-2024", {"use_parallel_block": False}, "use_parallel_block is False; only True"),
        ("c4ai-command-r7b-12-2024", {"sliding_window": None}, "lacks sliding_window, which cohere2 models need"),
        ("ernie-4.5-21b-a3b", {"use_bias": True}, "use_bias is True; only False is supported"),
        ("starcoder2-7b", {"hidden_act": "silu"}, "hidden_act is 'silu'; only 'gelu_pytorch_tanh'"),
    ],
)
def test_a_setting_that_would_compute_something_else_is_refused_in_a_sentence(name, changed, sentence):
    with pytest.raises(ModelRefusedError, match=f"^config.json:? {sentence}|^config.json {sentence}"):
        parse_config(_COMMON | FILES[name] | changed)


@pytest.mark.capability("API-28")
@pytest.mark.parametrize(("name", "layers"), [("deepseek-v3", 61), ("deepseek-v2-lite", 27), ("kimi-k2", 61)])
def test_a_token_of_latent_attention_takes_576_numbers_a_layer(name, layers):
    config = parse_config(_COMMON | FILES[name])
    assert config.shape.kv_bytes_per_token("bf16") == config.kv_bytes_per_token(2) == layers * 576 * 2
    assert not config.takes_adapters


@pytest.mark.capability("API-28")
def test_two_experts_with_scaled_inputs_are_refused():
    raw = _COMMON | FILES["llama-4-scout-17b-16e"]
    raw["text_config"] = raw["text_config"] | {"num_experts_per_tok": 2}
    with pytest.raises(ModelRefusedError, match="num_experts_per_tok is 2; llama4_text models are run with 1"):
        parse_config(raw)
