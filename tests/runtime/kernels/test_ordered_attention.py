"""Attention of `deterministic` on a GPU: a token's bits are the same however its step divides the work."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from slipway_runtime.kernels import ordered_attention, ordered_plan
from slipway_runtime.kernels.attention_plan import ChunkTile
from slipway_runtime.kernels.captured_plan import update_static_inputs
from slipway_runtime.kernels.reference_attention import Scoring
from tests.runtime.kernels.test_paged_attention import OUTSIDE, PADDING, SCALE, Step, a_step

DRAFTS = [(70, 1), (16, 1), (50, 5), (0, 20), (33, 17), (5, 3), PADDING]
NEVER, ALWAYS = 1, 1 << 20  # CHUNK_PROGRAMS with which no chunk, or each, is divided among programs


@pytest.fixture(autouse=True)
def short_splits(monkeypatch):
    monkeypatch.setattr(ordered_plan, "SPLIT", 16)


@pytest.fixture(autouse=True)
def dots_of_rows_alone(monkeypatch):
    """Triton's interpreter multiplies with BLAS, some of whose kernels sum a row differently by its place in the tile.

    Tensor cores do not. Summed in float64 and rounded once, the place of a row makes no difference here either.
    """

    def dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        return TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


def attended(
    of: Step, computed: list[int], new: list[int], rows: list[int], tokens: list[int], device: torch.device, **more
) -> Tensor:
    """Attention of a step with these rows, whose queries are `tokens` of those of the step that is given."""
    lengths = np.array(computed) + np.array(new)
    width = of.tables.shape[1]
    used = np.arange(width) < -(-lengths // of.block_size)[:, None]
    tables = np.where(used, of.tables[rows], OUTSIDE)
    cache, q = of.cache.to(device), of.q[tokens].to(device)
    plan = ordered_plan.plan_attention(np.array(computed), np.array(new), tables, of.block_size, cache)
    return ordered_attention.paged_attention(q, of.kv[tokens].to(device), cache, plan, SCALE, **more).cpu()


def whole(of: Step, device: torch.device, **more) -> Tensor:
    rows = list(range(len(of.num_new)))
    return attended(of, of.num_computed.tolist(), of.num_new.tolist(), rows, list(range(len(of.q))), device, **more)


@pytest.mark.capability("API-19", "KN-2")
@pytest.mark.parametrize(
    ("programs", "kv_dtype", "window"),
    [(NEVER, None, 20), (264, torch.int8, None), (ALWAYS, None, None), (ALWAYS, torch.int8, 20)],
)
def test_it_equals_the_reference_however_it_is_divided(programs, kv_dtype, window, device, monkeypatch):
    monkeypatch.setattr(ordered_plan, "CHUNK_PROGRAMS", programs)
    step = a_step(DRAFTS, groups=4, kv_dtype=kv_dtype)
    ours = whole(step, device, window=window)
    torch.testing.assert_close(ours.double(), step.reference(window), atol=step.tolerance, rtol=0)


@pytest.mark.capability("API-19")
@pytest.mark.parametrize(
    ("kv_dtype", "scoring", "window"),
    [
        (None, None, None),
        (None, Scoring(3.0, torch.tensor([0.5, -1.0])), 20),
        (torch.int8, Scoring(3.0, torch.tensor([0.5, -1.0])), None),
    ],
    ids=["plain", "cap, sinks and a window", "int8, cap and sinks"],
)
def test_a_token_has_the_same_bits_in_a_prompt_in_a_chunk_as_a_draft_and_in_decode(
    kv_dtype, scoring, window, device, monkeypatch
):
    """Each step divides its work in its own way: programs of whole tiles beside programs of splits."""
    prompt = a_step([(0, 40), (0, 21)], kv_dtype=kv_dtype)

    def of_step(programs: int, *step: list[int]) -> Tensor:
        monkeypatch.setattr(ordered_plan, "CHUNK_PROGRAMS", programs)
        there = scoring and Scoring(scoring.softcap, scoring.sinks.to(device))
        return attended(prompt, *step, device, window=window, scoring=there)

    expected = of_step(NEVER, [0, 0], [40, 21], [0, 1], list(range(61)))
    tokens = [*range(45, 61), *range(11, 39)]
    assert torch.equal(of_step(ALWAYS, [0, 0], [40, 21], [0, 1], list(range(61))), expected)
    for programs in (NEVER, ALWAYS):
        assert torch.equal(of_step(programs, [20, 39], [1, 1], [1, 0], [60, 39]), expected[[60, 39]])
        assert torch.equal(of_step(programs, [5, 11], [16, 28], [1, 0], tokens), expected[tokens])


@pytest.mark.capability("API-19")
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_step_that_holds_a_token_gives_it_the_same_bits(data, monkeypatch):
    lengths = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=2))
    window = data.draw(st.sampled_from([None, 7, 40]))
    prompt = a_step([(0, length) for length in lengths], groups=data.draw(st.sampled_from([1, 3, 4])))
    starts = np.cumsum(lengths) - lengths
    monkeypatch.setattr(ordered_plan, "CHUNK_PROGRAMS", NEVER)
    device = torch.device("cpu")
    expected = whole(prompt, device, window=window)
    rows = data.draw(st.permutations(range(len(lengths))))
    computed = [data.draw(st.integers(0, lengths[row] - 1)) for row in rows]
    new = [data.draw(st.integers(1, lengths[row] - past)) for row, past in zip(rows, computed, strict=True)]
    tokens = [
        int(starts[row]) + past + token
        for row, past, count in zip(rows, computed, new, strict=True)
        for token in range(count)
    ]
    monkeypatch.setattr(ordered_plan, "CHUNK_PROGRAMS", data.draw(st.sampled_from([NEVER, 8, 264, ALWAYS])))
    monkeypatch.setattr(ordered_plan, "MOST_SLOTS", data.draw(st.sampled_from([0, 50, 8192])))
    assert torch.equal(attended(prompt, computed, new, list(rows), tokens, device, window=window), expected[tokens])


@pytest.mark.capability("API-19")
@pytest.mark.parametrize(
    ("work", "programs"),
    [
        ([(8191, 1)], 16 * 8),  # decode: 8 programs read 8k keys each
        ([(32_767, 1)], 64 * 8),
        ([(32_000, 5)], 63 * 8),  # drafts
        ([(1023, 1)], 2 * 8),
        ([(8191, 1)] * 64, 64 * 8),  # programs enough for the card: none is divided
        ([(8191, 1), *[(100, 1)] * 64], (16 + 64) * 8),  # but for a row that would be the last to end
        ([(0, 4096)], 256 * 8),
    ],
)
def test_few_rows_are_divided_among_many_programs_and_many_rows_are_not(work, programs, monkeypatch):
    monkeypatch.setattr(ordered_plan, "SPLIT", 512)
    computed, new = (np.array(column) for column in zip(*work, strict=True))
    divided, merges, slots = ordered_plan.divide(new, computed + new, ChunkTile(queries=16, kv_heads=8))
    assert len(divided) * 8 == programs
    assert slots <= ordered_plan.MOST_SLOTS
    assert len(merges) == (int(new[np.unique(merges[:, 2])].sum()) if slots else 0)


@pytest.mark.capability("API-19")
def test_each_split_of_each_tile_has_one_program_and_each_token_is_written_once():
    rng = np.random.default_rng(0)
    for _ in range(50):
        new, past = rng.integers(1, 40, 6), rng.integers(0, 200, 6)
        programs, merges, slots = ordered_plan.divide(new, past + new, ChunkTile(16, int(rng.integers(1, 40))))
        for chunk in range(6):
            own = programs[programs[:, 0] == chunk]
            splits = range(-(-int(past[chunk] + new[chunk]) // 16))
            wanted = [ordered_plan.ALL] if own[0, 2] == ordered_plan.ALL else splits
            tiles = range(0, int(new[chunk]), 16)
            assert sorted(map(tuple, own[:, 1:3].tolist())) == [(first, split) for first in tiles for split in wanted]
        assert len({int(token) for token in merges[:, 0]}) == len(merges)
        assert slots == sum(-(-int(past[chunk] + new[chunk]) // 16) for chunk in merges[:, 2])


def in_a_graph_of_decode(step: Step, rows: int, device: torch.device) -> Tensor:
    """A step of rows of one token by a captured plan for `rows`, of which the last are padding."""
    count, width = len(step.num_new), step.tables.shape[1]
    tables = torch.from_numpy(np.concatenate((step.tables, np.full((1, width), OUTSIDE)))).int().to(device)
    lengths = np.zeros(rows, dtype=np.int32)
    lengths[:count] = step.num_computed + step.num_new
    ids = np.full(rows, count)
    ids[:count] = np.arange(count)
    cache = step.cache.to(device)
    plan = ordered_plan.plan_for_capture(rows + 3, width * step.block_size, step.block_size, cache)
    plan = ordered_plan.first_rows(plan, rows)
    update_static_inputs(plan, torch.from_numpy(lengths).to(device), tables, torch.from_numpy(ids).to(device))
    q = torch.cat((step.q, step.q.new_full((rows - count, *step.q.shape[1:]), 1e4))).to(device)
    return ordered_attention.paged_attention(q, q, cache, plan, SCALE).cpu()


@pytest.mark.capability("API-19", "KN-5")
@pytest.mark.parametrize("programs", [NEVER, 4, 264])
def test_a_graph_of_decode_gives_the_same_bits_and_padding_is_zero(programs, device, monkeypatch):
    step = a_step([(40, 1), (16, 1), (0, 1)], groups=4, kv_heads=2)
    expected = whole(step, device)
    monkeypatch.setattr(ordered_plan, "CHUNK_PROGRAMS", programs)
    out = in_a_graph_of_decode(step, 4, device)
    assert torch.equal(out[:3], expected)
    assert not out[3:].any()


@pytest.mark.capability("API-19", "KN-5")
@pytest.mark.parametrize("programs", [NEVER, 12, ALWAYS])
def test_a_graph_of_a_step_with_chunks_gives_the_same_bits_and_padding_is_zero(programs, device, monkeypatch):
    step = a_step([(40, 1), (16, 1), (30, 5), (0, 18)])
    expected, num_tokens = whole(step, device), len(step.q)
    monkeypatch.setattr(ordered_plan, "CHUNK_PROGRAMS", programs)
    capacity = ordered_plan.chunk_capacity(32, 6)
    width, count = step.tables.shape[1], len(step.num_new)
    tables = torch.from_numpy(np.concatenate((step.tables, np.full((1, width), OUTSIDE)))).int().to(device)
    cache = step.cache.to(device)
    packed = ordered_plan.pack_chunks(
        capacity, np.arange(count), step.num_computed, step.num_new, padding_row=count,
        tile=ordered_attention.chunk_tile(step.q, cache, step.block_size),
    )  # fmt: skip
    assert packed is not None
    rows, lengths, *static = (torch.from_numpy(one).to(device) for one in packed)
    plan = ordered_plan.plan_for_capture(capacity.rows, width * step.block_size, step.block_size, cache)
    plan = ordered_plan.with_chunks(plan, capacity, *static)
    update_static_inputs(plan, lengths, tables, rows)
    q = torch.cat((step.q, step.q.new_full((32 - num_tokens, *step.q.shape[1:]), 1e4))).to(device)
    out = ordered_attention.paged_attention(q, q, cache, plan, SCALE).cpu()
    assert torch.equal(out[:num_tokens], expected)
    assert not out[num_tokens:].any()
    assert ordered_plan.pack_chunks(
        capacity, np.arange(7), np.zeros(7, dtype=np.int64), np.ones(7, dtype=np.int64), padding_row=9,
        tile=ChunkTile(16, 2),
    ) is None  # fmt: skip
