"""How the attention of a step is divided among programs: by each sequence's own numbers, and without idle programs."""

import numpy as np
import pytest
import torch

from slipway_runtime.kernels import attention_plan, captured_plan, kv_pages
from slipway_runtime.kernels import paged_attention as kernels
from slipway_runtime.kernels.attention_plan import num_splits
from tests.runtime.kernels.test_paged_attention import MIXED, PADDING, Step, a_step

DRAFTS = [(70, 1), (16, 1), (90, 5), (0, 40), (100, 16), (33, 17), (5, 3)]


def part(step: Step, row: int) -> Step:
    start = int(step.num_new[:row].sum())
    tokens = slice(start, start + int(step.num_new[row]))
    return Step(
        step.q[tokens], step.kv[tokens], step.cache, step.num_computed[row : row + 1], step.num_new[row : row + 1],
        step.tables[row : row + 1], step.block_size,
    )  # fmt: skip


@pytest.mark.capability("KN-2")
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("window", [None, 20])
def test_few_new_tokens_on_a_long_context_are_split_and_equal_the_reference(kv_dtype, window, device, monkeypatch):
    """Finding 9: drafts and short suffixes ran one program a KV head, whatever the context."""
    monkeypatch.setattr(attention_plan, "CHUNK_SPLIT", 16)
    step = a_step(DRAFTS, groups=4, kv_heads=2, kv_dtype=kv_dtype)
    plan = attention_plan.plan_attention(step.num_computed, step.num_new, step.tables, 16, step.q)
    work = plan.chunk_work(16, 16)
    assert work.split[:, 0].bincount().tolist() == [6, 0, 8], "splits of the chunks of 5 and 16 tokens"
    assert sorted(set(work.whole[:, 0].tolist())) == [1, 3, 4]
    step.agrees(device, window)


@pytest.mark.capability("BS-1")
def test_a_short_chunk_is_attended_the_same_alone_and_among_others(device, monkeypatch):
    monkeypatch.setattr(attention_plan, "CHUNK_SPLIT", 16)
    step = a_step(DRAFTS)
    together, start = step.triton(device), 0
    for row, count in enumerate(step.num_new.tolist()):
        assert torch.equal(part(step, row).triton(device), together[start : start + count])
        start += count


@pytest.mark.capability("BS-1")
@pytest.mark.parametrize("programs", [1, 3])
def test_a_row_is_attended_the_same_by_however_many_programs(programs, device, monkeypatch):
    """Finding 12: programs share the splits of a row, so that a recorded grid need not have one for each."""
    monkeypatch.setattr(attention_plan, "SPLIT", 16)
    step = a_step([(70, 1), (16, 1), PADDING, (40, 1)])
    expected = step.triton(device)
    monkeypatch.setattr(kernels, "DECODE_PROGRAMS", programs)
    assert torch.equal(step.triton(device), expected)


@pytest.mark.capability("KN-8")
def test_the_grid_of_a_long_recording_is_bounded(monkeypatch):
    """Finding 12: 256 rows that may reach 32k were 65,536 programs a layer, of which 4,096 had work at 1k."""
    grids = {}

    class Watched:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getitem__(self, grid):
            grids[self._name] = grid
            return lambda *_, **__: None

    monkeypatch.setattr(kernels, "_decode", Watched("decode"))
    monkeypatch.setattr(kernels, "_merge", Watched("merge"))
    cache = torch.empty(2, 2, 8, *kv_pages.page_shape(16, 64, torch.float16), dtype=torch.float16)
    for rows, programs in ((1, 32), (8, 32), (32, 8), (256, 1)):
        plan = captured_plan.plan_for_capture(rows, 32768, 16, torch.empty(0))
        q = torch.empty(rows, 32, 64, dtype=torch.float16)
        kernels.paged_attention(q, q, cache, plan, 0.1)
        assert grids["decode"] == (rows, 8, programs)
    short = attention_plan.plan_attention(np.array([1023]), np.array([1]), np.zeros((1, 64), dtype=np.int64), 16, cache)
    kernels.paged_attention(q[:1], q[:1], cache, short, 0.1)
    assert grids["decode"] == (1, 8, 4), "twice the programs of splits of 512"


def test_the_tiles_with_the_most_keys_start_first():
    """Finding 8: the longest tile of a causal prompt was the last to start."""
    plan = attention_plan.plan_attention(
        np.array([5, 100]), np.array([70, 40]), np.zeros((2, 16), dtype=np.int64), 16, torch.empty(0)
    )
    whole = plan.chunk_work(16, 16).whole.tolist()
    assert whole == [[1, 32], [1, 16], [1, 0], [0, 64], [0, 48], [0, 32], [0, 16], [0, 0]]


def test_splits_are_counted_on_the_host_as_on_the_device():
    for length, expected in ((1, 1), (256, 1), (257, 2), (8192, 32), (8193, 17), (32768, 32), (131_072, 32)):
        assert num_splits(np.array(length), 256, 32) == expected


@pytest.mark.capability("API-19")
def test_in_one_order_no_chunk_is_split():
    computed, new = (np.array(column) for column in zip(*MIXED, strict=True))
    plan = attention_plan.plan_in_one_order(
        computed + 5000, new, np.zeros((len(new), 400), dtype=np.int64), 16, torch.empty(0)
    )
    assert not plan.chunk_work(16, 16).num_slots
