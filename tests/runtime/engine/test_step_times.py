"""How long steps take, as the engine's client sees it."""

import pytest

from slipway_runtime.engine.step_times import WINDOW_SECONDS, StepTimes


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.capability("RD-9")
def test_a_step_takes_from_when_work_was_there_until_its_report():
    clock = Clock()
    times = StepTimes(0.5, clock)
    clock.now += 1000  # idle
    times.work_came()
    clock.now += 2
    times.reported()
    assert times.longest == 2.0
    clock.now += 3
    times.reported()
    assert times.longest == 3.0
    assert times.waiting_since == clock.now


@pytest.mark.capability("RD-9")
def test_a_long_step_is_forgotten_after_some_minutes_and_the_widest_of_the_warm_up_never():
    clock = Clock()
    times = StepTimes(0.5, clock)
    clock.now += 20
    times.reported()
    assert times.longest == 20.0
    for _ in range(3):
        clock.now += WINDOW_SECONDS
        times.work_came()
        times.reported()
    assert times.longest == 0.5
