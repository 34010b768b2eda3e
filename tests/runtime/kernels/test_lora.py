"""What adapters add to a linear layer: the CPU's way and the Triton kernels against the definition."""

import numpy as np
import pytest
import torch

from slipway_runtime.kernels import lora, reference_lora
from slipway_runtime.kernels.reference_lora import LoraWeights, lora_expand, lora_shrink

IN, OUT, RANK = 40, (24, 8, 8), 12
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
BATCHES = {
    "no adapter": [-1] * 5,
    "one token": [2],
    "one adapter everywhere": [1] * 40,
    "a prompt beside single tokens": [3, -1, 0, *[2] * 33, -1, *[1] * 3],
    "every slot at once, shuffled": [0, 4, -1, 2, 1, 3, 0, 2, -1, 4, 1, 3],
    "every token has one": [0, 4, 2, 1, 3, 0, 2, 4],
    "long and scattered": [0, 1, 2, 4] * 17,
}
MIXED = "every slot at once, shuffled"
every_batch = pytest.mark.parametrize("batch", BATCHES)
every_type = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
# The interpreter is slow, and its dot takes the bits of a bfloat16 for an integer: the whole table needs a GPU.
on_a_device = pytest.mark.parametrize(
    ("device", "dtype", "batch"),
    [
        *(("cpu", torch.float32, batch) for batch in ("no adapter", "a prompt beside single tokens", MIXED)),
        ("cpu", torch.float16, MIXED),
        *(pytest.param("cuda", dtype, batch, marks=pytest.mark.gpu) for dtype in TOLERANCE for batch in BATCHES),
    ],
    indirect=["device"],
)


