"""The definitions, and the compiled kernels beside them, against the plainest possible arithmetic."""

import math

import numpy as np
import pytest
import torch

from slipway_runtime.kernels import reference, reference_attention
from tests.runtime.paging import by_slot, paged


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None = None
) -> torch.Tensor:
    """q: (n, Hq, D), the last n tokens of k, v: (length, Hkv, D)."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    length, new = k.shape[0], q.shape[0]
    keys, queries = torch.arange(length)[None, :], torch.arange(length - new, length)[:, None]
    visible = (keys <= queries) & (keys > queries - (window or length))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -math.inf).softmax(-1), v).flatten(1)


@pytest.mark.parametrize(
    ("groups", "block_size", "window"),
    [(1, 1, None), (2, 4, None), (4, 16, None), (5, 16, None), (8, 4, None), (2, 4, 1), (3, 16, 9), (1, 4, 40)],
)
@pytest.mark.parametrize(
    "work",  # (past, new) of each row; rows of one new token first
    [
        [(0, 1)],
        [(16, 1)],
        [(15, 1), (15, 1), (15, 1)],
        [(3, 1), (4, 1), (5, 1), (70, 1), (1, 1), (0, 1)],
        [(0, 7)],
        [(0, 33), (0, 2)],
        [(31, 1), (5, 1), (10, 20), (0, 9), (63, 2)],
        [(5, 150)],
    ],
    ids=str,
)
def test_paged_attention_is_attention(groups, block_size, work, window, kernels):
    torch.manual_seed(0)
    kv_heads, head_dim, scale = 2, 8, 0.3
    num_blocks = sum(-(-(past + new) // block_size) for past, new in work) + 1
    shuffled = np.random.default_rng(0).permutation(num_blocks - 1) + 1
    tables = np.zeros((len(work), max(-(-(past + new) // block_size) for past, new in work)), dtype=np.int64)
    cache = torch.zeros(num_blocks * block_size, 2, kv_heads, head_dim)
    cache[block_size:] = 1e4  # what others wrote must not shine through
    queries, fresh, expected, used = [], [], [], 0
    for row, (past, new) in enumerate(work):
        count = -(-(past + new) // block_size)
        tables[row, :count] = shuffled[used : used + count]
        used += count
        kv = torch.randn(past + new, 2, kv_heads, head_dim)
        q = torch.randn(new, kv_heads * groups, head_dim)
        positions = torch.arange(past + new)
        cache[torch.from_numpy(tables[row])[positions // block_size] * block_size + positions % block_size] = kv
        queries.append(q)
        fresh.append(kv[past:])
        expected.append(plain_attention(q, kv[:, 0], kv[:, 1], scale, window))
    plan = kernels.plan_attention(
        np.array([past for past, _ in work]), np.array([new for _, new in work]), tables, block_size, cache
    )
    ours = kernels.paged_attention(torch.cat(queries), torch.cat(fresh), paged(cache, block_size), plan, scale, window)
    torch.testing.assert_close(ours, torch.cat(expected), atol=1e-5, rtol=1e-4)


def test_the_mask_of_a_long_chunk_never_exceeds_a_tile_of_rows():
    masks = reference_attention.chunk_masks(10_000, 1_000, None, torch.zeros(1))
    assert max(mask.shape[0] for mask in masks) == reference_attention.TILE


def test_padding_of_a_batch_stays_below_a_factor_of_two():
    lengths = np.array([1, 17, 40, 100, 900, 1000, 8000])
    plan = reference.plan_attention(
        lengths - 1, np.ones_like(lengths), np.ones((7, 500), dtype=np.int64), 16, torch.zeros(1)
    )
    padded = sum(len(group.lengths) * group.longest for group in plan.groups)
    assert padded <= 2 * lengths.sum() + 16 * len(lengths)


@pytest.mark.capability("API-19")
@pytest.mark.parametrize("size", [32, 128, 576, 1000])
def test_the_norm_of_a_row_or_of_a_head_depends_on_no_other(size):
    generator = torch.Generator().manual_seed(0)
    weight, heads = torch.randn(size, generator=generator), torch.randn(41, 7, size, generator=generator) * 3
    rows, some = heads[:, 0].contiguous(), heads[:, 2:5]  # heads lie inside wider rows
    of_all, of_heads = reference.rms_norm(rows, weight, 1e-5), reference.rms_norm(some, weight, 1e-5)
    for count in (1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 40):
        assert torch.equal(reference.rms_norm(rows[1 : 1 + count], weight, 1e-5), of_all[1 : 1 + count])
        assert torch.equal(reference.rms_norm(some[1 : 1 + count], weight, 1e-5), of_heads[1 : 1 + count])


@pytest.mark.parametrize("size", [6, 16, 37])
def test_norms_and_activation_are_what_they_say(kernels, size):
    torch.manual_seed(0)
    x, added, weight = torch.randn(5, size), torch.randn(5, size), torch.randn(size)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), plain_norm(x, weight))
    stream = x.clone()
    torch.testing.assert_close(kernels.add_rms_norm(added, stream, weight, 1e-5), plain_norm(x + added, weight))
    assert torch.equal(stream, x + added)
    gate, up = torch.randn(5, size) * 30, torch.randn(5, size)
    torch.testing.assert_close(kernels.swiglu(torch.cat((gate, up), -1)), gate * torch.sigmoid(gate) * up)


def plain_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def test_the_norm_of_half_precision_is_computed_in_float32():
    torch.manual_seed(0)
    x, weight = torch.randn(5, 12), torch.randn(12)
    half = reference.rms_norm(x.bfloat16(), weight.bfloat16(), 1e-5)
    torch.testing.assert_close(half.float(), plain_norm(x, weight), atol=0.05, rtol=0.02)


def test_rotates_queries_and_keys_and_stores_keys_and_values(kernels):
    torch.manual_seed(0)
    qkv = torch.randn(3, 2 + 1 + 1, 4)
    before = qkv.clone()
    angles = torch.rand(3, 2)
    cos = torch.cat((angles.cos(), angles.cos()), -1)[:, None]
    sin = torch.cat((-angles.sin(), angles.sin()), -1)[:, None]
    pages = torch.zeros(5, 2, 1, 2, 4)
    q = kernels.rope_and_store(qkv, cos, sin, pages, torch.tensor([7, 2, 9]), 2)
    cache = by_slot(pages)

    def turned(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.complex(x[..., :2].contiguous(), x[..., 2:].contiguous())
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat((pairs.real, pairs.imag), -1)

    torch.testing.assert_close(q, turned(before[:, :2]))
    torch.testing.assert_close(cache[[7, 2, 9], 0], turned(before[:, 2:3]))
    assert torch.equal(cache[[7, 2, 9], 1], before[:, 3:])
    assert cache.abs().sum(dim=(1, 2, 3)).count_nonzero() == 3, "no other slot is touched"
