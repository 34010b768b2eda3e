"""Keys of config.json: used, known to have no effect, or judged by their words.

An unknown key is judged by whole words, between underscores: `artifact_path` has no `act` in it. One with a word of
`_COMPUTING` may change how tokens are computed, and is refused, unless a word of `_INERT_WORDS` says that it is about
training or about how fast the same is computed, as in `attn_pdrop` and `use_flash_attention`. Any other unknown key is
metadata of a library or a person, such as `unsloth_version`, and is logged. A key that changes which tensors there are
would be noticed without its word: a checkpoint is refused for a tensor that is not read.
"""

import re
from typing import Final

from slipway_runtime.models.families import words

# Keys without effect on the output tokens, whatever their value.
INERT: Final = words(
    "_name_or_path architectures transformers_version use_cache bos_token_id pad_token_id unk_token_id sep_token_id "
    "decoder_start_token_id model_type output_attentions output_hidden_states return_dict return_dict_in_generate "
    "id2label label2id problem_type gradient_checkpointing torchscript tokenizer_class prefix task_specific_params "
    "finetuning_task auto_map cache_implementation chunk_size_feed_forward is_encoder_decoder is_decoder torch_dtype "
    "dtype tf_legacy_loss use_bfloat16 tie_encoder_decoder num_logits_to_keep lora_rank noisy_embedding_alpha "
    "initializer_range attention_dropout hidden_dropout embd_pdrop resid_pdrop _attn_implementation "
    "attn_implementation _attn_implementation_autoset "
    # several devices, as other programs divide a model between them
    "model_parallel tensor_parallel tensor_parallel_size tensor_model_parallel_size pipeline_parallel_size "
    "pipeline_model_parallel_size sequence_parallel context_parallel_size expert_parallel_size "
    "expert_model_parallel_size "
    # defaults of transformers' generate(); here each request sets them
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k "
    "top_p typical_p repetition_penalty length_penalty num_return_sequences no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size output_scores output_logits"
)
# `is_causal` must be true. `is_matryoshka` and `matryoshka_dimensions` are read by models/pooling.py.
HONOURED: Final = words(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "rms_norm_eps rope_theta rope_scaling rope_parameters partial_rotary_factor max_position_embeddings "
    "tie_word_embeddings attention_bias mlp_bias sliding_window use_sliding_window max_window_layers layer_types "
    "eos_token_id hidden_act pretraining_tp quantization_config add_cross_attention pruned_heads is_causal "
    "is_matryoshka matryoshka_dimensions"
)
_COMPUTING: Final = words(
    # attention and positions
    "attention attn head qk qkv kv query mqa gqa mla lora_rank clip clamp causal bidirectional rope mrope rotary "
    "ntk yarn logn alibi position positional relative window sliding swa sink temperature_tuning "
    # layers
    "layer norm qknorm layernorm rmsnorm normalize normalization prenorm postnorm bias act activation relu gelu silu "
    "swish glu swiglu geglu mlp ff ffn feedforward feed_forward intermediate hidden residual resid gate gated gating "
    "parallel expert moe router routed routing sparse sparsity conv convolution mamba ssm state recurrent recurrence "
    "rnn mtp nextn cross encoder vision image video audio multimodal text_config "
    # inputs, outputs and numbers
    "embed embd emb embedding logit softcap softcapping cap softmax multiplier scal scale scaled scaling scalar mup "
    "quant quantize quantized quantization compression"
)
_INERT_WORDS: Final = words(
    "dropout pdrop loss initializer init std grad gradient checkpointing implementation flash sdpa xformers liger "
    "efficient fused"
)


def may_compute(key: str) -> bool:
    """Whether an unknown key may change how tokens are computed, by its words."""
    return bool(_any_of(_COMPUTING, key)) and not _any_of(_INERT_WORDS, key)


def _any_of(found: frozenset[str], key: str) -> bool:
    """Whether one of these words, or its plural, is in the key. Hyphens, dots and humps separate words, too."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower()
    text = f"_{'_'.join(re.findall('[a-z]+', apart))}_"
    return any(f"_{word}_" in text or f"_{word}s_" in text for word in found)
