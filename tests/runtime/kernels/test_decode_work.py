"""The work list of decode attention: every split once, the longest first, and no program that the others wait for."""

import heapq
from collections import deque

import numpy as np
import pytest
import torch

from bench.gpu_plan import CARDS, PROGRAM_SHARE
from slipway_runtime.kernels import attention_plan, captured_plan, decode_work
from slipway_runtime.kernels.attention_plan import DECODE_PROGRAMS, MAX_SPLITS, SPLIT, num_splits, split_tokens

pytestmark = pytest.mark.capability("KN-2")
LENGTHS = [
    [1],
    [0, 256, 257, 0, 8192],
    [1024] * 255 + [131_072],
    [131_072, 8193, 300, 70_000, 1, 0, 20_000],
    [700] * 1500,  # more rows than are put in order at once
]


def listed(lengths: list[int], device: torch.device) -> list[tuple[int, int]]:
    """(row, split) of each item."""
    decodes, tables = np.ones(len(lengths), dtype=np.int64), np.zeros((len(lengths), 1), dtype=np.int64)
    plan = decode_work.plan_attention(np.array(lengths) - 1, decodes, tables, 16, torch.empty(0, device=device))
    count, *items = plan.work.tolist()
    return [divmod(item, MAX_SPLITS) for item in items[:count]]


def tokens_of(lengths: list[int]) -> dict[tuple[int, int], int]:
    """(row, split) -> its tokens of context."""
    each = split_tokens(np.array(lengths), SPLIT, MAX_SPLITS)
    return {
        (row, split): min(int(each[row]), length - split * int(each[row]))
        for row, length in enumerate(lengths)
        for split in range(int(num_splits(np.array(length), SPLIT, MAX_SPLITS)))
    }


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} rows")
def test_each_split_is_listed_once_and_longer_ones_come_before_half_as_long_ones(lengths, device):
    items, tokens = listed(lengths, device), tokens_of(lengths)
    assert sorted(items) == sorted(tokens)
    each = split_tokens(np.array(lengths), SPLIT, MAX_SPLITS)
    for start in range(0, len(lengths), decode_work.ROWS_AT_ONCE):
        sizes = [int(each[row]) for row, _ in items if start <= row < start + decode_work.ROWS_AT_ONCE]
        longest_left = np.maximum.accumulate(sizes[::-1])[::-1]
        assert all(later < 2 * size or size > 8 * SPLIT for size, later in zip(sizes, longest_left, strict=True))


def test_a_graph_lists_the_rows_that_it_is_given(device):
    """Also for fewer rows than its buffers have, and with padding, which has one split that writes zeros."""
    like = torch.empty(0, device=device)
    plan = captured_plan.first_rows(captured_plan.plan_for_capture(8, 4096, 16, like), 4)
    tables = torch.zeros(9, 256, dtype=torch.int32, device=device)
    for lengths in ([600, 1, 4096, 300], [5, 0, 0, 0]):
        rows = torch.arange(4, device=device)
        decode_work.update_static_inputs(plan, torch.tensor(lengths, dtype=torch.int32, device=device), tables, rows)
        count, *items = plan.work.tolist()
        assert sorted(divmod(item, MAX_SPLITS) for item in items[:count]) == sorted(tokens_of(lengths))


@pytest.mark.capability("KN-8")
@pytest.mark.parametrize("lengths", [LENGTHS[2], [1024] * 127 + [131_072], [1024] * 256, [2048] * 31 + [32_768]])
def test_one_long_row_is_shared_by_many_programs(lengths):
    """Review of the engine, F4: 255 rows of 1k beside one of 131k took 2.5 times as long as the same tokens, balanced.

    Simulated by the plan's constants: programs on the card share its bandwidth, and one alone draws a part of it.
    """
    heads, card = 8, CARDS["H100"]
    items, tokens = listed(lengths, torch.device("cpu")), tokens_of(lengths)
    programs = min(len(items), -(-DECODE_PROGRAMS // heads))
    loads = [sum(tokens[item] for item in items[program::programs]) for program in range(programs)]
    waiting = deque(np.repeat(loads, heads))  # the heads of a program's splits are neighbours in the grid
    running: list[float] = []  # what each will have drawn when it ends, by what every program has drawn until now
    elapsed = drawn = 0.0
    while running or waiting:
        while waiting and len(running) < 8 * card.multiprocessors:
            heapq.heappush(running, drawn + float(waiting.popleft()))
        step = running[0] - drawn
        elapsed += step * max(len(running), card.multiprocessors / PROGRAM_SHARE)
        drawn = heapq.heappop(running)
    assert elapsed <= 1.15 * sum(tokens.values()) * heads


def test_the_host_and_the_device_count_splits_alike(device, monkeypatch):
    monkeypatch.setattr(attention_plan, "SPLIT", 16)
    monkeypatch.setattr(attention_plan, "MAX_SPLITS", 3)
    decodes, tables = np.ones(3, dtype=np.int64), np.zeros((3, 1), dtype=np.int64)
    plan = decode_work.plan_attention(np.array([0, 40, 99]), decodes, tables, 16, torch.empty(0, device=device))
    count, *items = plan.work.tolist()
    assert count == 1 + 3 + 3
    assert sorted(divmod(item, 3) for item in items[:count])[-1] == (2, 2)
