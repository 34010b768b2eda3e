"""Draws and masks in Triton against their definitions."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from slipway_runtime.kernels import penalties, reference_sampling, sampling

SEEDS = torch.tensor([1, 2, 2**40 + 3, -(2**63), 2**63 - 1, -1])
POSITIONS = torch.tensor([0, 5, 5, 10**9, 7, 8])
KINDS = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.3},
    "top-k": {"top_k": 7},
    "top-k of one": {"top_k": 1, "temperature": 3.0},
    "top-k beyond the vocabulary": {"top_k": 5000},
    "top-p": {"top_p": 0.6},
    "nothing of top-p": {"top_p": 0.0},
    "nearly all of top-p": {"top_p": 0.999, "temperature": 2.0},
    "min-p": {"min_p": 0.05},
    "all of them": {"temperature": 1.5, "min_p": 0.01, "top_k": 30, "top_p": 0.8},
}


def columns(kinds: list[dict[str, float]], device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    def column(name: str, default: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([kind.get(name, default) for kind in kinds], dtype=dtype, device=device)

    return {
        "temperature": column("temperature", 1.0),
        "top_k": column("top_k", 0, torch.int64),
        "top_p": column("top_p", 1.0),
        "min_p": column("min_p", 0.0),
        "seeds": SEEDS.repeat(len(kinds))[: len(kinds)].to(device),
        "positions": POSITIONS.repeat(len(kinds))[: len(kinds)].to(device),
    }


@triton.jit
def _hashes(seeds, positions, out, N: tl.constexpr):  # noqa: N803  a constant
    row = tl.program_id(0)
    token = tl.arange(0, N)
    bits = sampling._hash(tl.load(seeds + row), tl.load(positions + row), token)
    tl.store(out + row * N + token, bits.to(tl.int64))


@pytest.mark.capability("KN-6")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_the_noise_is_hashed_to_the_same_integers_bit_by_bit(device):
    out = torch.zeros(len(SEEDS), 256, dtype=torch.int64, device=device)
    _hashes[(len(SEEDS),)](SEEDS.to(device), POSITIONS.to(device), out, N=256)
    assert torch.equal(out.cpu(), reference_sampling.hashed(SEEDS, POSITIONS, torch.arange(256)[None, :]))


@pytest.mark.capability("KN-6")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("vocabulary", [5, 300])
def test_draws_what_the_reference_draws_in_one_mixed_batch(vocabulary, device, monkeypatch):
    monkeypatch.setattr(sampling, "BLOCK", 256)  # two tiles, the last not full
    torch.manual_seed(0)
    kinds = list(KINDS.values())
    logits = torch.randn(len(kinds), vocabulary + 20) * 2
    logits[:, 2] = float("-inf")  # as a grammar leaves it
    logits[:, vocabulary:] = 100.0  # of a padded vocabulary, as the worker cuts it: read, and never drawn
    logits = logits[:, :vocabulary]
    assert sampling.readable_columns(logits) % 16 == 0
    expected = reference_sampling.sample(logits, **columns(kinds))
    sampled = sampling.sample(logits.to(device), **columns(kinds, device)).cpu()
    assert sampled.dtype == torch.int64
    assert sampled.tolist() == expected.tolist()


@pytest.mark.capability("KN-6")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("name", ["top-k", "top-p", "min-p", "all of them"])
@pytest.mark.parametrize("candidates", [64, 2])
def test_keeps_the_tokens_that_the_reference_keeps(name, candidates, device, monkeypatch):
    """Finding 6: among few candidates of each tile, or, where they do not suffice, in the whole row."""
    torch.manual_seed(1)
    kind, scores = KINDS[name], torch.randn(200).to(device) * 2
    values = columns([kind], device)
    monkeypatch.setattr(sampling, "BLOCK", 64)
    monkeypatch.setattr(sampling, "CANDIDATES", candidates)
    thresholds, found = sampling.find_thresholds(
        scores[None], *(values[column] for column in ("temperature", "top_k", "top_p", "min_p"))
    )
    assert found.item() == (candidates == 64)
    scaled = scores.cpu()[None] / values["temperature"].cpu()[:, None]
    kept, ids, _ = reference_sampling._keep(scaled, *(values[c].cpu() for c in ("top_k", "top_p", "min_p")), 200)
    expected = set(ids[0, ~kept[0].isneginf()].tolist())
    assert set(np.flatnonzero((scaled[0] >= thresholds.cpu()[0]).numpy()).tolist()) == expected
    assert 1 < len(expected) < 100


@pytest.mark.capability("KN-6")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("neighbours", [False, True], ids=["likely tokens anywhere", "likely tokens side by side"])
def test_the_threshold_of_a_typical_row_is_found_among_the_candidates(neighbours, device):
    """The fast path: the whole row is read once. Nothing showed that it is taken.

    A text model's next token: the probability of the n-th likeliest falls as n ** -2, its entropy is 1.6 nats.
    """
    # Two tiles, the last one nearly empty: a further one runs the same code, for seconds in the interpreter.
    vocabulary, kinds = 2100, [
        {"top_p": 0.95}, {"top_k": 40}, {"min_p": 0.01, "top_k": 99, "top_p": 0.95, "temperature": 0.7}, {"top_p": 0.9},
    ]  # fmt: skip
    settings = {name: columns(kinds, device)[name] for name in ("temperature", "top_k", "top_p", "min_p")}
    falling = -2.0 * torch.arange(1, vocabulary + 1).log()
    places = torch.arange(vocabulary) if neighbours else torch.randperm(
        vocabulary, generator=torch.Generator().manual_seed(0)
    )  # fmt: skip
    logits = torch.empty(len(kinds), vocabulary).index_copy_(1, places, falling.expand(len(kinds), -1)).to(device)
    logits[-1] = torch.randn(vocabulary, generator=torch.Generator().manual_seed(0)).to(device)
    _, found = sampling.find_thresholds(logits, **settings)
    assert found.tolist() == [1, 1, 1, 0], "but for noise: more tokens than there are candidates"


@pytest.mark.parametrize(("columns", "padding", "readable"), [(5, 0, 5), (5, 10, 5), (5, 11, 16), (32, 0, 32)])
def test_no_row_is_read_beyond_its_padding(columns, padding, readable):
    assert sampling.readable_columns(torch.zeros(3, columns + padding)[:, :columns]) == readable


def test_the_last_row_is_not_read_beyond_its_memory():
    rows = torch.zeros(2 * 16 + 5).as_strided((3, 5), (16, 1))
    assert sampling.readable_columns(rows[:2]) == 16
    assert sampling.readable_columns(rows) == 5


@pytest.mark.capability("KN-6")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_of_equal_scores_at_the_threshold_all_are_kept(device):
    scores = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0, -1.0]], device=device)
    values = columns([{"top_k": 2}], device)
    thresholds, _ = sampling.find_thresholds(
        scores, *(values[column] for column in ("temperature", "top_k", "top_p", "min_p"))
    )
    assert thresholds.item() == 1.0


@pytest.mark.capability("SO-1")
@pytest.mark.parametrize("words", [1, 3, 4])
@pytest.mark.parametrize("implementation", [reference_sampling, sampling], ids=["reference", "triton"])
def test_masks_bar_what_they_do_not_allow(implementation, words, device):
    """Words narrower and wider than the scores; rows without a mask, and their neighbours in memory, stay."""
    generator = np.random.default_rng(0)
    packed = torch.from_numpy(generator.integers(-(2**31), 2**31, (2, words)).astype(np.int32))
    allowed = np.unpackbits(packed.numpy().view(np.uint8), axis=1, bitorder="little")
    wide = torch.randn(4, 80).to(device)
    before, scores = wide.cpu().clone(), wide[:, :75]
    implementation.apply_bitmask(scores, torch.tensor([3, 1], device=device), packed.to(device))
    expected = before.clone()
    for place, row in ((3, allowed[0]), (1, allowed[1])):
        for token in range(75):
            if token >= len(row) or not row[token]:
                expected[place, token] = float("-inf")
    assert torch.equal(wide.cpu(), expected)


@pytest.mark.capability("API-6")
@pytest.mark.parametrize("vocabulary", [5, 300, 5000])
def test_penalties_are_those_of_the_definition_and_leave_other_rows_alone(vocabulary, device):
    """Finding C12: some 25 launches for every 55 rows, and copies of scores and counts."""
    generator = torch.Generator().manual_seed(vocabulary)
    wide = torch.randn(5, vocabulary + 3, generator=generator)
    counts = torch.randint(0, 3, (7, vocabulary), generator=generator, dtype=torch.int32)
    counts += reference_sampling.IN_PROMPT * torch.randint(0, 2, (7, vocabulary), generator=generator).int()
    arguments = (
        torch.tensor([4, 0, 2]), counts, torch.tensor([6, 1, 0]), torch.tensor([1.3, 1.0, 0.8]),
        torch.tensor([0.0, 0.7, -0.5]), torch.tensor([0.2, 0.0, 1.5]),
    )  # fmt: skip
    expected, got = wide.clone(), wide.clone().to(device)
    reference_sampling.penalize_rows(expected[:, :vocabulary], *arguments)
    penalties.penalize_rows(got[:, :vocabulary], *(one.to(device) for one in arguments))
    assert not torch.equal(expected, wide)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(got[[1, 3]].cpu(), wide[[1, 3]])
