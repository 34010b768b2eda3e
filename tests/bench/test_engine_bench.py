"""What a benchmark of engines reports: prefill and decode apart, and never a batch of one alone."""

import pytest

from bench import engine, runtime
from bench.peers import waves
from bench.shapes import SHAPES, linear_sizes


@pytest.mark.capability("PF-27")
def test_prefill_and_decode_are_told_apart():
    """Counted on a clock of its own: 2 units a prefill, 1 a token."""
    clock = iter(range(10_000))

    def wave(prompts, max_tokens, tick):
        for _ in range(2):
            next(clock)
        for _ in range(max_tokens):
            for index in range(len(prompts)):
                tick(index)

    task = {"concurrency": 3, "prompt_tokens": 10, "max_tokens": 4, "rounds": 2}
    result = waves.drive(task, wave, clock=lambda: float(next(clock)))

    # A wave: begins at 0, two units of prefill, then a unit for each reading of the clock: 3 first tokens, 9 others.
    assert len(result["ttft"]) == 6
    assert len(result["gaps"]) == 2 * 3 * 3
    assert result["prefill_tokens_per_second"] == pytest.approx(2 * 3 * 10 / (2 * 5))
    assert result["decode_tokens_per_second"] == pytest.approx(2 * 3 * 3 / (2 * 10))
    assert result["tokens_per_second"] == pytest.approx(2 * 3 * 4 / (2 * 15))


def test_an_engine_that_stops_short_is_not_measured():
    def lazy(prompts, max_tokens, tick):
        for index in range(len(prompts)):
            tick(index)

    with pytest.raises(AssertionError, match="asked length"):
        waves.drive({"concurrency": 2, "prompt_tokens": 4, "max_tokens": 3, "rounds": 1}, lazy)


@pytest.mark.capability("PF-1")
def test_no_benchmark_measures_a_batch_of_one_alone():
    assert max(runtime.CONCURRENCY) >= 32
    for prompt in {case[0] for case in engine.CASES}:
        assert max(case[2] for case in engine.CASES if case[0] == prompt) >= 8


def test_the_floor_multiplies_every_weight_of_the_shape():
    parameters = sum(out * size for out, size in linear_sizes("135m"))

    assert parameters == pytest.approx(134.5e6, rel=0.01)
    assert set(SHAPES) == {"135m", "0.6b"}
