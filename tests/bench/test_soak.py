"""The figures of the soak: the slope of memory with its error, and the sums of metrics."""

import random

import pytest

from bench.soak import counters_of, slope_with_error


def test_a_straight_line_has_its_slope_and_no_error():
    assert slope_with_error([3.0 + 2.0 * index for index in range(20)]) == (2.0, 0.0)


@pytest.mark.parametrize("alike", [0.0, 0.8])
def test_the_error_covers_the_slope_that_noise_pretends(alike):
    """Two standard errors hold some 95 of 100 slopes, also where neighbouring samples are alike."""
    draw, missed = random.Random(0), 0
    for _ in range(300):
        noise, values = 0.0, []
        for index in range(120):
            noise = alike * noise + draw.gauss(0.0, 1.0)
            values.append(0.1 * index + noise)
        slope, error = slope_with_error(values)
        missed += abs(slope - 0.1) > 2 * error
    assert missed < 300 * 0.15


def test_metrics_are_summed_over_their_labels():
    text = '# HELP a_total x\na_total{k="1"} 2.0\na_total{k="2"} 3e+00\nb 4\n'
    assert counters_of(text) == {"a_total": 5.0, "b": 4.0}
