"""Our logits are those of `transformers`: whole prompts, chunks and single tokens, alone and in mixed batches."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from slipway_runtime.kernels import fixed_order, reference
from slipway_runtime.kernels.dispatch import Kernels, kernels_for
from slipway_runtime.messages import NewRow, SamplingParams, SchedulerOutput
from slipway_runtime.models.config import read_config
from slipway_runtime.models.decoder import load_decoder
from slipway_runtime.models.weights import Checkpoint
from slipway_runtime.worker.inputs import prepare_inputs
from slipway_runtime.worker.kv_cache import CacheSize, allocate_cache
from slipway_runtime.worker.runner import Runner
from tests.runtime.checkpoints import a_checkpoint

BLOCK = 4
CPU = torch.device("cpu")
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
             "short_factor": [1.0, 1.1, 1.3, 1.7, 2.1, 2.2], "long_factor": [1.0, 1.5, 3.0, 6.0, 12.0, 24.0]}  # fmt: skip
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


class Bench:
    """A runner whose rows are computed by hand: row n has the blocks 1 + n * 20 …, in a scrambled order."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32, kernels: Kernels | None = None) -> None:
        config = read_config(path)
        kernels = kernels or kernels_for(CPU, dtype)
        with Checkpoint(path, dtype, CPU) as checkpoint:
            self.decoder = load_decoder(config, checkpoint, kernels, 100, dtype, CPU)
        caches = allocate_cache(config, CacheSize(100, BLOCK, 0), dtype, CPU)
        self.runner = Runner(
            self.decoder, caches, kernels, block_size=BLOCK, max_num_seqs=5, max_model_len=80, eos_token_ids=(),
            device=CPU,
        )  # fmt: skip
        self.known: dict[int, tuple[int, ...]] = {}

    def step(self, *work: tuple[int, list[int], int, int]) -> list[torch.Tensor]:
        """Compute tokens[start:end] for each (row, tokens, start, end); the logits of each of them."""
        work = tuple(sorted(work, key=lambda item: item[3] - item[2] != 1))
        blocks = {row: tuple(int(b) for b in np.random.default_rng(row).permutation(20) + 1 + row * 20)
                  for row, *_ in work}  # fmt: skip
        new = [item for item in work if item[0] not in self.known or self.known[item[0]] != tuple(item[1])]
        for row, tokens, *_ in new:
            self.known[row] = tuple(tokens)
        fresh = {row for row, *_ in new}
        plan = SchedulerOutput(
            step=1,
            new_rows=tuple(
                NewRow(row=row, token_ids=tuple(tokens), num_prompt_tokens=1, params=SamplingParams(max_tokens=1))
                for row, tokens, *_ in new
            ),
            rows=tuple(row for row, *_ in work),
            num_computed=tuple(start for _, _, start, _ in work),
            num_new=tuple(end - start for _, _, start, end in work),
            new_blocks=tuple(blocks[row] if row in fresh else () for row, *_ in work),
            samples=(False,) * len(work),
        )
        with torch.inference_mode():
            self.runner._rows.update_states(plan)
            inputs = prepare_inputs(plan, self.runner._rows, BLOCK, CPU)
            logits = self.decoder.logits(self.runner.hidden(inputs))
        by_row = dict(zip(plan.rows, logits.split(list(plan.num_new)), strict=True))
        return [by_row[row] for row in sorted(by_row)]


def oracle(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float()


def some_tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 97, count).tolist()


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-3)


@pytest.mark.capability("ST-9")
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers(shape, tmp_path):
    _check_logits(tmp_path, *SHAPES[shape])


@pytest.mark.capability("API-20")
@pytest.mark.parametrize("kernels", ["of the processor", "reference", "fixed order"])
@pytest.mark.parametrize("shape", PUBLISHED_FAMILIES)
def test_logits_of_published_families_equal_transformers(shape, kernels, tmp_path):
    _check_logits(tmp_path, *PUBLISHED_FAMILIES[shape], kernels=KERNELS[kernels])


@pytest.mark.capability("API-21")
@pytest.mark.parametrize("kernels", ["of the processor", "reference", "fixed order"])
@pytest.mark.parametrize("shape", EXPERTS)
def test_logits_of_experts_equal_transformers(shape, kernels, tmp_path):
    _check_logits(tmp_path, *EXPERTS[shape], kernels=KERNELS[kernels])


KERNELS = {"of the processor": kernels_for(CPU, torch.float32), "reference": reference, "fixed order": fixed_order}


def _check_logits(tmp_path, family, fields, kernels=KERNELS["of the processor"]):
    model = a_checkpoint(tmp_path, family, **fields)
    bench = Bench(tmp_path, kernels=kernels)
    a, b, c, d = (some_tokens(count, seed=count) for count in (61, 7, 33, 18))
    theirs = {row: oracle(model, tokens) for row, tokens in enumerate((a, b, c, d))}

    (whole,) = bench.step((0, a, 0, 61))
    assert_close(whole, theirs[0])
    # a goes on from its own middle, b is new, c is new and goes on below, all in one batch
    again, new, chunk = bench.step((0, a, 40, 61), (1, b, 0, 7), (2, c, 0, 9))
    assert_close(again, theirs[0][40:])
    assert_close(new, theirs[1])
    assert_close(chunk, theirs[2][:9])
    # single tokens of very different lengths, beside a chunk with a past and a new prompt
    last, single, chunk, new = bench.step((0, a, 60, 61), (1, b, 6, 7), (2, c, 9, 33), (3, d, 0, 17))
    assert_close(last, theirs[0][60:])
    assert_close(single, theirs[1][6:])
    assert_close(chunk, theirs[2][9:])
    assert_close(new, theirs[3][:17])
    # decode only: a batch of all, then the same token alone
    batch = bench.step((0, a, 60, 61), (1, b, 6, 7), (2, c, 32, 33), (3, d, 17, 18))
    for ours, row in zip(batch, range(4), strict=True):
        assert_close(ours, theirs[row][-1:])
    (alone,) = bench.step((2, c, 32, 33))
    assert_close(alone, theirs[2][-1:])


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
