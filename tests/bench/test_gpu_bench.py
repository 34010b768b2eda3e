"""`python -m bench.gpu` without a GPU: the order of its parts, its budget, and the kernels that it times."""

import itertools
from collections.abc import Iterator

import pytest
import torch

from bench import gpu, gpu_kernels
from bench.figures import Figure
from bench.gpu import Here, Part
from bench.gpu_kernels import Ceilings, Shape, Timer

SMALL = Shape("small", 32, 64, 4, 2, 16, 300)
ONCE = Timer(lambda run: (run(), 1e-3)[1], lambda run: (run(), 1e-3)[1])
CARD = Ceilings(1e9, 1e12)
CPU = torch.device("cpu")


def a_figure(here: Here) -> Iterator[Figure]:
    yield Figure("one", 1.0, "")


def fails(here: Here) -> Iterator[Figure]:
    yield Figure("half", 0.5, "")
    raise RuntimeError("out of memory")


@pytest.mark.capability("KN-8")
def test_a_part_is_reported_as_it_ends_and_one_that_fails_stops_no_other():
    parts = {"good": Part(1, a_figure), "bad": Part(1, fails), "last": Part(1, a_figure)}
    reported = dict(gpu.measure(Here(), parts, clock=lambda: 0.0))
    assert [one.name for one in reported["good"].figures] == ["one"]
    assert reported["bad"].title == "bad: failed after 0 s, RuntimeError: out of memory"
    assert [one.name for one in reported["bad"].figures] == ["half"], "what it had measured by then is kept"
    assert [one.name for one in reported["last"].figures] == ["one"]


@pytest.mark.capability("KN-8")
def test_a_part_without_room_in_the_budget_is_named_and_a_shorter_one_still_runs():
    ticks = itertools.count(0.0, 10.0)  # each look at the clock is 10 s later
    parts = {"first": Part(5, a_figure), "long": Part(100, a_figure), "short": Part(5, a_figure)}
    reported = dict(gpu.measure(Here(), parts, budget=100, clock=lambda: next(ticks)))
    assert reported["first"].figures
    assert not reported["long"].figures
    assert "left out" in reported["long"].title
    assert reported["short"].figures


@pytest.mark.capability("KN-8")
def test_the_kernels_that_are_timed_run_on_small_shapes():
    contexts = {"equal": [40, 40], "ragged": [20, 300]}
    decoded = list(gpu_kernels.decode(SMALL, CPU, ONCE, CARD, contexts, ("bf16", "int8")))
    assert len(decoded) == 4
    assert decoded[0].value == pytest.approx(100 * 2 * 2 * 2 * 16 * 80 / 1e-3 / 1e9), "keys and values, read once"
    filled = list(gpu_kernels.prefill(SMALL, CPU, ONCE, CARD, [33]))
    assert [one.unit for one in filled] == ["TFLOP/s", "×", "×"]


@pytest.mark.capability("KN-8")
def test_a_cache_to_read_has_random_numbers():
    """Review of the engine, F6: an H200 read zeros 13 % faster than numbers."""
    for dtype in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        pages = gpu_kernels.random_pages(3, SMALL, CPU, dtype)
        assert pages.view(torch.uint8).unique().numel() > 50
