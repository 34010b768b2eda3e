"""The Triton kernels of attention against their definition."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from slipway_runtime.kernels import attention_plan, decode_work, kv_pages, reference
from slipway_runtime.kernels import paged_attention as kernels
from tests.runtime.kernels import tolerance
from tests.runtime.paging import paged

TYPES = (torch.float32, torch.float16, torch.bfloat16)
SCALE = 0.3
LARGEST = 5.0  # of some million values of N(0, 1); a score is a sum of head_dim products, so √head_dim times as large
PADDING = (-1, 1)  # a token without a sequence: length 0
ON_GPU = [pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in TYPES]
# The interpreter's dot takes the bits of a bfloat16 for an integer: that type needs a GPU.
every_type = pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.float32), ("cpu", torch.float16), *ON_GPU], indirect=["device"]
)
OUTSIDE = 1 << 28  # a block that is not in the cache: reading it ends the process
EDGES = [(0, 1), (14, 1), (15, 1), (16, 1), (32, 1)]  # lengths 1, 15, 16, 17, 33
MIXED = [(16, 1), PADDING, (69, 1), (0, 7), (15, 18), (100, 33), (0, 2)]  # a past within, at and beyond a tile of keys


@dataclass(frozen=True)
class Step:
    """The inputs of one step's attention. Rows are (past, new), those of one new token first."""

    q: Tensor
    kv: Tensor
    cache: Tensor
    num_computed: np.ndarray
    num_new: np.ndarray
    tables: np.ndarray
    block_size: int

    def reference(self, window: int | None) -> Tensor:
        """By the definition, in float64; padding counts as zero."""
        real = self.num_computed + self.num_new > 0
        tokens = torch.from_numpy(np.repeat(real, self.num_new))
        like = torch.zeros(1, dtype=torch.float64)
        plan = reference.plan_attention(
            self.num_computed[real], self.num_new[real], self.tables[real], self.block_size, like
        )
        out = torch.zeros(len(tokens), self.q.shape[1] * self.q.shape[2], dtype=torch.float64)
        cache = self.cache if kv_pages.is_quantized(self.cache.dtype) else self.cache.double()
        out[tokens] = reference.paged_attention(
            self.q[tokens].double(), self.kv[tokens].double(), cache, plan, SCALE, window
        )
        return out

    @property
    def tolerance(self) -> float:
        """Most that float32 may lose on the way to the result."""
        head_dim = self.q.shape[2]
        return tolerance.of_attention(
            head_dim=head_dim,
            keys=int((self.num_computed + self.num_new).max()),
            scale=SCALE,
            largest_value=LARGEST,
            largest_score=SCALE * LARGEST * math.sqrt(head_dim),
            dtype=self.q.dtype,
        )

    def triton(self, device: torch.device, window: int | None = None) -> Tensor:
        """By the kernels; what a table holds behind the end of its sequence is a trap."""
        used = -(-(self.num_computed + self.num_new) // self.block_size)
        tables = np.where(np.arange(self.tables.shape[1]) < used[:, None], self.tables, OUTSIDE)
        cache = self.cache.to(device)
        plan = decode_work.plan_attention(self.num_computed, self.num_new, tables, self.block_size, cache)
        return kernels.paged_attention(self.q.to(device), self.kv.to(device), cache, plan, SCALE, window).cpu()

    def agrees(self, device: torch.device, window: int | None = None) -> Tensor:
        """Compare both, and return the kernels' own."""
        ours = self.triton(device, window)
        torch.testing.assert_close(ours.double(), self.reference(window), atol=self.tolerance, rtol=0)
        return ours


def a_step(
    work: Sequence[tuple[int, int]],
    *,
    groups: int = 2,
    kv_heads: int = 1,
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
) -> Step:
    torch.manual_seed(0)
    counts = [-(-(past + new) // block_size) for past, new in work]
    shuffled = np.random.default_rng(0).permutation(sum(counts)) + 1
    tables = np.zeros((len(work), max(counts)), dtype=np.int64)
    cache = torch.full(((sum(counts) + 1) * block_size, 2, kv_heads, head_dim), 1e4, dtype=dtype)
    cache[:block_size] = 0
    fresh = []
    for row, (past, new) in enumerate(work):
        begin = sum(counts[:row])
        tables[row, : counts[row]] = shuffled[begin : begin + counts[row]]
        kv = torch.randn(max(past, 0) + new, 2, kv_heads, head_dim).to(dtype)
        positions = torch.arange(past + new)
        cache[torch.from_numpy(tables[row])[positions // block_size] * block_size + positions % block_size] = kv[
            : past + new
        ]
        fresh.append(kv[max(past, 0) :])
    new_tokens = sum(new for _, new in work)
    qkv = torch.randn(new_tokens, (groups + 2) * kv_heads, head_dim).to(dtype)
    return Step(
        q=qkv[:, : groups * kv_heads],  # a slice, as the layers pass it
        kv=torch.cat(fresh),
        cache=paged(cache, block_size) if kv_dtype is None else quantized(cache, block_size, kv_dtype),
        num_computed=np.array([past for past, _ in work]),
        num_new=np.array([new for _, new in work]),
        tables=tables,
        block_size=block_size,
    )


def quantized(by_slot: Tensor, block_size: int, kv_dtype: torch.dtype) -> Tensor:
    """(slots, 2, Hkv, D) -> pages of codes and scales."""
    _, _, kv_heads, head_dim = by_slot.shape
    page = kv_pages.page_shape(block_size, head_dim, kv_dtype)
    cache = torch.zeros(len(by_slot) // block_size, 2, kv_heads, *page, dtype=kv_dtype)
    kv_pages.store(by_slot.float(), cache, torch.arange(len(by_slot)))
    return cache


@pytest.mark.capability("KN-1")
@every_type
@pytest.mark.parametrize("groups", [1, 2, 4, 5, 7, 8, 71])
def test_decode_equals_the_reference_for_every_ratio_of_heads(groups, dtype, device):
    """Decode equals the reference for every ratio of heads, in float32 and float16; in bfloat16 on a GPU."""
    a_step([*EDGES, PADDING], groups=groups, kv_heads=2, dtype=dtype).agrees(device)


@pytest.mark.capability("KN-1")
@pytest.mark.parametrize(("head_dim", "block_size"), [(8, 1), (64, 4), (80, 16), (96, 32), (128, 16), (256, 128)])
def test_decode_equals_the_reference_for_every_size_of_head_and_block(head_dim, block_size, device):
    a_step([*EDGES, (149, 1)], head_dim=head_dim, block_size=block_size).agrees(device)


@pytest.mark.capability("KN-2")
@pytest.mark.parametrize("groups", [1, 5, 8])
@every_type
def test_a_long_context_is_split_and_merged(groups, dtype, device, monkeypatch):
    monkeypatch.setattr(attention_plan, "SPLIT", 16)
    step = a_step([*EDGES, PADDING, (64, 1)], groups=groups, dtype=dtype)
    plan = attention_plan.plan_attention(step.num_computed, step.num_new, step.tables, 16, step.q)
    assert plan.most_splits == 5
    step.agrees(device)


@pytest.mark.capability("KN-2")
def test_the_longest_contexts_have_longer_splits_not_more(device, monkeypatch):
    monkeypatch.setattr(attention_plan, "SPLIT", 16)
    monkeypatch.setattr(attention_plan, "MAX_SPLITS", 3)
    step = a_step([(47, 1), (48, 1), (99, 1), (5, 1), PADDING])  # lengths 48, 49, 100: 16, 32 and 48 tokens a split
    assert attention_plan.plan_attention(step.num_computed, step.num_new, step.tables, 16, step.q).most_splits == 3
    step.agrees(device)


@pytest.mark.capability("BS-1")
def test_a_row_is_attended_the_same_alone_and_among_longer_ones(device, monkeypatch):
    monkeypatch.setattr(attention_plan, "SPLIT", 16)
    together = a_step([(9, 1), (40, 1), (0, 5)])
    alone = Step(
        together.q[:1], together.kv[:1], together.cache, together.num_computed[:1], together.num_new[:1],
        together.tables[:1], together.block_size,
    )  # fmt: skip
    assert torch.equal(alone.triton(device)[0], together.triton(device)[0])


@pytest.mark.capability("KN-2")
@pytest.mark.parametrize(
    ("groups", "kv_heads", "head_dim", "block_size", "dtype"),
    [
        (1, 2, 16, 16, torch.float32),
        (2, 1, 80, 4, torch.float32),
        (5, 1, 16, 1, torch.float32),
        (8, 1, 64, 32, torch.float32),
        (4, 2, 128, 16, torch.float16),
        (7, 1, 32, 16, torch.float16),
    ],
)
def test_a_mixed_step_equals_the_reference(groups, kv_heads, head_dim, block_size, dtype, device):
    a_step(MIXED, groups=groups, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype).agrees(
        device
    )


@pytest.mark.capability("KN-2")
@pytest.mark.parametrize("window", [1, 20])
def test_a_window_hides_what_came_before_it(window, device, monkeypatch):
    monkeypatch.setattr(attention_plan, "SPLIT", 16)  # some splits, and some tiles, are hidden altogether
    a_step([*EDGES, (90, 1), (0, 7), (100, 33)]).agrees(device, window)


@pytest.mark.capability("KN-1")
@pytest.mark.parametrize("kv_dtype", kv_pages.KV_DTYPES.values(), ids=str)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    ("groups", "kv_heads", "head_dim", "dtype"), [(4, 2, 16, torch.float32), (2, 1, 80, torch.float16)]
)
def test_a_quantized_cache_is_read_as_the_reference_reads_it(
    groups, kv_heads, head_dim, dtype, kv_dtype, window, device
):
    step = a_step(MIXED, groups=groups, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype)
    step.agrees(device, window)


@pytest.mark.capability("KN-2")
@pytest.mark.parametrize("length", [2, 15, 16, 17, 33, 130])
def test_a_prompt_equals_the_reference(length, device):
    a_step([(0, length)]).agrees(device)


@pytest.mark.capability("KN-2")
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_a_long_prompt_allocates_its_output_and_no_scores(device):
    """A long prompt allocates its output and no scores; what a kernel holds is a tile, its size a constant."""
    length, head_dim = 200, 16
    step = a_step([(0, length)], groups=1, head_dim=head_dim)
    plan = decode_work.plan_attention(step.num_computed, step.num_new, step.tables, step.block_size, step.cache)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kernels.paged_attention(step.q, step.kv, step.cache, plan, SCALE)
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())
    assert length * head_dim * 4 <= allocated < 2 * length * head_dim * 4  # length² scores would be 12 times as much
