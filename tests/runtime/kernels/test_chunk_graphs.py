"""Recorded steps with chunks: draft tokens and parts of prompts, beside rows of one token, in a recording of some size.

Without a GPU a recording computes again (`test_graphs`). What it computes is compared with the reference, computed as
planned, and for draft tokens with decode that drafts nothing.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from slipway_runtime.kernels import attention_plan, captured_plan, decode_work, gpu, gpu_fixed_order, reference
from slipway_runtime.kernels import paged_attention as kernels
from slipway_runtime.kernels.attention_plan import ChunkTile
from slipway_runtime.kernels.captured_plan import ChunkCapacity, chunk_capacity, pack_chunks
from slipway_runtime.messages import AdapterLoad, NewSequence, SamplingParams, SchedulerOutput
from slipway_runtime.worker.capture import Capture, CapturedGraph, CudaCapture
from slipway_runtime.worker.graphs import chunk_sizes
from slipway_runtime.worker.runner import Runner
from tests.runtime.checkpoints import a_checkpoint
from tests.runtime.kernels.test_graphs import a_runner, a_step, eager_capture, new_row, watched
from tests.runtime.kernels.test_paged_attention import OUTSIDE, SCALE, Step
from tests.runtime.kernels.test_paged_attention import a_step as an_attention_step

PROMPTS = [(5, 6, 7, 8, 9), (9, 30, 8), (11, 12)]
BLOCKS = [(3, 7, 4, 12, 13), (5, 6, 8, 14, 15), (2, 9, 10, 11, 16)]  # of the rows: 20 tokens each
LENGTH = 9
WAYS = {
    "greedy": {"temperature": 0.0},
    "sampled and penalized": {"temperature": 1.2, "seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.7},
}
Drafts = Callable[[int, list[int]], tuple[int, ...]]  # of a row with this text


def a_capture(device: torch.device) -> Capture:
    return eager_capture if device.type == "cpu" else CudaCapture()


class Generation:
    """Three rows of a runner that go on together, the last one with an adapter."""

    def __init__(self, runner: Runner, *, adapted: bool = True, **params: object) -> None:
        self.runner, self.texts = runner, [list(prompt) for prompt in PROMPTS]
        self._execute(
            a_step(
                (0, 1, 2), (0, 0, 0), tuple(map(len, PROMPTS)), new_blocks=tuple(BLOCKS),
                new_rows=tuple(
                    NewSequence(row=row, token_ids=prompt, num_prompt_tokens=len(prompt),
                                params=SamplingParams(max_tokens=99, **params),
                                adapter_slot=1 if adapted and row == 2 else -1)
                    for row, prompt in enumerate(PROMPTS)
                ),
                adapter_loads=(AdapterLoad(1, "a"),) if adapted else (),
            )
        )  # fmt: skip

    def go_on(self, drafts: Drafts) -> list[list[int]]:
        """Until each row has its length: the texts."""
        while rows := [row for row, text in enumerate(self.texts) if len(text) < len(PROMPTS[row]) + LENGTH]:
            drafted = {row: drafts(row, self.texts[row]) for row in rows}
            rows.sort(key=lambda row: len(drafted[row]) > 0)  # rows of one new token come first
            self._execute(
                a_step(
                    tuple(rows), tuple(len(self.texts[row]) - 1 for row in rows),
                    tuple(1 + len(drafted[row]) for row in rows),
                    drafts=tuple(drafted[row] for row in rows) if any(drafted.values()) else (),
                )
            )  # fmt: skip
        return [text[: len(prompt) + LENGTH] for text, prompt in zip(self.texts, PROMPTS, strict=True)]

    def _execute(self, plan: SchedulerOutput) -> None:
        for row, tokens in zip(plan.rows, self.runner.execute(plan).token_ids, strict=True):
            self.texts[row] += tokens


def nothing(row: int, text: list[int]) -> tuple[int, ...]:
    return ()


def half_right(texts: list[list[int]]) -> Drafts:
    """Up to four tokens, of which the last is wrong every other time; the second row drafts now and then."""

    def drafts(row: int, text: list[int]) -> tuple[int, ...]:
        left = len(PROMPTS[row]) + LENGTH - len(text)
        if row == 1 and len(text) % 3:
            return ()
        right = texts[row][len(text) : len(text) + min(4 - row, left - 1)]
        return (*right[:-1], (right[-1] + len(text) % 2) % 96) if right else ()

    return drafts


@pytest.mark.capability("KN-5", "SD-1")
@pytest.mark.parametrize("way", WAYS)
def test_drafts_verified_in_a_recording_are_the_tokens_of_decode(way, tmp_path, device):
    """Accepted and rejected, rows without drafts beside them, one row with an adapter."""
    a_checkpoint(tmp_path)
    expected = Generation(a_runner(tmp_path, reference), **WAYS[way]).go_on(nothing)
    recorded = a_runner(tmp_path, gpu, device, a_capture(device))
    seen = watched(recorded.graphs)
    rows = Generation(recorded, **WAYS[way])
    assert rows.go_on(half_right(expected)) == expected
    assert None not in seen
    assert seen[0] == "10 tokens"
    verified = [one for one in seen[1:] if one and one.endswith("tokens")]
    assert len(verified) > 2
    assert len(seen) < 1 + LENGTH, "some drafts are accepted"


@pytest.mark.capability("API-19", "KN-5")
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_deterministic_steps_are_recorded_too_with_and_without_drafts(tmp_path, device):
    """They ran kernel by kernel: no recording had their attention."""
    a_checkpoint(tmp_path)
    expected = Generation(a_runner(tmp_path, gpu_fixed_order, device), temperature=0.0).go_on(nothing)
    runners = [a_runner(tmp_path, gpu_fixed_order, device, eager_capture) for _ in range(2)]
    seen = [watched(runner.graphs) for runner in runners]
    assert Generation(runners[0], temperature=0.0).go_on(nothing) == expected
    assert Generation(runners[1], temperature=0.0).go_on(half_right(expected)) == expected
    assert None not in seen[0] + seen[1]
    assert "3 rows" in seen[0]
    assert [one for one in seen[1][1:] if one.endswith("tokens")]


# A prompt in two chunks beside a row that decodes, another prompt beside both; then decode.
MIXED = [
    a_step((0,), (0,), (5,), new_blocks=((3, 7, 4),), new_rows=(new_row(0, (5, 6, 7, 8, 9)),)),
    a_step((0, 1), (5, 0), (1, 6), new_blocks=((), (5, 6, 8)), new_rows=(new_row(1, (9, 30, 8, 7, 6, 5, 4, 3, 2)),),
           samples=(True, False)),
    a_step((0, 1, 2), (6, 6, 0), (1, 3, 2), new_blocks=((), (), (2, 9)), new_rows=(new_row(2, (11, 12), slot=1),),
           adapter_loads=(AdapterLoad(1, "a"),)),
    a_step((0, 1, 2), (7, 9, 2), (1, 1, 1)),
]  # fmt: skip


@pytest.mark.capability("BS-7", "KN-5")
def test_chunks_of_prompts_are_replayed_beside_decode_and_launched_ahead(tmp_path, device):
    """The first row's token is on the device alone when the step after it is launched."""
    a_checkpoint(tmp_path)
    recorded, eager = a_runner(tmp_path, gpu, device, a_capture(device)), a_runner(tmp_path, reference)
    seen = watched(recorded.graphs)
    pending = [recorded.launch(plan) for plan in MIXED]
    assert [read().token_ids for read in pending] == [eager.execute(plan).token_ids for plan in MIXED]
    assert seen == ["5 tokens", "7 tokens", "6 tokens", "3 rows"]


