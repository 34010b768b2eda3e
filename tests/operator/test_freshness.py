"""Alive means fresh data: a zombie watch is worth a restart, an API server that is down is not."""

import asyncio

import pytest

from slipway_kube.errors import Unreachable
from slipway_operator.inputs.freshness import Freshness
from tests.operator.virtual_time import run_in_virtual_time


@pytest.mark.parametrize(
    ("silent_seconds", "server_answers", "is_alive"),
    [(10, True, True), (10, False, True), (1000, False, True), (1000, True, False)],
)
def test_only_a_silent_watch_of_a_server_that_answers_is_dead(silent_seconds, server_answers, is_alive):
    async def ping() -> bytes:
        if not server_answers:
            raise Unreachable("connection refused")
        return b"{}"

    async def story() -> None:
        clock = asyncio.get_running_loop().time
        freshness = Freshness(lambda: silent_seconds, ping, monotonic=clock)
        task = asyncio.create_task(freshness.run())
        await asyncio.sleep(60)

        assert freshness.alive()[0] is is_alive
        task.cancel()

    run_in_virtual_time(story())


def test_a_loop_that_does_not_run_is_dead():
    now = 0.0
    freshness = Freshness(lambda: 0.0, lambda: asyncio.sleep(0), monotonic=lambda: now)
    now = 60.0

    is_alive, sentence = freshness.alive()

    assert not is_alive
    assert "60 s" in sentence
