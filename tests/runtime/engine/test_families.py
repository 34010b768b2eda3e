"""The whole engine on models of other families: chunks, prefix hits and batches give the text of `transformers`."""

import pytest

from slipway_runtime.engine.build import build_engine
from tests.runtime.checkpoints import OTHER_FAMILIES, a_checkpoint, greedy
from tests.runtime.engine.test_engine import PROMPTS, ask, run
from tests.runtime.models.test_quantized_checkpoint import FORMATS, a_quantized_checkpoint

FAMILIES = {
    "gemma3_text": ("gemma3_text", {"head_dim": 12, "sliding_window": 9, "num_hidden_layers": 2,
                                    "layer_types": ["sliding_attention", "full_attention"]}),
    "phi3": ("phi3", {"sliding_window": 30}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 9}),
    **OTHER_FAMILIES,
}  # fmt: skip


@pytest.mark.capability("API-20", "API-21", "API-28")
@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_writes_what_transformers_writes(family, tmp_path):
    kind, shape = FAMILIES[family]
    model = a_checkpoint(tmp_path, kind, **shape)
    engine = build_engine(
        tmp_path, kv_cache_bytes=4 << 20, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=160
    )
    for number, prompt in enumerate(PROMPTS):
        ask(engine, str(number), prompt, max_tokens=12)
    texts = run(engine)
    assert texts == {str(number): greedy(model, prompt, 12) for number, prompt in enumerate(PROMPTS)}


@pytest.mark.capability("QZ-4")
def test_an_engine_keeps_a_published_format_and_says_so(tmp_path):
    a_quantized_checkpoint(tmp_path, *FORMATS["awq"])
    engine = build_engine(
        tmp_path, kv_cache_bytes=4 << 20, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=160
    )
    assert (engine.facts.quantization, engine.facts.warnings) == ("int4", ())
    dense = sum(4 * 64 * size for size in (64, 32, 32, 64, 160, 160, 160)) * 2
    tables = (4 + 2) * 128 * 64  # lm_head, packed for at most 128 tokens, and the embedding in bfloat16
    assert engine.facts.weight_bytes < 0.2 * dense + tables
    ask(engine, "a", PROMPTS[0], max_tokens=12)
    assert len(run(engine)["a"]) == 12


@pytest.mark.capability("QZ-4")
def test_rounding_a_quantized_checkpoint_again_is_warned_of(tmp_path):
    a_quantized_checkpoint(tmp_path, *FORMATS["gptq"])
    engine = build_engine(tmp_path, kv_cache_bytes=4 << 20, quantization="int8", max_model_len=160)
    (warning,) = engine.facts.warnings
    assert "the checkpoint is quantized (gptq, int4) and --quantization int8 rounds it again" in warning
