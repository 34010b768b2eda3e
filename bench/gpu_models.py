"""Published models whose steps are counted and planned."""

from typing import Any

# As published: huggingface.co, config.json of the repositories of these names.
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
        "tie_word_embeddings": True, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000,
        "torch_dtype": "bfloat16", "eos_token_id": 151_645,
    },
    "Llama-3.1-8B": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": False,
        "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "torch_dtype": "bfloat16",
        "eos_token_id": 128_001, "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}  # fmt: skip

# Planned by `bench.gpu --plan` too.
PUBLISHED: dict[str, dict[str, Any]] = CONFIGS | {
    "Llama-3.1-70B": CONFIGS["Llama-3.1-8B"] | {
        "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
    "Qwen2.5-7B": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064, "tie_word_embeddings": False,
        "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "torch_dtype": "bfloat16",
        "eos_token_id": 151_645, "use_sliding_window": False,
    },
    "Mistral-7B": {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32_768, "tie_word_embeddings": False,
        "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "torch_dtype": "bfloat16",
        "eos_token_id": 2, "sliding_window": None,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201_088,
        "tie_word_embeddings": False, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 150_000,
        "eos_token_id": 200_002, "attention_bias": True, "num_local_experts": 32, "num_experts_per_tok": 4,
        "experts_per_token": 4, "swiglu_limit": 7.0, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "quantization_config": {
            "quant_method": "mxfp4", "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
        },
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151_936,
        "tie_word_embeddings": False, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0, "torch_dtype": "bfloat16", "eos_token_id": 151_645, "use_sliding_window": False,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip
RANKS = {"Llama-3.1-70B": 4}  # tensor parallelism of those that one card does not hold
