"""A resync goes round all keys once a period, each at its own moment."""

import asyncio
from collections import Counter
from itertools import pairwise

import pytest

from slipway_kube.errors import Unreachable
from slipway_operator.controller.kinds import Key
from slipway_operator.controller.resync import Resync
from tests.operator.virtual_time import run_in_virtual_time


def test_a_thousand_keys_are_spread_over_the_period_and_each_comes_once_in_it():
    """Finding 14: all of them came at once, and a dead pod queued behind 2,000 writes."""
    keys = [Key("InferenceService", "team", f"chat-{number}") for number in range(1000)]
    seen: list[tuple[float, Key]] = []
    checks: list[float] = []

    async def story() -> None:
        loop = asyncio.get_running_loop()

        async def check() -> None:
            checks.append(loop.time())
            if len(checks) == 1:
                raise Unreachable("no answer")

        task = asyncio.create_task(
            Resync(lambda: keys, lambda key: seen.append((loop.time(), key)), check, period_seconds=(300, 300)).run()
        )
        await asyncio.sleep(900)
        task.cancel()

    run_in_virtual_time(story())

    assert Counter(key for _, key in seen) == dict.fromkeys(keys, 3)
    assert max(Counter(int(at) for at, _ in seen).values()) <= 15  # of 3.3 a second on average
    moments = [at for at, key in seen if key == keys[0]]
    assert [later - earlier for earlier, later in pairwise(moments)] == pytest.approx([300, 300])
    assert checks[:2] == pytest.approx([300, 600])
