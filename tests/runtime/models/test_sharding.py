"""A model cut between two ranks computes what the whole one does."""

from pathlib import Path

import pytest
import torch

from slipway_runtime.kernels.rounding import quantize
from slipway_runtime.models.checkpoint import Checkpoint
from slipway_runtime.models.config import ModelRefusedError, read_config
from slipway_runtime.models.decoder import load_decoder
from slipway_runtime.models.sharding import Share, part_of
from tests.runtime.checkpoints import a_checkpoint
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
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "swiglu_limit": 1.5}),
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


@pytest.mark.capability("DD-3", "API-21")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_two_ranks_are_those_of_one(family, tmp_path):
    kind, shape = FAMILIES[family]
    a_checkpoint(tmp_path, kind, **shape)
    assert max(differences(Machine(tmp_path, rows=3), Shards(tmp_path, rows=3), 97)) < 1e-5


@pytest.mark.capability("DD-3", "QZ-4")
@pytest.mark.parametrize("name", ["awq", "gptq, in the order of activations", "fp8, blocks", "int8, W8A8"])
def test_a_quantized_checkpoint_is_divided_like_its_numbers(name, tmp_path):
    """o and down become numbers on each rank; rows of the others keep their codes, whose inputs are rounded."""
    a_quantized_checkpoint(tmp_path, *FORMATS[name])
    assert max(differences(Machine(tmp_path, rows=3), Shards(tmp_path, rows=3), 97)) < 0.1


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

    def load(share: Share) -> list[list[tuple[torch.Tensor, torch.Tensor | None]]]:
        with Checkpoint(tmp_path, torch.float32, CPU) as checkpoint:
            decoder = load_decoder(config, checkpoint, None, 100, torch.float32, CPU, share=share)  # type: ignore[arg-type]
        return [[(linear.matmul.weight, linear.bias) for linear in layer.linears] for layer in decoder.layers]

    for whole, *ranks in zip(load(Share()), load(Share(0, 2)), load(Share(1, 2)), strict=True):
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


@pytest.mark.parametrize(
    ("size", "sentence"), [(3, "the 2 key-value heads"), (4, "the 2 key-value heads"), (2, "")], ids=str
)
def test_what_cannot_be_divided_is_refused(size, sentence, tmp_path: Path):
    a_checkpoint(tmp_path)
    config = read_config(tmp_path)
    if sentence:
        with pytest.raises(ModelRefusedError, match=sentence):
            part_of(config, size)
    else:
        own = part_of(config, size)
        assert (own.num_q_heads, own.num_kv_heads, own.intermediate_size) == (2, 1, 40)