def some_weights(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> LoraWeights:
    """Five slots: all parts, mixed ranks, some parts only, none at all, the full rank."""
    generator = torch.Generator().manual_seed(7)
    weights = LoraWeights(IN, OUT, num_slots=5, max_rank=RANK, dtype=dtype, device=torch.device(device))
    for slot, ranks in enumerate([(4, 4, 4), (1, 8, 3), (0, 5, 0), (0, 0, 0), (RANK,) * 3]):
        for part, rank in enumerate(ranks):
            if rank:
                a = torch.randn(rank, IN, generator=generator) / IN**0.5
                weights.write(part, slot, a.to(dtype), torch.randn(rank, OUT[part], generator=generator).to(dtype))
    return weights


def some_rows(count: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(count, size, generator=generator).to(dtype) for size in (IN, sum(OUT)))
    y[:, 0] = -0.0  # adding zero to it would show
    return x, y


def defined(x: torch.Tensor, y: torch.Tensor, weights: LoraWeights, slots: np.ndarray) -> torch.Tensor:
    expected = y.clone()
    lora_expand(lora_shrink(x, weights, slots), weights, slots, expected)
    return expected


def check(computed: torch.Tensor, x: torch.Tensor, y: torch.Tensor, weights: LoraWeights, slots: np.ndarray) -> None:
    tolerance = TOLERANCE[x.dtype]
    torch.testing.assert_close(computed, defined(x, y, weights, slots), atol=tolerance, rtol=tolerance)
    untouched = torch.from_numpy(slots < 0)
    bits = {2: torch.int16, 4: torch.int32}[y.element_size()]
    assert torch.equal(computed[untouched].view(bits), y[untouched].view(bits)), "a row without an adapter changed"


@pytest.mark.capability("KN-3")
def test_the_definition_is_the_product_of_the_two_matrices():
    weights, slots = some_weights(), np.array([1, -1, 4])
    x, y = some_rows(3)
    expected = y.clone()
    for token, slot in ((0, 1), (2, 4)):
        dense = torch.cat([weights.b[:, slot, a:b].T @ weights.a[j, :, slot] for j, (a, b) in
                           enumerate(zip(weights.columns, weights.columns[1:], strict=False))])  # fmt: skip
        expected[token] += dense @ x[token]
    torch.testing.assert_close(defined(x, y, weights, slots), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.capability("KN-3")
@every_type
@every_batch
def test_a_cpu_adds_what_the_definition_adds(batch, dtype):
    slots = np.array(BATCHES[batch])
    weights, (x, y) = some_weights(dtype), some_rows(len(slots), dtype)
    computed = y.clone()
    reference_lora.add_lora(x, computed, weights, reference_lora.plan_lora(slots, 5, like=x))
    check(computed, x, y, weights, slots)


@pytest.mark.capability("KN-3")
@every_batch
def test_the_compiled_kernel_adds_what_the_definition_adds(batch, compiled):
    slots = np.array(BATCHES[batch])
    weights, (x, y) = some_weights(), some_rows(len(slots))
    computed = y.clone()
    compiled.add_lora(x, computed, weights, compiled.plan_lora(slots, 5, like=x))
    check(computed, x, y, weights, slots)


@pytest.mark.capability("KN-3")
@on_a_device
def test_triton_adds_what_the_definition_adds(batch, dtype, device, monkeypatch):
    monkeypatch.setattr(lora, "SPLIT", 16)  # three splits, the last not full, and blocks beyond both ends
    monkeypatch.setattr(lora, "BLOCK_IN", 16)
    monkeypatch.setattr(lora, "BLOCK_OUT", 16)
    slots = np.array(BATCHES[batch])
    weights, ours, (x, y) = some_weights(dtype), some_weights(dtype, device), some_rows(len(slots), dtype)
    computed = y.to(device, copy=True)
    lora.add_lora(x.to(device), computed, ours, lora.plan_lora(slots, 5, like=computed))
    check(computed.cpu(), x, y, weights, slots)


@pytest.mark.capability("KN-3")
@pytest.mark.filterwarnings("ignore:.*encountered in matmul:RuntimeWarning")
@pytest.mark.parametrize("implementation", [reference_lora, lora], ids=["reference", "triton"])
def test_an_adapter_that_overflows_harms_nobody_else(implementation, device):
    weights, slots = some_weights(device=device), np.array([0, 1, 2, 4, -1])
    x, y = some_rows(5)
    weights.a[:, :4, 0] = 3e38  # slot 0's products are infinite
    computed = y.to(device, copy=True)
    implementation.add_lora(x.to(device), computed, weights, implementation.plan_lora(slots, 5, like=computed))
    assert not computed[0].isfinite().all()
    torch.testing.assert_close(computed[1:].cpu(), defined(x, y, some_weights(), slots)[1:], atol=1e-5, rtol=1e-5)


@pytest.mark.capability("KN-3")
def test_an_adapter_that_overflows_harms_nobody_else_in_the_compiled_kernel(compiled):
    weights, slots = some_weights(), np.array([0, 1, 2, 4, -1])
    x, y = some_rows(5)
    weights.a[:, :4, 0] = 3e38
    computed = y.clone()
    compiled.add_lora(x, computed, weights, compiled.plan_lora(slots, 5, like=x))
    assert not computed[0].isfinite().all()
    torch.testing.assert_close(computed[1:], defined(x, y, some_weights(), slots)[1:], atol=1e-5, rtol=1e-5)


@pytest.mark.capability("KN-3")
def test_a_slot_is_empty_before_and_after():
    weights = some_weights()
    x, y = some_rows(4)
    slots = np.array([0, 1, 4, 4])
    computed = y.clone()
    for slot in (0, 1, 4):
        weights.clear(slot)
        assert not weights.a[:, :, slot].any()
        assert not weights.b[:, slot].any()
    reference_lora.add_lora(x, computed, weights, reference_lora.plan_lora(slots, 5, like=x))
    assert torch.equal(computed, y)


@pytest.mark.capability("API-19")
@pytest.mark.parametrize("rank", [3, 8, 12])
def test_with_tiles_a_token_does_not_depend_on_its_neighbours(rank, kernels):
    generator = torch.Generator().manual_seed(rank)
    weights = LoraWeights(500, (96, 31), num_slots=3, max_rank=rank, dtype=torch.float32, device=torch.device("cpu"))
    for part, size in enumerate((96, 31)):
        for slot in range(3):
            matrices = (torch.randn(rank, n, generator=generator) for n in (500, size))
            weights.write(part, slot, *matrices)
    x, y = torch.randn(70, 500, generator=generator), torch.randn(70, 127, generator=generator)

    def computed(tokens: list[int], slots: list[int]) -> torch.Tensor:
        out = y[tokens].clone()
        plan = kernels.plan_lora(np.array(slots), 3, like=x, tile=16)
        kernels.add_lora(x[tokens], out, weights, plan)
        return out

    slots = [token * 7 % 4 - 1 for token in range(70)]
    together = computed(list(range(70)), slots)
    backwards = computed(list(range(69, -1, -1)), slots[::-1]).flip(0)
    alone = torch.cat([computed([token], [slot]) for token, slot in enumerate(slots)])
    assert torch.equal(together, backwards)
    assert torch.equal(together, alone)
