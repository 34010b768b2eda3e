"""Draws: keyed, batch-independent, and from the distribution that the parameters describe."""

import math

import pytest
import torch

from slipway_runtime.kernels.reference_sampling import gumbel, penalize, sample

V = 40


def sampled(logits: torch.Tensor, n: int = 4000, **parameters: float) -> torch.Tensor:
    """Frequencies of `n` samples at different positions."""
    tokens = sample(
        logits.expand(n, -1),
        temperature=torch.full((n,), float(parameters.get("temperature", 1.0))),
        top_k=torch.full((n,), int(parameters.get("top_k", 0))),
        top_p=torch.full((n,), float(parameters.get("top_p", 1.0))),
        min_p=torch.full((n,), float(parameters.get("min_p", 0.0))),
        seeds=torch.full((n,), int(parameters.get("seed", 7))),
        positions=torch.arange(n),
    )
    return torch.bincount(tokens, minlength=logits.shape[-1]) / n


def expected(logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0):
    p = (logits / temperature).softmax(-1)
    p = torch.where(p >= min_p * p.max(), p, 0.0)
    if top_k:
        p = torch.where(p >= p.topk(top_k).values[-1], p, 0.0)
    p = p / p.sum()
    order = p.argsort(descending=True)
    before = p[order].cumsum(-1) - p[order]
    keep = torch.zeros_like(p)
    keep[order[(before < top_p)]] = 1
    return p * keep / (p * keep).sum()


@pytest.mark.capability("API-6")
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 5},
        {"top_p": 0.6},
        {"top_k": 10, "top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.5, "min_p": 0.05, "top_k": 20, "top_p": 0.9},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(parameters):
    logits = torch.randn(V, generator=torch.Generator().manual_seed(1)) * 2
    wanted, got = expected(logits, **parameters), sampled(logits, **parameters)
    assert got[wanted == 0].sum() == 0, "nothing outside the kept set is ever sampled"
    assert (got - wanted).abs().max() < 4 * math.sqrt(0.25 / 4000)


@pytest.mark.capability("API-6")
def test_a_temperature_of_zero_takes_the_likeliest():
    logits = torch.randn(V)
    assert sampled(logits, n=50, temperature=0.0)[logits.argmax()] == 1


@pytest.mark.capability("BS-1")
def test_a_row_draws_the_same_alone_and_among_others():
    torch.manual_seed(0)
    logits = torch.randn(6, 1000)
    columns = {
        "temperature": torch.tensor([0.0, 1.0, 0.7, 1.3, 1.0, 5.0]),
        "top_k": torch.tensor([0, 0, 50, 0, 400, 0]),
        "top_p": torch.tensor([1.0, 1.0, 0.9, 0.5, 1.0, 0.999]),  # the last one goes beyond the first candidates
        "min_p": torch.tensor([0.0, 0.0, 0.0, 0.01, 0.0, 0.0]),
        "seeds": torch.tensor([1, 2, 3, -(2**63), 2**63 - 1, 6]),
        "positions": torch.tensor([0, 5, 5, 100, 7, 8]),
    }
    together = sample(logits, **columns)
    for row in range(6):
        alone = sample(logits[row : row + 1], **{name: values[row : row + 1] for name, values in columns.items()})
        assert alone.item() == together[row].item()


def test_the_short_list_and_the_full_sort_draw_the_same(monkeypatch):
    torch.manual_seed(0)
    logits = torch.randn(20, 1000)
    columns = {
        "temperature": torch.full((20,), 2.0), "top_k": torch.zeros(20, dtype=torch.int64),
        "top_p": torch.linspace(0.1, 0.99, 20), "min_p": torch.zeros(20), "seeds": torch.arange(20),
        "positions": torch.arange(20),
    }  # fmt: skip
    short = sample(logits, **columns)
    monkeypatch.setattr("slipway_runtime.kernels.reference_sampling.CANDIDATES", 1000)
    assert torch.equal(short, sample(logits, **columns))


@pytest.mark.capability("API-6")
def test_noise_is_a_function_of_seed_position_and_token():
    ids = torch.arange(5000)[None, :]
    one = gumbel(torch.tensor([1]), torch.tensor([1]), ids)
    assert torch.equal(one, gumbel(torch.tensor([1]), torch.tensor([1]), ids))
    assert torch.equal(one[:, 100:200], gumbel(torch.tensor([1]), torch.tensor([1]), ids[:, 100:200]))
    assert one.isfinite().all()
    assert abs(one.mean().item() - 0.5772) < 0.06
    assert abs(one.var().item() - math.pi**2 / 6) < 0.15
    for seed, position in ((2, 1), (1, 2), (1 + 2**32, 1), (-1, 1)):
        other = gumbel(torch.tensor([seed]), torch.tensor([position]), ids)
        assert abs(torch.corrcoef(torch.cat((one, other)))[0, 1].item()) < 0.06


@pytest.mark.capability("API-6")
def test_penalties_follow_their_definitions():
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5]])
    prompt, output = torch.tensor([[1.0, 0, 0, 0]]), torch.tensor([[0, 2.0, 1.0, 0]])
    none, one = torch.zeros(1), torch.ones(1)
    repeated = penalize(logits, prompt, output, torch.tensor([2.0]), none, none)
    assert repeated.tolist() == [[1.0, -4.0, 0.5, 0.5]]
    assert penalize(logits, prompt, output, one, torch.tensor([0.5]), none).tolist() == [[2.0, -2.5, 0.5, 0.5]]
    assert penalize(logits, prompt, output, one, none, torch.tensor([0.5])).tolist() == [[2.0, -3.0, 0.5, 0.5]]
