"""The grouped products of a mixture of experts, and the activations around them, against their definitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway_runtime.kernels import expert_rows, experts, norms, reference
from slipway_runtime.kernels.reference_experts import (
    ByteMatrices,
    ExpertWeights,
    Mxfp4Matrices,
    choose_experts,
    gated,
    mix_experts,
)
from slipway_runtime.layers.experts import GroupedExperts
from slipway_runtime.layers.matmul import Dense
from slipway_runtime.layers.quantized_weight import QuantizedWeight
from slipway_runtime.models.expert_loader import stack_experts


def some_experts(count: int, inner: int, hidden: int, *, biased: bool, limit: float | None) -> ExpertWeights:
    return ExpertWeights(
        torch.randn(count, 2 * inner, hidden) / hidden**0.5,
        torch.randn(count, hidden, inner) / inner**0.5,
        torch.randn(count, 2 * inner) if biased else None,
        torch.randn(count, hidden) if biased else None,
        limit,
    )


def one_by_one(x, weights, chosen, of: ExpertWeights):
    """Each token alone, each of its experts after the other, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            both = of.gate_up[expert].double() @ x[token].double()
            if of.gate_up_bias is not None:
                both += of.gate_up_bias[expert]
            gate, up = both.chunk(2)
            if of.limit is None:
                inner = gate * torch.sigmoid(gate) * up
            else:
                gate, up = gate.clamp(max=of.limit), up.clamp(-of.limit, of.limit)
                inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            y = of.down[expert].double() @ inner
            out[token] += weight * (y if of.down_bias is None else y + of.down_bias[expert])
    return out


@pytest.mark.capability("API-21")
@pytest.mark.parametrize("kernels", ["reference", "grouped on a CPU", "triton"])
@pytest.mark.parametrize(
    ("tokens", "count", "per_token", "inner", "hidden", "gpt_oss"),
    [(1, 4, 2, 24, 40, False), (37, 5, 3, 70, 33, True), (9, 16, 1, 8, 64, False), (150, 2, 2, 12, 20, True)],
)
def test_experts_compute_what_each_would_alone(kernels, tokens, count, per_token, inner, hidden, gpt_oss):
    torch.manual_seed(tokens)
    of = some_experts(count, inner, hidden, biased=gpt_oss, limit=1.0 if gpt_oss else None)
    x = torch.randn(tokens, hidden)
    weights, chosen = choose_experts(torch.randn(tokens, count), per_token, normalize=True)
    if kernels == "triton":
        ours = experts.mix_experts(x, weights, chosen, of)
    elif kernels == "reference":
        ours = mix_experts(x, weights, chosen, of)
    else:
        pairs = [(Dense(gate_up), Dense(down)) for gate_up, down in zip(of.gate_up, of.down, strict=True)]
        biases = None if of.gate_up_bias is None else (of.gate_up_bias, of.down_bias)
        ours = GroupedExperts(pairs, reference, biases=biases, limit=of.limit)(x, weights, chosen)
    torch.testing.assert_close(ours.double(), one_by_one(x, weights, chosen, of), atol=2e-5, rtol=1e-4)


