"""Whether a model fits is arithmetic with worked examples, and a sentence that names the setting to change."""

import re
from dataclasses import replace

import pytest

from slipway_api.memory import (
    GIB,
    DoesNotFit,
    Fits,
    ModelShape,
    Needs,
    activation_bytes,
    adapter_slot_bytes,
    footprint,
    kv_bytes_per_token,
    plan,
    pool_blocks,
    utilization_warning,
    weight_bytes,
)

LLAMA_70B = ModelShape(
    layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, intermediate=28_672, vocab=128_256
)  # fmt: skip
LLAMA_8B = ModelShape(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14_336, vocab=128_256)
QWEN_06B = ModelShape(
    layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, intermediate=3072, vocab=151_936, tied=True
)  # fmt: skip
CHAT = Needs(max_model_len=8192)


def kv(shape: ModelShape, dtype: str) -> int:
    return kv_bytes_per_token(shape.layers, shape.kv_heads, shape.head_dim, dtype)


@pytest.mark.capability("PF-2")
def test_the_kv_of_a_token_of_a_70b_with_shared_heads_is_327680_bytes():
    assert kv(LLAMA_70B, "fp16") == 327_680
    assert kv(LLAMA_8B, "bf16") == 131_072
    assert kv(QWEN_06B, "bf16") == 114_688


@pytest.mark.capability("PF-2")
def test_attention_heads_change_nothing_about_kv():
    twice = replace(LLAMA_70B, heads=128)
    assert plan(twice, CHAT, memory_bytes=400 * GIB).bytes_per_token == 327_680  # type: ignore[union-attr]
    assert kv(replace(LLAMA_70B, kv_heads=64), "fp16") == 8 * 327_680


@pytest.mark.capability("KV-11")
def test_one_byte_kv_halves_a_token_but_for_the_scale_of_each_head():
    assert kv(LLAMA_70B, "fp8") == kv(LLAMA_70B, "int8") == 327_680 // 2 + 2 * 80 * 8 * 4
    sixteen, eight = (plan(LLAMA_8B, replace(CHAT, kv_dtype=dtype), memory_bytes=80 * GIB) for dtype in ("auto", "fp8"))
    assert isinstance(sixteen, Fits)
    assert isinstance(eight, Fits)
    assert eight.kv_blocks / sixteen.kv_blocks == pytest.approx(2 * 128 / 132, rel=1e-3)


def test_parameters_are_counted_as_the_models_have_them():
    assert LLAMA_8B.all_parameters == pytest.approx(8.03e9, rel=0.001)
    assert LLAMA_70B.all_parameters == pytest.approx(70.55e9, rel=0.001)
    assert QWEN_06B.all_parameters == pytest.approx(0.596e9, rel=0.001)


def test_a_shape_with_parameters_only_plans_nearly_the_same():
    known = LLAMA_8B
    guessed = ModelShape(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, parameters=8_030_000_000)
    assert weight_bytes(guessed, "bf16") == pytest.approx(weight_bytes(known, "bf16"), rel=0.001)
    assert adapter_slot_bytes(guessed, 16, "bf16") == pytest.approx(adapter_slot_bytes(known, 16, "bf16"), rel=0.15)


@pytest.mark.capability("QZ-1")
def test_quantized_weights_take_a_byte_and_a_scale_a_row_and_the_vocabulary_stays():
    vocabulary = 2 * 128_256 * 4096 * 2
    rows = 32 * (4096 + 1024 + 1024 + 4096 + 14_336 + 14_336 + 4096)
    assert weight_bytes(LLAMA_8B, "bf16", "int8") == LLAMA_8B.linear_parameters + rows * 4 + vocabulary
    assert weight_bytes(LLAMA_8B, "bf16", "fp8") == weight_bytes(LLAMA_8B, "bf16", "int8")


def test_on_a_cpu_the_matrices_of_a_float32_model_take_the_two_bytes_of_its_checkpoint():
    vocabulary = LLAMA_8B.all_parameters - LLAMA_8B.linear_parameters
    assert weight_bytes(LLAMA_8B, "fp32", on_gpu=False) == 2 * LLAMA_8B.linear_parameters + 4 * vocabulary
    assert weight_bytes(LLAMA_8B, "fp32") == 4 * LLAMA_8B.all_parameters
    assert weight_bytes(LLAMA_8B, "bf16", on_gpu=False) == weight_bytes(LLAMA_8B, "bf16")


