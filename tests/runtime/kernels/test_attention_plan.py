"""How the attention of a step is divided among programs: by each sequence's own numbers, and without idle programs."""

import numpy as np
import pytest
import torch

from slipway_runtime.kernels import attention_plan, captured_plan, kv_pages
from slipway_runtime.kernels import paged_attention as kernels
from slipway_runtime.kernels.attention_plan import ChunkTile, num_splits
from tests.runtime.kernels.test_paged_attention import PADDING, Step, a_step

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
    work = plan.chunk_work(16, ChunkTile(16, 2))
    assert work.split[:, 0].bincount().tolist() == [6, 9, 8, 8], "programs of the chunks of 5, 40, 16 and 17 tokens"
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
    for rows, programs in ((1, 32), (8, 256), (32, 256), (256, 256)):
        plan = captured_plan.plan_for_capture(rows, 32768, 16, torch.empty(0))
        q = torch.empty(rows, 32, 64, dtype=torch.float16)
        kernels.paged_attention(q, q, cache, plan, 0.1)
        assert grids["decode"] == (8, programs)
    short = attention_plan.plan_attention(np.array([1023]), np.array([1]), np.zeros((1, 64), dtype=np.int64), 16, cache)
    kernels.paged_attention(q[:1], q[:1], cache, short, 0.1)
    assert grids["decode"] == (8, 4), "twice the programs of splits of 512"


def test_the_tiles_with_the_most_keys_start_first():
    """Finding 8: the longest tile of a causal prompt was the last to start."""
    plan = attention_plan.plan_attention(
        np.array([5, 100]), np.array([70, 40]), np.zeros((2, 16), dtype=np.int64), 16, torch.empty(0)
    )
    whole = plan.chunk_work(16, ChunkTile(16, 2)).whole.tolist()
    assert whole == [[1, 32], [1, 16], [1, 0], [0, 64], [0, 48], [0, 32], [0, 16], [0, 0]]


def test_splits_are_counted_on_the_host_as_on_the_device():
    for length, expected in ((1, 1), (256, 1), (257, 2), (8192, 32), (8193, 17), (32768, 32), (131_072, 32)):
        assert num_splits(np.array(length), 256, 32) == expected


@pytest.mark.capability("KN-2")
@pytest.mark.parametrize(
    ("past", "new", "splits"),
    [
        (32_000, 5, 32),  # drafts: 256 programs, of which there were 64
        (32_000, 32, 16),  # the end of a cached prompt: 256 programs, of which there were 16
        (32_000, 128, 4),
        (32_000, 256, 2),
        (32_000, 500, 1),  # enough programs without splits
        (2000, 32, 2),  # no split is shorter than 1024 tokens
        (900, 32, 1),
        (0, 2000, 1),
    ],
)
def test_a_chunk_on_a_long_context_has_some_250_programs_by_its_own_numbers_alone(past, new, splits):
    """Chunks of 17 to 500 tokens ran a program for each tile and KV head, some ten times as long as they had to."""
    tile = ChunkTile(queries=16, kv_heads=8)
    together = np.array([7, past, 20_000]), np.array([30, new, 4])
    for computed, added, row in ((np.array([past]), np.array([new]), 0), (*together, 1)):
        plan = attention_plan.plan_attention(
            computed, added, np.zeros((len(added), 1), dtype=np.int64), 16, torch.empty(0)
        )
        work = plan.chunk_work(32, tile)
        own = work.split[work.split[:, 0] == row]
        assert len(own) == (splits * -(-new // 16) if splits > 1 else 0)
        assert len(own) * tile.kv_heads <= attention_plan.CHUNK_PROGRAMS
        assert int((work.whole[:, 0] == row).sum()) == (0 if splits > 1 else -(-new // 32))


@pytest.mark.capability("KN-2")
def test_longer_chunks_in_splits_equal_the_reference_alone_and_among_others(device, monkeypatch):
    monkeypatch.setattr(attention_plan, "CHUNK_SPLIT", 16)
    step = a_step([(70, 1), (150, 40), (33, 90), (190, 17)], groups=4, kv_heads=2)
    plan = attention_plan.plan_attention(step.num_computed, step.num_new, step.tables, 16, step.q)
    assert set(plan.chunk_work(32, ChunkTile(16, 2)).split[:, 0].tolist()) == {0, 1, 2}
    together = step.agrees(device)
    assert torch.equal(part(step, 1).triton(device), together[1:41])
    assert torch.equal(part(step, 2).triton(device), together[41:131])
