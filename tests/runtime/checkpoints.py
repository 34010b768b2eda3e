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
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1,
           "routed_scaling_factor": 1.7, "norm_topk_prob": True}  # fmt: skip
_LATENT = {"kv_lora_rank": 20, "q_lora_rank": 28, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
           "num_key_value_heads": 4}  # fmt: skip
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
    "cohere": ("cohere", {"logit_scale": 0.0625, "rope_parameters": {"rope_type": "default", "rope_theta": 8e6}}),
    "cohere with norms of heads": ("cohere", {"logit_scale": 0.8, "use_qk_norm": True, "attention_bias": True}),
    "cohere2": ("cohere2", {**_WINDOWS, "logit_scale": 0.25}),
    "starcoder2": ("starcoder2", {"use_bias": True}),
    "starcoder2 with a window": ("starcoder2", {"use_bias": False, "sliding_window": 9, "tie_word_embeddings": False}),
    "arcee": ("arcee", {"head_dim": 12}),
    "hyperclovax": ("hyperclovax", {"embedding_multiplier": 10.0, "attention_multiplier": 0.1, "head_dim": 12,
                                    "residual_multiplier": 0.5, "logits_scaling": 0.125}),
    "hyperclovax without norms of outputs": ("hyperclovax", {"use_post_norm": False, "head_dim": 12}),
    "internlm3": ("internlm3", {"head_dim": 12, "attention_bias": True, "mlp_bias": True}),
    "iquestcoder": ("iquestcoder", {"head_dim": 12}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 12, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}}),
    "granitemoe": ("granitemoe", {"num_local_experts": 5, "num_experts_per_tok": 2, "attention_multiplier": 0.2,
                                  "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 6.0}),
    "granitemoeshared": ("granitemoeshared", {"num_local_experts": 4, "num_experts_per_tok": 2,
                                              "attention_multiplier": 0.2, "shared_intermediate_size": 24}),
    "qwen2_moe": ("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 40, "num_hidden_layers": 3,
                                "decoder_sparse_step": 2}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "flex_olmo": ("flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": ("glm4_moe", {**_ROUTED, "use_qk_norm": True, "attention_bias": True, "num_hidden_layers": 3,
                              "head_dim": 16, "first_k_dense_replace": 1}),
    "glm4_moe in groups": ("glm4_moe", {**_ROUTED, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}),
    "dots1": ("dots1", {**_ROUTED, "n_shared_experts": 2, "first_k_dense_replace": 1, "sliding_window": None}),
    "solar_open": ("solar_open", {**_ROUTED, "head_dim": 12}),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8}),
    "ernie4_5_moe": ("ernie4_5_moe", {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24,
                                      "moe_num_shared_experts": 2, "num_hidden_layers": 3}),
    "llama4_text": ("llama4_text", {"num_local_experts": 4, "intermediate_size": 24, "intermediate_size_mlp": 80,
                                    "head_dim": 12, "num_hidden_layers": 4, "interleave_moe_layer_step": 2}),
    "deepseek_v2": ("deepseek_v2", {**_LATENT, **_ROUTED, "norm_topk_prob": False, "first_k_dense_replace": 1,
                                    "topk_method": "greedy"}),
    "deepseek_v2 in groups, without a latent of q": ("deepseek_v2", {
        **_LATENT, **_ROUTED, "q_lora_rank": None, "norm_topk_prob": False, "topk_method": "group_limited_greedy",
        "n_group": 4, "topk_group": 2}),
    "deepseek_v3": ("deepseek_v3", {**_LATENT, **_ROUTED, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
                                    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 16,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "deepseek_v3 with biases, in two halves": ("deepseek_v3", {
        **_LATENT, **_ROUTED, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "attention_bias": True,
        "rope_interleave": False}),
    "glm4_moe_lite": ("glm4_moe_lite", {**_LATENT, **_ROUTED, "num_hidden_layers": 3}),
    "youtu": ("youtu", {**_LATENT}),
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
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0.0, 0.2)
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
