"""Sleep as an operator asks for it on the admin port."""

import asyncio

import pytest

from slipway_api.runtime_api import Ready, ReadyReason
from tests.runtime.server.serving import FOREVER, a_replica


@pytest.mark.capability("ST-7", "RD-3")
async def test_a_sleeping_replica_is_healthy_not_ready_refuses_and_wakes_as_it_was():
    async with a_replica() as replica:
        ask = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
        before = (await replica.chat(**ask)).json()["choices"]
        running = asyncio.create_task(replica.chat(**FOREVER))
        await replica.until(lambda stats: stats.running == 1)
        assert (await replica.admin("/sleep", "POST", json={"level": 1})).status_code == 409, "somebody is served"
        running.cancel()
        await replica.until(lambda stats: stats.running == 0)

        for level, state in ((1, "weights_offloaded"), (2, "discard_all")):
            assert (await replica.admin("/sleep", "POST", json={"level": level})).status_code == 200
            ready = await replica.admin("/ready")
            assert ready.status_code == 503
            assert Ready.model_validate_json(ready.content).reason is ReadyReason.SLEEPING
            assert (await replica.admin("/health")).status_code == 200
            refused = await replica.chat(**ask)
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            metrics = (await replica.admin("/metrics")).text.splitlines()
            (line,) = (line for line in metrics if line.startswith("vllm:engine_sleep_state{") and state in line)
            assert line.endswith(" 1.0")

            assert (await replica.admin("/wake_up", "POST")).status_code == 200
            assert (await replica.admin("/ready")).status_code == 200
            assert (await replica.chat(**ask)).json()["choices"] == before
