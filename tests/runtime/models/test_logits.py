"""Our logits are those of `transformers`: whole prompts, chunks and single tokens, alone and in mixed batches."""

import pytest
import torch

from slipway_runtime.kernels import native
from tests.runtime.checkpoints import OTHER_FAMILIES, a_checkpoint
from tests.runtime.machine import Machine, Stretch
from tests.runtime.models.logits import KERNELS, Bench, assert_close, check_logits, oracle, some_tokens

SHAPES = {
    "heads are not shared": ("llama", {"num_key_value_heads": 4}),
    "two heads share": ("llama", {"num_key_value_heads": 2}),
    "four heads share": ("llama", {"num_key_value_heads": 1}),
    "eight heads share": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "three heads share": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2}),
    "tied embeddings": ("llama", {"tie_word_embeddings": True}),
    "biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "head size of its own": ("llama", {"head_dim": 20}),
    "other theta and epsilon": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
                                          "rms_norm_eps": 1e-3}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}}),
    "llama3 rope": ("llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32}}),
    "yarn rope": ("llama", {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}}),
    "yarn rope with its own sharpness": ("qwen3", {"head_dim": 32, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 16,
        "attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}}),
    "yarn rope with mscale": ("qwen2", {"head_dim": 24, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 5e4, "factor": 8.0, "original_max_position_embeddings": 16,
        "mscale": 0.7, "mscale_all_dim": 1.4}}),
    "dynamic rope within the trained context": ("llama", {"rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 12}),
    "mistral with a window": ("mistral", {"sliding_window": 10}),
    "a window of one": ("mistral", {"sliding_window": 1}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 with a window from its second layer on": ("qwen2", {
        "use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1}),
    "qwen3 with windows by layer and yarn": ("qwen3", {
        "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 7, "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}}),
    "qwen3": ("qwen3", {"head_dim": 16}),
}  # fmt: skip
_LONGROPE = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 128,
             "short_factor": [1.0, 1.1, 1.3, 1.7, 2.1, 2.2],
             "long_factor": [1.0, 1.5, 3.0, 6.0, 12.0, 24.0]}  # fmt: skip
_SINGLE_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}
PUBLISHED_FAMILIES = {
    "smollm3 with layers without positions": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]}),
    "smollm3 with a window where there are no positions": ("smollm3", {
        "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 9}),
    "phi3 with a window": ("phi3", {"sliding_window": 11}),
    "phi3 with longrope within the trained context": ("phi3", {"rope_parameters": _LONGROPE}),
    "phi3 with longrope beyond the trained context": ("phi3", {
        "rope_parameters": {**_LONGROPE, "original_max_position_embeddings": 4}}),
    "phi4-mini turns a part of a head": ("phi3", {
        "hidden_size": 64, "tie_word_embeddings": True, "partial_rotary_factor": 0.75,
        "rope_parameters": {**_LONGROPE, "partial_rotary_factor": 0.75}}),
    "gemma2": ("gemma2", {**_SINGLE_HEADS, "sliding_window": 9, "query_pre_attn_scalar": 20,
                          "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
    "gemma2 without caps": ("gemma2", {**_SINGLE_HEADS, "attn_logit_softcapping": None,
                                       "final_logit_softcapping": None}),
    "gemma3": ("gemma3_text", {**_SINGLE_HEADS, "num_hidden_layers": 3, "sliding_window": 9,
                               "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                               "query_pre_attn_scalar": 30}),
    "gemma3 with stretched positions in its global layers": ("gemma3_text", {
        **_SINGLE_HEADS, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
}  # fmt: skip
EXPERTS = {
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 12}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
                                "norm_topk_prob": True, "head_dim": 16, "num_hidden_layers": 3,
                                "mlp_only_layers": [1]}),
    "qwen3_moe whose weights do not sum to one": ("qwen3_moe", {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": False,
        "head_dim": 16}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 9,
                            "swiglu_limit": 1.5, "layer_types": ["sliding_attention", "full_attention"],
                            "rope_parameters": {
                                "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 8.0, "truncate": False,
                                "original_max_position_embeddings": 64}}),
}  # fmt: skip


def with_kernels(shapes: dict) -> list[tuple[str, str]]:
    """Every shape with the processor's kernels; those whose scores are capped or have sinks with all."""
    peculiar = [shape for shape in shapes if shape in ("gemma2", "gemma3", "gpt_oss")]
    return [(shape, "of the processor") for shape in shapes] + [
        (shape, kernels) for shape in peculiar for kernels in ("reference", "fixed order")
    ]


@pytest.mark.capability("ST-9")
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers(shape, tmp_path):
    family, fields = SHAPES[shape]
    check_logits(a_checkpoint(tmp_path, family, **fields), tmp_path)


@pytest.mark.capability("API-20")
@pytest.mark.parametrize(("shape", "kernels"), with_kernels(PUBLISHED_FAMILIES))
def test_logits_of_published_families_equal_transformers(shape, kernels, tmp_path):
    family, fields = PUBLISHED_FAMILIES[shape]
    check_logits(a_checkpoint(tmp_path, family, **fields), tmp_path, KERNELS[kernels])


@pytest.mark.capability("API-28")
@pytest.mark.parametrize("shape", OTHER_FAMILIES)
def test_logits_of_other_families_equal_transformers(shape, tmp_path):
    """review/engine.md F1: 40 of 42 model types were refused."""
    family, fields = OTHER_FAMILIES[shape]
    check_logits(a_checkpoint(tmp_path, family, **fields), tmp_path)


@pytest.mark.capability("API-21")
@pytest.mark.parametrize(("shape", "kernels"), with_kernels(EXPERTS))
def test_logits_of_experts_equal_transformers(shape, kernels, tmp_path):
    family, fields = EXPERTS[shape]
    check_logits(a_checkpoint(tmp_path, family, **fields), tmp_path, KERNELS[kernels])


@pytest.mark.capability("BS-2")
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 16, 60])
def test_a_prompt_in_chunks_has_the_logits_of_the_whole(chunk, tmp_path):
    model = a_checkpoint(tmp_path)
    tokens = some_tokens(61, seed=1)
    bench, theirs = Bench(tmp_path), oracle(model, tokens)
    for start in range(0, 61, chunk):
        end = min(start + chunk, 61)
        (ours,) = bench.step((0, tokens, start, end))
        assert_close(ours, theirs[start:end])


def test_a_chunk_wider_than_a_tile_has_the_logits_of_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("slipway_runtime.kernels.reference_attention.TILE", 7)
    model = a_checkpoint(tmp_path)
    tokens = some_tokens(61, seed=1)
    bench = Bench(tmp_path)
    bench.step((0, tokens, 0, 10))
    (ours,) = bench.step((0, tokens, 10, 61))
    assert_close(ours, oracle(model, tokens)[10:])


def test_bfloat16_stays_close_to_transformers_in_bfloat16(tmp_path):
    model = a_checkpoint(tmp_path).to(torch.bfloat16)
    bench = Bench(tmp_path, torch.bfloat16)
    tokens = some_tokens(40, seed=2)
    (ours,) = bench.step((0, tokens, 0, 40))
    theirs, exact = oracle(model, tokens), oracle(model.float(), tokens)
    drift, theirs_drift = (ours - exact).abs().mean(), (theirs - exact).abs().mean()
    assert drift < 1.5 * theirs_drift, "no further from float32 than transformers is"


def test_compiled_bfloat16_is_closer_to_float32_than_transformers_in_bfloat16(tmp_path):
    """Matrices and KV are bfloat16, what is between them is float32."""
    if native.library() is None:
        pytest.skip("there are no compiled kernels here")
    model = a_checkpoint(tmp_path).to(torch.bfloat16)
    machine, tokens = Machine(tmp_path, dtype=torch.bfloat16, rows=1), some_tokens(40, seed=2)
    ours = machine.logits(Stretch(0, tokens, 0, 40))[0]
    theirs, exact = oracle(model, tokens), oracle(model.float(), tokens)
    assert (ours - exact).abs().mean() < 0.9 * (theirs - exact).abs().mean()
    assert machine.caches[0].dtype == torch.bfloat16