@pytest.mark.capability("KN-5")
def test_logprobs_of_a_prompt_are_those_of_the_recorded_step(tmp_path, device):
    a_checkpoint(tmp_path)
    params = SamplingParams(max_tokens=9, temperature=0.0, prompt_logprobs=2, logprobs=1)
    row = NewSequence(row=0, token_ids=(5, 6, 7, 8, 9), num_prompt_tokens=5, params=params)
    plan = a_step((0,), (0,), (5,), new_blocks=((3, 7),), new_rows=(row,))
    recorded = a_runner(tmp_path, gpu, device, a_capture(device))
    seen = watched(recorded.graphs)
    ours, expected = recorded.execute(plan), a_runner(tmp_path, reference).execute(plan)
    assert seen == ["5 tokens"]
    ours_of, expected_of = ours.prompt_logprobs[0], expected.prompt_logprobs[0]
    assert [one.token_id for one in ours_of] == [one.token_id for one in expected_of] == [6, 7, 8, 9]
    assert [one.logprob for one in ours_of] == pytest.approx([one.logprob for one in expected_of], abs=1e-4)


@pytest.mark.capability("DD-3", "KN-5")
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_a_rank_that_does_not_sample_replays_the_same_steps(tmp_path, device):
    """It gets all tokens from the host, and stores the same keys and values as the rank that has them on the device."""
    a_checkpoint(tmp_path)
    first, second = (a_runner(tmp_path, gpu, device, eager_capture) for _ in range(2))
    seen = [watched(runner.graphs) for runner in (first, second)]
    drafted = a_step((1, 0), (10, 8), (1, 3), drafts=((), (4, 5)))
    for plan in (*MIXED, drafted):
        plain = a_step(
            plan.rows, plan.num_computed, plan.num_new, new_blocks=plan.new_blocks, drafts=plan.drafts,
            new_rows=tuple(new_row(new.row, new.token_ids) for new in plan.new_rows),
        )  # fmt: skip
        result = first.execute(plain)
        second.execute_without_sampling(plain)
        second.record_sampled(plain, result.token_ids)
    assert seen[0] == seen[1] == ["5 tokens", "7 tokens", "6 tokens", "3 rows", "4 tokens"]
    for ours, theirs in zip(first.caches, second.caches, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.capability("KN-5")
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_what_is_launched_depends_on_the_size_of_the_recording_alone(tmp_path, device, monkeypatch):
    """Drafts of one row or of three, a part of a prompt, other rows and blocks: up to eight tokens, one recording."""
    a_checkpoint(tmp_path)
    runner = a_runner(tmp_path, gpu, device, eager_capture)
    inner, launches, seen = interpreter.GridExecutor.__call__, [], []
    static = runner.graphs._chunks._static[8]
    buffers = [static.buffer, static.plan.lengths, static.plan.tables, static.plan.captured_work.split]
    before = [buffer.data_ptr() for buffer in buffers]

    def launch(self, *args, **kwargs):
        fixed = [value for value in (*args, *kwargs.values()) if not isinstance(value, Tensor)]
        launches.append((self.fn.__name__, self.grid, fixed))
        return inner(self, *args, **kwargs)

    Generation(runner, temperature=0.0)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    for rows, computed, drafts in (
        ((1, 2, 0), (3, 2, 5), ((), (), (4,))),
        ((0, 1, 2), (6, 4, 3), ((1,), (2, 3), (4,))),
        ((2,), (4,), ((1, 2, 3, 4, 5, 6, 7),)),
        ((0, 1), (7, 5), ((), ())),
    ):
        launches.clear()
        new = tuple(1 + len(one) for one in drafts) if any(drafts) else (1, 4)
        more = {"drafts": drafts} if any(drafts) else {"samples": (True, False)}
        runner.execute(a_step(rows, computed, new, **more))
        seen.append([one for one in launches if one[0] in RECORDED])
    assert seen[0] == seen[1] == seen[2] == seen[3]
    assert {name for name, *_ in seen[0]} == RECORDED
    assert [buffer.data_ptr() for buffer in buffers] == before


RECORDED = {"_decode", "_extend", "_merge_chunks", "_rope_and_store", "_swiglu"}


def captured_attention(step: Step, device: torch.device, capacity: ChunkCapacity, window: int | None) -> Tensor:
    """The attention of a step by a captured plan: its tokens, then those of the padding."""
    used = -(-(step.num_computed + step.num_new) // step.block_size)
    width = step.tables.shape[1]
    tables = np.where(np.arange(width) < used[:, None], step.tables, OUTSIDE).astype(np.int32)
    tables = torch.from_numpy(np.concatenate((tables, np.full((1, width), OUTSIDE, dtype=np.int32)))).to(device)
    cache = step.cache.to(device)
    q, kv = (
        torch.cat((one, one.new_full((capacity.tokens - len(one), *one.shape[1:]), 1e4))).to(device)
        for one in (step.q, step.kv)
    )
    packed = pack_chunks(
        capacity, np.arange(len(step.num_new)), step.num_computed, step.num_new, padding_row=len(step.num_new),
        tile=kernels.chunk_tile(q, cache, step.block_size),
    )  # fmt: skip
    assert packed is not None
    rows, lengths, *static = (torch.from_numpy(one).to(device) for one in packed)
    plan = captured_plan.plan_for_capture(capacity.rows, width * step.block_size, step.block_size, cache)
    plan = captured_plan.with_chunks(plan, capacity, *static)
    decode_work.update_static_inputs(plan, lengths, tables, rows)
    return kernels.paged_attention(q, kv, cache, plan, SCALE, window).cpu()


@pytest.mark.capability("KN-2", "KN-5")
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("window", [None, 20])
def test_recorded_attention_of_chunks_is_that_of_the_plan_and_padding_is_zero(kv_dtype, window, device, monkeypatch):
    """Rows and chunks are cut into the same splits here and there, and have the same bits."""
    monkeypatch.setattr(attention_plan, "CHUNK_SPLIT", 16)
    step = an_attention_step([(70, 1), (16, 1), (90, 5), (20, 18), (5, 3)], kv_heads=2, kv_dtype=kv_dtype)
    num_tokens = len(step.q)
    capacity = ChunkCapacity(tokens=32, decodes=3, chunks=4, programs=16, slots=128)
    out = captured_attention(step, device, capacity, window)
    torch.testing.assert_close(out[:num_tokens].double(), step.reference(window), atol=step.tolerance, rtol=0)
    assert not out[num_tokens:].any()
    planned, ends = step.triton(device, window), step.num_new.cumsum()
    for row, new in enumerate(step.num_new):
        if new < 6 or step.num_computed[row]:  # those of several splits
            tokens = slice(ends[row] - new, ends[row])
            assert torch.equal(out[tokens], planned[tokens])


@pytest.mark.capability("KN-5")
def test_a_recording_of_padding_reads_and_writes_nothing(device):
    """As it is captured: no row, no chunk, blocks that do not exist."""
    capacity = chunk_capacity(8, 4)
    rows, lengths, *static = (torch.from_numpy(one).to(device) for one in captured_plan.empty_chunks(capacity, 0))
    plan = captured_plan.plan_for_capture(capacity.rows, 64, 16, rows)
    plan = captured_plan.with_chunks(plan, capacity, *static)
    tables = torch.full((1, 4), OUTSIDE, dtype=torch.int32, device=device)
    decode_work.update_static_inputs(plan, lengths, tables, rows)
    q = torch.full((8, 4, 16), 1e4, device=device)
    cache = torch.full((2, 2, 2, 16, 16), 1e4, device=device)
    assert not kernels.paged_attention(q, q, cache, plan, SCALE).any()


TILE = ChunkTile(queries=16, kv_heads=8)


def packed(capacity: ChunkCapacity, *work: tuple[int, int]) -> bool:
    computed, new = (np.array(column) for column in zip(*work, strict=True))
    return pack_chunks(capacity, np.arange(len(work)), computed, new, padding_row=9, tile=TILE) is not None


@pytest.mark.capability("KN-5")
def test_which_steps_a_recording_has_room_for():
    """Those of more programs take so long that the device never waits for their launches."""
    capacity = chunk_capacity(64, 8)
    assert packed(capacity, (50, 1), (0, 63))
    assert packed(capacity, *[(50, 8)] * 8)
    assert packed(capacity, *[(7900, 5)] * 4), "32 programs: 8 splits each"
    assert not packed(capacity, *[(7900, 5)] * 5), "40 programs"
    assert packed(capacity, (32_000, 40)), "33 programs of 11 splits, 440 partial results"
    assert not packed(capacity, (32_000, 16), (0, 40)), "of 32 splits, 552 partial results"
    assert not packed(capacity, (50, 1), (0, 64)), "65 tokens"
    assert not packed(capacity, *[(50, 1)] * 8), "no chunk"


@pytest.mark.capability("KN-5")
def test_programs_behind_those_of_a_step_have_no_work():
    """They belong to the row that is always padding, of length 0 and without tokens."""
    capacity = chunk_capacity(16, 8)
    static = pack_chunks(capacity, np.array([4, 2]), np.array([50, 2000]), np.array([1, 5]), padding_row=8, tile=TILE)
    assert static is not None
    rows, lengths, starts, work, merges = static
    assert work[:2].tolist() == [[0, 0, 0, 0, 1024], [0, 0, 1, 0, 1024]], "two splits of the chunk"
    assert {tuple(one) for one in work[2:].tolist()} == {(capacity.chunks, 0, 0, 0, 1024)}
    assert (rows[-1], lengths[-1]) == (8, 0)
    assert starts[capacity.chunks] == starts[capacity.chunks + 1] == 6
    assert (rows[[0, capacity.decodes]].tolist(), lengths[[0, capacity.decodes]].tolist()) == ([4, 2], [51, 2005])
    assert merges[:7].tolist() == [[1, 0, 2], [1, 0, 2], [2, 2, 2], [3, 4, 2], [4, 6, 2], [5, 8, 2], [6, 0, 0]]


@pytest.mark.capability("KN-5")
@pytest.mark.parametrize("tokens", chunk_sizes(256, 2048))
def test_every_step_of_short_contexts_has_room(tokens):
    """Whatever its rows are: drafts of two tokens each, one prompt, or one row of several beside decode."""
    capacity = chunk_capacity(tokens, 256)
    assert packed(capacity, *[(1000, 2)] * (tokens // 2))
    assert packed(capacity, (0, tokens))
    assert packed(capacity, *[(1000, 1)] * (tokens - 2), (1000, 2))


@pytest.mark.capability("KN-5")
def test_sizes_end_with_the_most_tokens_of_a_step():
    assert chunk_sizes(1, 4) == ()
    assert chunk_sizes(2, 10) == (8, 16)
    assert chunk_sizes(256, 32768)[-1] == 256


@pytest.mark.capability("KN-5")
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize(
    ("slots_of_a_token", "size"), [(4, 16), (1, None)], ids=["the next size has room", "no size has room"]
)
def test_a_step_without_room_goes_into_a_larger_recording_or_is_computed_as_planned(
    slots_of_a_token, size, tmp_path, device, monkeypatch
):
    """Only the smallest recording for its tokens was tried: 100 tokens on a context of 8k were never recorded."""
    a_checkpoint(tmp_path)
    monkeypatch.setattr(attention_plan, "CHUNK_SPLIT", 1)  # as if contexts were a thousand times as long

    def capacity(num_tokens: int, max_num_seqs: int) -> ChunkCapacity:
        return replace(chunk_capacity(num_tokens, max_num_seqs), slots=slots_of_a_token * num_tokens)

    monkeypatch.setattr(gpu, "chunk_capacity", capacity)
    recorded = a_runner(tmp_path, gpu, device, eager_capture)
    seen, sizes = watched(recorded.graphs), []
    for (tokens, adapted), graph in recorded.graphs._chunks._graphs.items():
        replay = partial(lambda tokens, graph: (sizes.append(tokens), graph.replay()), tokens, graph)
        recorded.graphs._chunks._graphs[tokens, adapted] = CapturedGraph(replay)
    results = [recorded.execute(plan).token_ids for plan in MIXED[:2]]
    eager = a_runner(tmp_path, reference)
    assert results == [eager.execute(plan).token_ids for plan in MIXED[:2]]
    assert seen[1] == ("7 tokens" if size else None), "6 tokens by 6 splits are 36 partial results"
    assert sizes[1:] == ([size] if size else [])
