"""A model cut between ranks computes what the whole one does."""

from pathlib import Path

import pytest
import structlog
import torch
from safetensors.torch import save_file

from slipway_runtime.kernels.rounding import quantize
from slipway_runtime.models.checkpoint import Checkpoint
from slipway_runtime.models.config import ModelRefusedError, read_config
from slipway_runtime.models.decoder import load_decoder
from slipway_runtime.models.quantized_checkpoint import WeightReader, parse_quantization
from slipway_runtime.models.sharding import Shard, part_of
from tests.runtime.checkpoints import OTHER_FAMILIES, a_checkpoint
from tests.runtime.machine import CPU, TINY, Machine, Stretch
from tests.runtime.models.test_quantized_checkpoint import FORMATS, a_quantized_checkpoint
from tests.runtime.shards import Shards

FAMILIES = {
    "llama": ("llama", {}),
    "llama with biases, tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral with a window": ("mistral", {"sliding_window": 10}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 4}),
    "phi4-mini": ("phi3", {"hidden_size": 64, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}),
    "gemma2": ("gemma2", {"head_dim": 12, "sliding_window": 9}),
    "gemma3_text": ("gemma3_text", {"head_dim": 12, "num_hidden_layers": 3, "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16,
        "norm_topk_prob": True, "num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "swiglu_limit": 1.5}),
    **OTHER_FAMILIES,
}  # fmt: skip


def some_work(vocabulary: int) -> list[tuple[Stretch, ...]]:
    """A prompt in chunks, beside others, and then single tokens of all."""
    generator = torch.Generator().manual_seed(0)
    long, short, other = (torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in (61, 7, 33))
    return [
        (Stretch(0, long, 0, 25),),
        (Stretch(0, long, 25, 60), Stretch(1, short, 0, 6), Stretch(2, other, 0, 9)),
        (Stretch(0, long, 60, 61), Stretch(1, short, 6, 7), Stretch(2, other, 9, 33)),
    ]


def differences(whole: Machine, shards: Shards, vocabulary: int) -> list[float]:
    """The largest of each step, as a part of the largest score."""
    found = []
    for work in some_work(vocabulary):
        expected, actual = whole.logits(*work), shards.logits(*work)
        found += [float((actual[row] - expected[row]).abs().max() / expected[row].abs().max()) for row in expected]
    return found


@pytest.mark.capability("DD-3", "API-21", "API-28")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_two_ranks_are_those_of_one(family, tmp_path):
    kind, shape = FAMILIES[family]
    a_checkpoint(tmp_path, kind, **shape)
    assert max(differences(Machine(tmp_path, rows=3), Shards(tmp_path, rows=3), 97)) < 1e-5


@pytest.mark.capability("DD-3", "DD-10", "API-21")
@pytest.mark.parametrize(
    ("family", "size", "shape"),
    [
        ("llama", 4, {}),
        ("llama with biases, tied", 4, {"intermediate_size": 45}),  # 45 features over 4 ranks: 12 and three times 11
        ("qwen3", 8, {}),  # 2 ranks for each of 4 key-value heads
        ("phi4-mini", 4, {"num_key_value_heads": 1}),
        ("gpt_oss", 4, {"num_attention_heads": 8}),  # sinks, and biases of all experts
        ("qwen3_moe", 4, {"moe_intermediate_size": 27}),
        ("minimax_m2", 4, {}),  # a norm over all heads, two ranks for each key-value head
        ("qwen2", 3, {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 48}),  # an odd number of ranks
    ],
    ids=lambda value: str(value) if not isinstance(value, dict) else "",
)
def test_more_ranks_than_key_value_heads_compute_the_logits_of_one(family, size, shape, tmp_path):
    """review/engine.md F3: 235B-A22B, with 4 key-value heads, was refused on 8 GPUs."""
    kind, known = FAMILIES[family]
    a_checkpoint(tmp_path, kind, **known | shape)
    shards = Shards(tmp_path, rows=3, size=size)
    assert {machine.caches[0].shape[2] for machine in shards.machines} == {1}, "a rank stores one key-value head"
    assert max(differences(Machine(tmp_path, rows=3), shards, 97)) < 1e-5


# Both cuts by inputs, of 256 columns of o and of 512 of down, lie between two groups of every format.
ALIGNED = {"hidden_size": 256, "intermediate_size": 512}
IN_ORDER = [name for name in FORMATS if "order" not in name]


@pytest.mark.capability("DD-3", "QZ-4")
@pytest.mark.parametrize("sizes", [ALIGNED, {}], ids=["between groups", "within groups"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_checkpoint_is_divided_like_its_numbers(name, sizes, tmp_path):
    a_quantized_checkpoint(tmp_path, *FORMATS[name], sizes=sizes)
    exact = {"rows": 3, "packed": False}
    assert max(differences(Machine(tmp_path, **exact), Shards(tmp_path, **exact), 97)) < 1e-5
    # In the format that this machine multiplies: rows of x are rounded to bytes by parts, or to bfloat16.
    assert max(differences(Machine(tmp_path, rows=3), Shards(tmp_path, rows=3), 97)) < 0.15


@pytest.mark.capability("DD-3", "QZ-4")
@pytest.mark.parametrize("name", ["awq", "fp8, blocks", "int8, W8A16", "gptq, in the order of activations"])
def test_a_quantized_checkpoint_of_two_key_value_heads_is_computed_by_four_ranks(name, tmp_path):
    """review/engine.md F3"""
    a_quantized_checkpoint(tmp_path, *FORMATS[name], sizes={"hidden_size": 64, "intermediate_size": 224})
    exact = {"rows": 3, "packed": False}
    assert max(differences(Machine(tmp_path, **exact), Shards(tmp_path, size=4, **exact), 97)) < 1e-5


@pytest.mark.capability("DD-3", "QZ-4")
@pytest.mark.parametrize("name", IN_ORDER)
def test_each_rank_keeps_the_codes_of_its_part_of_a_quantized_checkpoint(name, tmp_path):
    """o and down became numbers: an AWQ 70B on two GPUs took 48 GB on each where it has 20."""
    a_quantized_checkpoint(tmp_path, *FORMATS[name], sizes=ALIGNED)
    with structlog.testing.capture_logs() as logs:
        whole, shards = Machine(tmp_path, rows=1).decoder, Shards(tmp_path, rows=1)
    assert not logs
    for rank in shards.machines:
        for all_of_it, part in zip(whole.layers, rank.decoder.layers, strict=True):
            for linear, own in zip(all_of_it.linears, part.linears, strict=True):
                assert type(own.matmul) is type(linear.matmul)
                assert 0.48 < own.nbytes / linear.nbytes < 0.56, "a scale a row is as long in each part"


@pytest.mark.capability("DD-3", "QZ-4", "API-21")
@pytest.mark.parametrize("name", ["awq", "fp8, blocks", "int8, W8A16", "gptq, in the order of activations"])
def test_experts_of_a_quantized_checkpoint_are_divided_like_their_numbers(name, tmp_path):
    sizes = {"moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2}
    a_quantized_checkpoint(tmp_path, *FORMATS[name], family="qwen3_moe", sizes=ALIGNED | sizes)
    exact = {"rows": 3, "packed": False}
    assert max(differences(Machine(tmp_path, **exact), Shards(tmp_path, **exact), 97)) < 1e-5
    if name == "awq":
        whole, shards = Machine(tmp_path, rows=1), Shards(tmp_path, rows=1)
        for rank in shards.machines:
            for all_of_it, part in zip(whole.decoder.layers, rank.decoder.layers, strict=True):
                assert part.mlp._experts.nbytes == all_of_it.mlp._experts.nbytes / 2


@pytest.mark.capability("DD-3", "QZ-4")
@pytest.mark.parametrize("name", [*(name for name in FORMATS if "order" in name), "awq"])
def test_codes_that_cannot_be_cut_become_numbers_which_is_said_in_a_sentence(name, tmp_path):
    sizes = ALIGNED if "order" in name else {}  # 160 columns of down: 80 are two and a half groups
    a_quantized_checkpoint(tmp_path, *FORMATS[name], sizes=sizes)
    matrices = "2 matrices" if name == "awq" else "4 matrices"
    mib = (2 * 64 * 80 if name == "awq" else 2 * 256 * (128 + 256)) * 4 / (1 << 20)
    with structlog.testing.capture_logs() as logs:
        Machine(tmp_path, rows=1)
        Shards(tmp_path, rows=1)
    (line,) = logs
    sentence = line["reason"]
    assert sentence.startswith(f"tensor_parallel_size is 2, which cuts {matrices} within their groups of inputs: ")
    assert f"as numbers, {mib:.1f} MiB on each rank" in sentence


@pytest.mark.capability("DD-3", "QZ-4")
@pytest.mark.parametrize("name", ["awq", "gptq, in the order of activations", "fp8, blocks", "int8, W8A16"])
@pytest.mark.parametrize("own", [slice(0, 192), slice(192, 384), slice(128, 384), slice(16, 100)], ids=str)
def test_some_inputs_of_a_quantized_matrix_have_the_numbers_that_they_had(name, own, tmp_path):
    weight = torch.randn(40, 384, generator=torch.Generator().manual_seed(0))
    write, said = FORMATS[name]
    tensors, _ = write(weight)
    save_file(
        {f"m.{key}": one.contiguous() for key, one in tensors.items() if key != "bias"},
        tmp_path / "model.safetensors",
    )
    with Checkpoint(tmp_path, torch.float32, CPU) as checkpoint:
        matrix = WeightReader(checkpoint, parse_quantization(said), torch.float32).matrix("m", 40, 384)
    part = matrix.columns(own)
    if "order" in name or (own == slice(16, 100) and "rows" not in name and name != "int8, W8A16"):
        assert part is None
        return
    assert torch.equal(part.dequantized(), matrix.dequantized()[:, own])
    assert part.codes.untyped_storage().nbytes() == part.codes.nbytes, "the other columns are not kept"
    if name == "fp8, blocks":
        assert part.group == (128 if own.start % 128 == own.stop % 128 == 0 else 64)


@pytest.mark.capability("DD-3")
def test_the_embedded_model_has_the_same_scores_and_the_same_likeliest_tokens():
    whole, shards = Machine(rows=3), Shards(TINY, rows=3)
    assert max(differences(whole, shards, 3072)) < 1e-5
    for work in some_work(3072):
        expected, actual = whole.logits(*work), shards.logits(*work)
        assert all(torch.equal(actual[row].argmax(-1), expected[row].argmax(-1)) for row in expected)


@pytest.mark.capability("DD-3", "QZ-1")
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_rounded_weights_are_no_worse_for_being_cut(kv_dtype, tmp_path):
    a_checkpoint(tmp_path)
    exact, rounded = Machine(tmp_path, rows=3), {"quantization": "int8", "kv_dtype": kv_dtype, "rows": 3}
    alone, cut = Machine(tmp_path, **rounded), Shards(tmp_path, **rounded)

    def error(machine: Machine | Shards) -> float:
        errors = []
        for work in some_work(97):
            expected, actual = exact.logits(*work), machine.logits(*work)
            errors += [float((actual[row] - expected[row]).pow(2).mean()) for row in expected]
        return sum(errors) / len(errors)

    assert error(cut) < 1.25 * error(alone)


@pytest.mark.capability("DD-3")
def test_ranks_have_the_rows_or_the_columns_of_the_whole_matrix_and_nothing_twice(tmp_path):
    a_checkpoint(tmp_path, attention_bias=True, mlp_bias=True)
    config = read_config(tmp_path)

    def load(share: Shard) -> list[list[tuple[torch.Tensor, torch.Tensor | None]]]:
        with Checkpoint(tmp_path, torch.float32, CPU) as checkpoint:
            decoder = load_decoder(config, checkpoint, None, 100, share=share)  # type: ignore[arg-type]
        return [[(linear.matmul.weight, linear.bias) for linear in layer.linears] for layer in decoder.layers]

    for whole, *ranks in zip(load(Shard()), load(Shard(0, 2)), load(Shard(1, 2)), strict=True):
        for (weight, bias), *parts in zip(whole, *ranks, strict=True):
            weights, biases = [part for part, _ in parts], [own for _, own in parts]
            if weights[0].shape[1] < weight.shape[1]:
                assert torch.equal(torch.cat(weights, dim=1), weight)
                assert torch.equal(biases[0], bias)
                assert biases[1] is None, "a sum has it once"
                continue
            by_row = {tuple(row.tolist()): index for index, row in enumerate(weight)}
            places = [[by_row[tuple(row.tolist())] for row in part] for part in weights]
            assert sorted(place for own in places for place in own) == list(range(len(weight)))
            for own, part, part_bias in zip(places, weights, biases, strict=True):
                assert torch.equal(part_bias, bias[own])
                codes, scales = quantize(part, torch.int8)
                assert torch.equal(codes, quantize(weight, torch.int8)[0][own])
                assert torch.equal(scales, quantize(weight, torch.int8)[1][own])


@pytest.mark.capability("DD-3")
def test_a_rank_reads_the_rows_that_are_its_own_and_no_others(tmp_path):
    a_checkpoint(tmp_path)
    told: list[tuple[int, int]] = []
    with Checkpoint(tmp_path, torch.float32, CPU, on_progress=lambda *of: told.append(of)) as checkpoint:
        whole = checkpoint.take("lm_head.weight", 97, 48)
        part = checkpoint.take("lm_head.weight", 97, 48, rows=slice(40, 60))
        with pytest.raises(ModelRefusedError, match="shape"):
            checkpoint.take("lm_head.weight", 96, 48, rows=slice(0, 1))
        checkpoint._left.clear()
    assert torch.equal(part, whole[40:60])
    assert checkpoint.bytes == whole.nbytes + part.nbytes
    assert told[-1][0] == 2 * whole.nbytes, "what others read counts as read"


@pytest.mark.capability("DD-3", "API-19")
def test_two_deterministic_ranks_give_a_row_the_same_scores_in_any_company(tmp_path):
    a_checkpoint(tmp_path)
    shards = Shards(tmp_path, deterministic=True, rows=3)
    *_, last = work = some_work(97)
    together = [shards.logits(*step) for step in work][-1]
    for stretch in last:
        tokens = stretch.tokens
        alone = shards.logits(Stretch(stretch.row, tokens, 0, stretch.end))[stretch.row]
        assert torch.equal(alone[stretch.start :], together[stretch.row])


@pytest.mark.parametrize("size", [3, 6, 8])
def test_heads_that_cannot_be_divided_are_refused_with_the_numbers_that_can(size, tmp_path: Path):
    """review/engine.md F3"""
    a_checkpoint(tmp_path)
    expected = (
        f"tensor_parallel_size is {size}: a rank needs the same number of the 4 query heads, and whole heads or a copy "
        "of one of the 2 key-value heads; use 2, 4 or 1"
    )
    with pytest.raises(ModelRefusedError) as refused:
        part_of(read_config(tmp_path), size)
    assert str(refused.value) == expected


@pytest.mark.parametrize(("size", "own"), [(1, (4, 2, 80)), (2, (2, 1, 40)), (4, (1, 1, 20))], ids=str)
def test_a_rank_has_whole_heads_or_a_copy_of_a_key_value_head(size, own, tmp_path: Path):
    a_checkpoint(tmp_path)
    part = part_of(read_config(tmp_path), size)
    assert (part.num_q_heads, part.num_kv_heads, part.intermediate_size) == own


@pytest.mark.parametrize("count", [1, 45, 80, 2880, 8960, 14336, 18944])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 16])
def test_inner_features_are_cut_once_into_parts_of_similar_size(count, ranks):
    """review/engine.md F3: Qwen2.5-7B has 18,944 inner features, and gpt-oss 2,880 in groups of 32."""
    parts = [Shard(rank, ranks).of_features(count) for rank in range(ranks)]
    assert [index for part in parts for index in range(count)[part]] == list(range(count))
    sizes = [part.stop - part.start for part in parts]
    assert sizes[0] == max(sizes) <= max(-(-count // ranks), 1.125 * count / ranks)
    if count == 2880 and ranks <= 8:
        assert all(part.start % 32 == part.stop % 32 == 0 for part in parts), "MXFP4 codes stay codes"


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_query_heads_are_on_the_ranks_of_their_key_value_heads(kv_heads, ranks):
    """review/engine.md F3"""
    heads = 16
    for rank in range(ranks):
        share = Shard(rank, ranks)
        queries, keys = range(heads)[share.of_heads(heads)], range(kv_heads)[share.of_heads(kv_heads)]
        assert sorted({query * kv_heads // heads for query in queries}) == list(keys)