def test_an_adapter_slot_is_padded_to_the_largest_rank():
    # 32 layers × rank 16 × (in + out of q k v o gate up down) × 2 bytes
    pairs = (4096 + 4096) * 2 + (4096 + 1024) * 2 + (4096 + 14_336) * 3
    assert adapter_slot_bytes(LLAMA_8B, 16, "bf16") == 32 * 16 * pairs * 2
    assert adapter_slot_bytes(LLAMA_8B, 32, "bf16") == 2 * adapter_slot_bytes(LLAMA_8B, 16, "bf16")


@pytest.mark.capability("KV-5")
def test_adapters_activations_and_graphs_are_taken_before_the_kv_cache():
    """What each costs is missing from the pool, to the block."""
    plain = plan(LLAMA_8B, CHAT, memory_bytes=80 * GIB)
    with_adapters = replace(CHAT, max_adapters=8, max_rank=64)
    wider = replace(CHAT, max_num_batched_tokens=65_536)
    assert isinstance(plain, Fits)
    for needs in (with_adapters, wider, replace(CHAT, on_gpu=False)):
        found = plan(LLAMA_8B, needs, memory_bytes=80 * GIB)
        assert isinstance(found, Fits)
        cost = footprint(LLAMA_8B, needs).total - footprint(LLAMA_8B, CHAT).total
        assert cost != 0
        assert plain.kv_blocks - found.kv_blocks == pytest.approx(cost / (131_072 * 16), abs=1)
    assert activation_bytes(LLAMA_8B, wider) > activation_bytes(LLAMA_8B, CHAT)


@pytest.mark.capability("KV-5")
def test_drafts_have_logits_too():
    """256 rows × (1 + 4 drafts) of 151,936 scores, and a copy; never more than a step has tokens."""
    vocabulary = 2 * 151_936 * 4
    step = replace(CHAT, max_num_seqs=256, max_num_batched_tokens=2048)
    assert activation_bytes(QWEN_06B, step) == 256 * vocabulary
    assert activation_bytes(QWEN_06B, replace(step, draft_tokens=4)) == 1280 * vocabulary
    assert activation_bytes(QWEN_06B, replace(step, draft_tokens=32)) == 2048 * vocabulary


@pytest.mark.capability("KV-5")
def test_the_pool_and_everything_else_stay_within_the_budget():
    for gib in (18, 19, 24, 40, 80, 141):
        for needs in (CHAT, replace(CHAT, max_adapters=4, max_rank=16), replace(CHAT, kv_dtype="int8")):
            found = plan(LLAMA_8B, needs, memory_bytes=gib * GIB, utilization=0.85)
            if isinstance(found, Fits):
                pool = (found.kv_blocks + 1) * 16 * found.bytes_per_token  # and the null block
                total = footprint(LLAMA_8B, needs).total + pool
                assert total <= gib * GIB * 0.85 < total + 16 * found.bytes_per_token
                assert found.kv_tokens >= needs.max_model_len


@pytest.mark.capability("DD-2")
def test_devices_that_share_a_model_have_their_heads_each_and_their_part_of_the_vocabulary():
    part = LLAMA_70B.on_one_of(8)
    assert part.all_parameters == LLAMA_70B.all_parameters // 8
    assert kv(part, "fp16") == 327_680 // 8
    assert LLAMA_70B.on_one_of(1).all_parameters == LLAMA_70B.all_parameters

    # 70B in 16 bits is 131 GiB: too much for one device of 80, and for eight of them 16.4 each
    shared = replace(CHAT, tensor_parallel_size=8)
    assert isinstance(plan(LLAMA_70B, CHAT, memory_bytes=80 * GIB), DoesNotFit)
    found = plan(LLAMA_70B, shared, memory_bytes=80 * GIB)
    assert isinstance(found, Fits)
    assert found.bytes_per_token == 327_680 // 8
    assert footprint(LLAMA_70B, shared).weights == part.all_parameters * 2
    assert 17 * GIB < footprint(LLAMA_70B, shared).total < 19 * GIB
    with_adapters = footprint(LLAMA_70B, replace(shared, max_adapters=4, max_rank=16))
    alone = footprint(LLAMA_70B, replace(CHAT, max_adapters=4, max_rank=16))
    assert alone.adapters / 8 < with_adapters.adapters < alone.adapters, "the hidden side of A and B is on each device"