def in_mxfp4(count: int, out_size: int, in_size: int) -> Mxfp4Matrices:
    """All 16 codes, and powers of two around 1."""
    codes = torch.randint(0, 256, (count, out_size, in_size // 2), dtype=torch.uint8)
    return Mxfp4Matrices(
        codes, torch.randint(122, 127, (count, out_size, in_size // 32), dtype=torch.uint8), torch.float32
    )


@pytest.mark.capability("API-21", "QZ-4")
@pytest.mark.parametrize(
    ("tokens", "count", "per_token", "inner", "hidden"), [(1, 4, 2, 32, 64), (37, 5, 3, 96, 160), (150, 2, 2, 32, 32)]
)
def test_codes_are_multiplied_as_the_numbers_that_they_mean(tokens, count, per_token, inner, hidden):
    torch.manual_seed(tokens)
    biases = torch.randn(count, 2 * inner), torch.randn(count, hidden)
    of = ExpertWeights(in_mxfp4(count, 2 * inner, hidden), in_mxfp4(count, hidden, inner), *biases, 1.0)
    assert of.nbytes == count * 3 * inner * hidden * 17 // 32 + 4 * count * (2 * inner + hidden)
    numbers = (torch.stack([matrices[expert] for expert in range(count)]) for matrices in (of.gate_up, of.down))
    x = torch.randn(tokens, hidden) / hidden**0.5
    weights, chosen = choose_experts(torch.randn(tokens, count), per_token, normalize=True)
    expected = one_by_one(x, weights, chosen, ExpertWeights(*numbers, *biases, 1.0))
    for ours in (experts.mix_experts(x, weights, chosen, of), mix_experts(x, weights, chosen, of)):
        torch.testing.assert_close(ours.double(), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.capability("API-21", "QZ-4")
@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("group", [0, 64, 128])
def test_one_byte_codes_of_experts_are_multiplied_with_the_factors_of_their_groups(codes, group):
    """group: 0, a factor for each row."""
    torch.manual_seed(group)
    count, inner, hidden, tokens = 3, 128, 256, 21

    def some(out_size: int, in_size: int) -> list[QuantizedWeight]:
        size = group or in_size
        return [
            QuantizedWeight(
                (torch.randn(out_size, in_size) * 30).clamp(-120, 120).to(codes),
                torch.rand(out_size, in_size // size) / 300, size, torch.float32,
            )
            for _ in range(count)
        ]  # fmt: skip

    pairs = some(2 * inner, hidden), some(hidden, inner)
    stacked = [stack_experts(matrices) for matrices in pairs]
    assert all(isinstance(one, ByteMatrices) and one.codes.dtype == codes for one in stacked)
    of = ExpertWeights(*stacked)
    assert of.nbytes < count * 3 * inner * hidden * 1.07
    numbers = ExpertWeights(*(torch.stack([one.dequantized() for one in matrices]) for matrices in pairs))
    x = torch.randn(tokens, hidden)
    weights, chosen = choose_experts(torch.randn(tokens, count), 2, normalize=True)
    expected = one_by_one(x, weights, chosen, numbers)
    for ours in (experts.mix_experts(x, weights, chosen, of), mix_experts(x, weights, chosen, of)):
        torch.testing.assert_close(ours.double(), expected, atol=2e-4, rtol=1e-3)


def test_experts_whose_codes_are_not_multiplied_become_numbers():
    plain = torch.randn(2, 64)
    in_four_bits = QuantizedWeight(torch.zeros(2, 64, dtype=torch.uint8), torch.ones(2, 2), 32, torch.float32, bits=4)
    small_groups = QuantizedWeight(torch.zeros(2, 64, dtype=torch.int8), torch.ones(2, 2), 32, torch.float32)
    for matrices in ([plain, plain], [in_four_bits] * 2, [small_groups] * 2, [small_groups, plain]):
        assert isinstance(stack_experts(matrices), torch.Tensor)


@pytest.mark.capability("QZ-4")
def test_every_code_has_its_number_at_every_power_of_two():
    """One expert whose matrix picks a number: x is a unit vector."""
    powers = torch.tensor([0, 1, 2, 126, 127, 128, 200, 250], dtype=torch.uint8)
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16).repeat(1, len(powers), 1)
    matrices = Mxfp4Matrices(codes, powers.repeat_interleave(16).view(1, -1, 1), torch.float32)
    blocks = expert_rows.sort_by_expert(torch.zeros(32, 1, dtype=torch.int32), 1)
    found = experts._multiply(torch.eye(32), matrices, None, blocks, 32, 1)
    assert torch.equal(found.T, matrices[0])


@pytest.mark.capability("API-21")
def test_all_tokens_may_choose_the_same_expert():
    torch.manual_seed(0)
    of = some_experts(7, 10, 18, biased=False, limit=None)
    x, chosen = torch.randn(70, 18), torch.full((70, 1), 5)
    weights = torch.ones(70, 1)
    ours = experts.mix_experts(x, weights, chosen, of)
    torch.testing.assert_close(ours, mix_experts(x, weights, chosen, of), atol=2e-5, rtol=1e-4)


@pytest.mark.capability("API-21")
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("tokens", "count", "per_token"), [(1, 4, 4), (5, 128, 8), (3, 33, 1)])
def test_experts_chosen_in_triton_are_those_of_the_reference(tokens, count, per_token, normalize):
    torch.manual_seed(count)
    scores = torch.randn(tokens, count + 3)[:, 1 : count + 1]
    weights, chosen = expert_rows.choose_experts(scores, per_token, normalize=normalize)
    expected_weights, expected = choose_experts(scores, per_token, normalize=normalize)
    assert chosen.tolist() == expected.tolist()
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-5)


def test_scores_that_are_no_numbers_choose_experts_that_there_are():
    scores = torch.tensor([[0.0, float("nan"), 1.0], [float("-inf")] * 3])
    _, chosen = expert_rows.choose_experts(scores, 2, normalize=True)
    assert chosen.min() >= 0
    assert chosen.max() <= 2


@pytest.mark.capability("API-21")
@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=90))
def test_rows_are_sorted_and_cut_into_blocks_as_torch_does(chosen):
    """Every block of an expert once, whichever number it has."""
    experts = torch.tensor(chosen, dtype=torch.int32)[:, None]
    ours = expert_rows.sort_by_expert(experts, 7)
    theirs = expert_rows.sort_many_by_expert(experts, 7, ours.size)
    assert ours.order.tolist() == theirs.order.tolist()
    assert [ours.ends[expert] for expert in set(chosen)] == [theirs.ends[expert] for expert in set(chosen)]
    found, expected = (
        sorted(
            (expert, first)
            for expert, first in zip(blocks.experts.tolist(), blocks.firsts.tolist(), strict=True)
            if expert < 7
        )
        for blocks in (ours, theirs)
    )
    assert found == expected


def test_many_rows_are_sorted_by_torch(monkeypatch):
    monkeypatch.setattr(expert_rows, "MOST_COMPARED", 5)
    torch.manual_seed(0)
    of = some_experts(7, 10, 18, biased=False, limit=None)
    x, chosen, weights = torch.randn(70, 18), torch.randint(7, (70, 2)), torch.rand(70, 2)
    ours = experts.mix_experts(x, weights, chosen, of)
    torch.testing.assert_close(ours, mix_experts(x, weights, chosen, of), atol=2e-5, rtol=1e-4)


def test_the_weights_of_the_chosen_are_those_of_all_unless_they_are_normalized():
    scores = torch.tensor([[0.0, 2.0, 1.0, -3.0]])
    of_all = scores.softmax(-1)[0]
    weights, chosen = choose_experts(scores, 2, normalize=False)
    assert chosen.tolist() == [[1, 2]]
    torch.testing.assert_close(weights[0], of_all[[1, 2]])
    weights, _ = choose_experts(scores, 2, normalize=True)
    torch.testing.assert_close(weights[0], of_all[[1, 2]] / of_all[[1, 2]].sum())


@pytest.mark.parametrize("width", [1, 24, 1030])
def test_activations_in_triton_equal_the_reference(width):
    torch.manual_seed(0)
    gate_up = torch.randn(3, 2 * width) * 4
    torch.testing.assert_close(norms.geglu(gate_up), reference.geglu(gate_up), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(norms.clamped_swiglu(gate_up, 2.0), gated(gate_up, 2.0), atol=1e-5, rtol=1e-5)


def test_geglu_of_the_compiled_kernels_equals_the_reference(kernels):
    torch.manual_seed(0)
    for width in (1, 24, 1030):
        gate_up = torch.randn(3, 2 * width) * 8
        torch.testing.assert_close(kernels.geglu(gate_up), reference.geglu(gate_up), atol=2e-5, rtol=2e-5)
