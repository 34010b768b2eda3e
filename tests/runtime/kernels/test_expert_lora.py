"""Adapters in experts: both forms of the experts against matrices with the adapter merged in."""

from dataclasses import replace

import pytest
import torch

from slipway_runtime.kernels import reference
from slipway_runtime.kernels.reference_experts import ExpertWeights, mix_experts
from slipway_runtime.layers.expert_lora import PROJECTIONS, ExpertLora
from slipway_runtime.layers.experts import GroupedExperts, StackedExperts
from slipway_runtime.layers.matmul import Dense

EXPERTS, HIDDEN, INNER, RANK = 5, 24, 20, 3
CPU = torch.device("cpu")


def a_slot(ranks: tuple[int, int, int], *, tile: int = 0) -> tuple[ExpertLora, list[torch.Tensor]]:
    """Slot 1 of three is filled; and the change of gate, up and down of each expert."""
    lora = ExpertLora(EXPERTS, HIDDEN, INNER, num_slots=3, max_rank=4, dtype=torch.float32, device=CPU, tile=tile)
    sizes, changes = ((HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN)), []
    for projection, ((inputs, outputs), rank) in enumerate(zip(sizes, ranks, strict=True)):
        a, b = torch.randn(EXPERTS, rank, inputs) * 0.3, torch.randn(EXPERTS, rank, outputs) * 0.3
        if rank:
            lora.write(projection, 1, a, b)
        changes.append(torch.einsum("ero,eri->eoi", b, a))
    return lora, changes


@pytest.mark.capability("ML-11")
@pytest.mark.parametrize("form", ["grouped on a CPU", "one tensor, as on a GPU"])
@pytest.mark.parametrize("ranks", [(RANK, RANK, RANK), (4, 0, 1), (0, 0, 2)], ids=str)
@pytest.mark.parametrize("gpt_oss", [False, True])
@pytest.mark.parametrize("tile", [0, 4])
def test_tokens_with_an_adapter_are_computed_as_by_merged_matrices(form, ranks, gpt_oss, tile):
    torch.manual_seed(4)
    of = ExpertWeights(
        torch.randn(EXPERTS, 2 * INNER, HIDDEN) / HIDDEN**0.5,
        torch.randn(EXPERTS, HIDDEN, INNER) / INNER**0.5,
        torch.randn(EXPERTS, 2 * INNER) if gpt_oss else None,
        torch.randn(EXPERTS, HIDDEN) if gpt_oss else None,
        1.0 if gpt_oss else None,
    )
    lora, (gate, up, down) = a_slot(ranks, tile=tile)
    merged = replace(of, gate_up=of.gate_up + torch.cat((gate, up), dim=1), down=of.down + down)
    x, weights = torch.randn(13, HIDDEN), torch.rand(13, 2)
    chosen = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(13)])
    experts: GroupedExperts | StackedExperts = StackedExperts(of, reference)
    if form == "grouped on a CPU":
        pairs = [(Dense(g), Dense(d)) for g, d in zip(of.gate_up, of.down, strict=True)]
        biases = (of.gate_up_bias, of.down_bias) if gpt_oss else None
        experts = GroupedExperts(pairs, reference, biases=biases, limit=of.limit)
    assert experts.sizes == (EXPERTS, HIDDEN, INNER)
    expected = mix_experts(x, weights, chosen, merged)
    torch.testing.assert_close(experts.with_adapter(x, weights, chosen, lora, 1), expected, rtol=1e-4, atol=1e-5)
    base = experts(x, weights, chosen)
    assert not torch.allclose(base, expected, atol=1e-2)
    lora.clear(1)
    assert torch.equal(experts.with_adapter(x, weights, chosen, lora, 1), base)
    assert not lora.slots


@pytest.mark.capability("ML-11", "API-19")
def test_with_tiles_a_row_does_not_depend_on_the_others():
    torch.manual_seed(5)
    lora, _ = a_slot((RANK, RANK, RANK), tile=16)
    x = torch.randn(41, HIDDEN)
    whole, alone = torch.zeros(41, 2 * INNER), torch.zeros(41, 2 * INNER)
    lora.add(x, whole, (0, 1), 1, 2)
    for row in range(41):
        lora.add(x[row : row + 1], alone[row : row + 1], (0, 1), 1, 2)
    assert torch.equal(whole, alone)
    assert PROJECTIONS == ("gate_proj", "up_proj", "down_proj")