def test_sequences_at_full_length_are_limited_by_memory_then_by_the_batch():
    # 80 × 0.85 = 68 GiB, weights 14.96, reserve 1.28: 51.76 GiB hold 423,984 tokens, 51 × 8192
    assert plan(LLAMA_8B, CHAT, memory_bytes=80 * GIB, utilization=0.85) == Fits(
        kv_blocks=found_blocks(80 * GIB * 85 // 100), kv_tokens=found_blocks(80 * GIB * 85 // 100) * 16,
        bytes_per_token=131_072, max_sequences=51,
    )  # fmt: skip
    few = plan(LLAMA_8B, replace(CHAT, max_num_seqs=8), memory_bytes=80 * GIB, utilization=0.85)
    assert isinstance(few, Fits)
    assert few.max_sequences == 8


def found_blocks(budget: int) -> int:
    return (budget - footprint(LLAMA_8B, CHAT).total) // (131_072 * 16) - 1


def test_pool_blocks_pay_for_the_null_block_too():
    assert pool_blocks(10 * 16 * 100, 100, 16) == 9
    assert pool_blocks(0, 100, 16) == pool_blocks(-5, 100, 16) == pool_blocks(100, 100, 16) == 0


@pytest.mark.capability("KV-5")
def test_a_model_that_does_not_fit_is_refused_with_the_arithmetic():
    found = plan(LLAMA_70B, CHAT, memory_bytes=80 * GIB, utilization=0.85)
    assert isinstance(found, DoesNotFit)
    assert found.message == (
        "weights 131.41 GiB + reserve 1.39 GiB = 132.80 GiB exceed 68.00 GiB (80.00 GiB × 0.85); one sequence of 8192 "
        "tokens at 327680 bytes needs 2.50 GiB of KV cache: give it a device with 135.31 GiB to spare, or a smaller "
        "model"
    )


@pytest.mark.capability("KV-5")
@pytest.mark.parametrize(
    ("shape", "needs", "gib", "setting"),
    [
        (LLAMA_8B, Needs(max_model_len=131_072), 24, r"lower maxModelLen to (\d+)"),
        (LLAMA_8B, Needs(max_model_len=131_072), 30, "set kvCache.dtype to fp8 or int8"),
        (LLAMA_8B, CHAT, 16, "set quantization to int8 or fp8"),
        (LLAMA_8B, replace(CHAT, max_adapters=64, max_rank=64), 24, "lower lora.maxAdapters or lora.maxRank"),
        (LLAMA_8B, replace(CHAT, max_num_batched_tokens=65_536), 18, "lower maxNumBatchedTokens"),
    ],
)
def test_the_setting_that_is_named_makes_it_fit(shape: ModelShape, needs: Needs, gib: int, setting: str):
    found = plan(shape, needs, memory_bytes=gib * GIB)
    assert isinstance(found, DoesNotFit)
    match = re.search(setting, found.message)
    assert match, found.message
    turned = {
        "lower maxModelLen": lambda: replace(needs, max_model_len=int(match[1])),
        "set kvCache.dtype": lambda: replace(needs, kv_dtype="fp8"),
        "set quantization": lambda: replace(needs, quantization="fp8"),
        "lower lora.maxAdapters": lambda: replace(needs, max_adapters=1, max_rank=16),
        "lower maxNumBatchedTokens": lambda: replace(needs, max_num_batched_tokens=512),
    }[" ".join(match[0].split()[:2])]()
    assert isinstance(plan(shape, turned, memory_bytes=gib * GIB), Fits)


@pytest.mark.capability("KV-5")
def test_a_share_of_the_device_above_the_limit_is_warned_about():
    assert utilization_warning(0.85) is None
    assert utilization_warning(0.92) is None
    assert "0.95 is above 0.92" in (utilization_warning(0.95) or "")


# Qwen3-30B-A3B and Mixtral-8x7B, as their config.json files have them
QWEN3_30B = ModelShape(layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, intermediate=6144, vocab=151_936,
                       experts=128, experts_per_token=8, moe_intermediate=768)  # fmt: skip
MIXTRAL = ModelShape(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14_336, vocab=32_000,
                     experts=8, experts_per_token=2, moe_intermediate=14_336)  # fmt: skip


@pytest.mark.capability("API-21")
def test_all_experts_are_weights_and_those_of_a_token_are_activations():
    assert QWEN3_30B.all_parameters == pytest.approx(30.53e9, rel=0.001)
    assert MIXTRAL.all_parameters == pytest.approx(46.70e9, rel=0.001)
    assert weight_bytes(MIXTRAL, "bf16") == pytest.approx(93.4e9, rel=0.001)
    assert QWEN3_30B.mlp == 8 * 768, "the inner width of the eight experts of a token"
    step = replace(CHAT, max_num_batched_tokens=2048, max_num_seqs=1)
    assert activation_bytes(QWEN3_30B, step) == 2048 * 2 * (2 * 2048 + 3 * 8 * 768 + 3 * 8 * 2048)


@pytest.mark.capability("API-21")
def test_a_mixture_planned_from_its_number_of_weights_takes_no_more_activations_than_its_active_experts():
    known = replace(QWEN3_30B, parameters=QWEN3_30B.all_parameters, intermediate=0)
    assert weight_bytes(known, "bf16") == weight_bytes(QWEN3_30B, "bf16")
    assert footprint(known, CHAT).reserve == footprint(QWEN3_30B, CHAT).reserve
    unknown = replace(known, experts=0, experts_per_token=0, moe_intermediate=0)
    assert footprint(unknown, CHAT).reserve > footprint(known, CHAT).reserve + GIB // 2


# DeepSeek-V3, as its config.json has it
DEEPSEEK_V3 = ModelShape(layers=61, hidden=7168, heads=128, kv_heads=1, head_dim=576, kv_planes=1,
                         attention_parameters=187_107_328, intermediate=18_432, vocab=129_280, experts=256,
                         experts_per_token=8, moe_intermediate=2048, shared_intermediate=2048,
                         sparse_layers=58)  # fmt: skip


@pytest.mark.capability("API-28")
def test_the_memory_of_latent_attention_and_a_shared_expert():
    assert DEEPSEEK_V3.all_parameters == pytest.approx(671e9, rel=0.001)
    assert DEEPSEEK_V3.kv_bytes_per_token("bf16") == 61 * 576 * 2
    assert DEEPSEEK_V3.kv_bytes_per_token("int8") == 61 * (576 + 4)
    assert DEEPSEEK_V3.mlp == 18_432, "a dense layer is as wide as eight experts and the shared one"
    eighth = DEEPSEEK_V3.on_one_of(8)
    assert (eighth.heads, eighth.kv_heads, eighth.shared_intermediate) == (16, 1, 256)
    assert eighth.kv_bytes_per_token("bf16") == DEEPSEEK_V3.kv_bytes_per_token("bf16"), "each device has all latents"


@pytest.mark.capability("API-28")
def test_a_feed_forward_without_a_gate_has_two_matrices():
    starcoder = ModelShape(layers=32, hidden=4608, heads=36, kv_heads=4, head_dim=128, intermediate=18_432,
                           vocab=49_152, tied=True, gated=False)  # fmt: skip
    assert starcoder.all_parameters == pytest.approx(7.17e9, rel=0.01)
    assert len(starcoder.projections) == 6


@pytest.mark.capability("ML-11", "KV-5")
def test_slots_have_room_for_experts_only_if_asked_for():
    attention = 48 * 16 * ((2048 + 4096) + 2 * (2048 + 512) + (4096 + 2048)) * 2
    experts = 48 * 16 * 128 * 3 * (2048 + 768) * 2
    assert adapter_slot_bytes(QWEN3_30B, 16, "bf16") == attention == pytest.approx(27e6, rel=0.02)
    assert adapter_slot_bytes(QWEN3_30B, 16, "bf16", of_experts=True) == attention + experts
    assert attention + experts == pytest.approx(1.69e9, rel=0.01)
    assert adapter_slot_bytes(LLAMA_8B, 16, "bf16", of_experts=True) == adapter_slot_bytes(LLAMA_8B, 16, "bf16")

    needs = replace(CHAT, max_adapters=8, max_rank=16)
    found = [footprint(QWEN3_30B, replace(needs, lora_experts=on)).adapters for on in (False, True)]
    assert found == [8 * attention, 8 * (attention + experts)]


@pytest.mark.capability("ML-11", "KV-5")
def test_room_for_experts_that_does_not_fit_is_named():
    needs = replace(CHAT, max_adapters=8, max_rank=16, lora_experts=True)
    found = plan(QWEN3_30B, needs, memory_bytes=70 * GIB)
    assert isinstance(found, DoesNotFit)
    assert "set lora.experts to false" in found.message
    assert isinstance(plan(QWEN3_30B, replace(needs, lora_experts=False), memory_bytes=70 * GIB), Fits)


@pytest.mark.capability("API-21")
def test_experts_are_divided_between_devices():
    half = MIXTRAL.on_one_of(2)
    assert half.moe_intermediate == 14_336 // 2
    router = 32 * 4096 * 8  # each device has the whole router
    assert 2 * half.linear_parameters == MIXTRAL.linear_parameters + router
