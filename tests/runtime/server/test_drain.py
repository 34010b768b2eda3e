"""The drain of a replica: what it refuses, what it finishes, when it ends."""

import asyncio
import json
import tempfile
from pathlib import Path

import httpx
import pytest

from slipway_api.runtime_api import DrainStatus, ReadyReason, Signals, StartupTimes
from slipway_runtime.main import ask_for_drain
from slipway_runtime.server.admin import serve_control
from slipway_runtime.server.replica import DRAINED_OUT, HUNG
from tests.runtime.server.serving import FOREVER, a_replica, ready_of


@pytest.mark.capability("RD-1")
async def test_a_drain_refuses_what_is_new_and_finishes_what_runs():
    async with a_replica() as replica:
        async with replica.streaming("Tell me a story.", ignore_eos=True, max_tokens=40) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            replica.steps.hold()

            answer = await replica.admin("/drain", "POST", json={"timeoutSeconds": 30, "reason": "test"})
            status = DrainStatus.model_validate_json(answer.content)
            assert (status.draining, status.running + status.waiting, status.is_drained) == (True, 1, False)
            assert await ready_of(replica) == (503, ReadyReason.DRAINING)
            refused = await replica.chat()
            assert refused.status_code == 503
            assert (refused.headers["retry-after"], refused.headers["x-slipway-not-started"]) == ("1", "1")
            again = await replica.admin("/drain", "POST")
            assert DrainStatus.model_validate_json(again.content).draining

            replica.steps.resume_steps()
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        async with asyncio.timeout(60):
            await replica.replica.drained()
        assert replica.client.stats().finished == 1
        assert (await replica.admin("/metrics")).status_code == 200, "a drained replica still shows its numbers"

        back = await replica.admin("/undrain", "POST")
        assert not DrainStatus.model_validate_json(back.content).draining
        assert await ready_of(replica) == (200, ReadyReason.READY)
        assert (await replica.chat(max_tokens=1)).status_code == 200


@pytest.mark.capability("RD-1")
async def test_a_drain_takes_new_requests_until_every_router_knows():
    """Finding 21: /ready is 503 at once; whoever has not heard of it yet is still served."""
    async with a_replica() as replica:
        asked = await replica.admin("/drain", "POST", json={"timeoutSeconds": 600, "refuseAfterSeconds": 500})
        assert DrainStatus.model_validate_json(asked.content).draining
        assert await ready_of(replica) == (503, ReadyReason.DRAINING)
        assert (await replica.chat(max_tokens=1)).status_code == 200
        await replica.admin("/drain", "POST", json={"timeoutSeconds": 600, "refuseAfterSeconds": 501})
        drained = asyncio.create_task(replica.replica.drained())
        assert (await replica.chat(max_tokens=1)).status_code == 200, "asked again, it takes requests as long as before"
        assert not drained.done(), "more may come"

        replica.replica.drain(600, refuse_after_seconds=0.01)
        async with asyncio.timeout(60):
            await drained
        refused = await replica.chat(max_tokens=1)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")

        await replica.admin("/undrain", "POST")
        assert (await replica.chat(max_tokens=1)).status_code == 200


@pytest.mark.capability("RD-1")
async def test_a_drain_that_may_take_less_time_than_routers_need_refuses_at_its_deadline():
    async with a_replica() as replica:
        replica.replica.drain(0, refuse_after_seconds=500)
        assert (await replica.chat(max_tokens=1)).status_code == 503


@pytest.mark.capability("RD-2")
async def test_at_the_deadline_of_a_drain_a_stream_ends_with_an_error_event():
    async with a_replica() as replica, replica.streaming(**FOREVER) as stream:
        lines = stream.aiter_lines()
        await anext(lines)
        await replica.admin("/drain", "POST", json={"timeoutSeconds": 3600})

        await replica.admin("/drain", "POST", json={"timeoutSeconds": 0})
        rest = [line async for line in lines if line]

        assert json.loads(rest[-2][6:])["error"]["message"] == DRAINED_OUT
        assert rest[-1] == "data: [DONE]"
        async with asyncio.timeout(60):
            await replica.replica.drained()


@pytest.mark.capability("RD-2", "RD-9")
async def test_a_drain_of_a_hung_engine_ends_its_streams_at_once_and_leaves_no_request():
    """ADR 81: the hour of the drain is for streams that can finish."""
    async with a_replica() as replica, replica.streaming(**FOREVER) as stream:
        lines = stream.aiter_lines()
        await anext(lines)
        replica.steps.hold()
        replica.clock.ahead += 121
        assert (await replica.admin("/health")).status_code == 503
        await replica.admin("/drain", "POST", json={"timeoutSeconds": 3600, "refuseAfterSeconds": 3000})
        rest = [line async for line in lines if line]

        assert json.loads(rest[-2][6:])["error"]["message"] == HUNG
        async with asyncio.timeout(60):
            await replica.replica.drained()
        assert replica.client.stats().running == 1, "the engine counts it for ever"
        signals = Signals.model_validate_json((await replica.admin("/signals")).content)
        assert (signals.draining, signals.running, signals.waiting) == (True, 0, 0)
        replica.steps.resume_steps()


@pytest.mark.capability("RD-1", "RD-9")
async def test_a_drain_that_begins_during_a_stall_waits_until_the_engine_goes_on_or_hangs():
    """ADR 81: a stall of less than --hang-seconds does not shorten a drain."""
    async with a_replica() as replica, replica.streaming(**FOREVER) as stream:
        lines = stream.aiter_lines()
        await anext(lines)
        replica.steps.hold()
        replica.clock.ahead += 100
        await replica.admin("/drain", "POST", json={"timeoutSeconds": 3600})
        assert await ready_of(replica) == (503, ReadyReason.STEP_LOOP_STALLED)
        ending = replica.replica._until_it_hangs
        assert ending is not None
        replica.steps.allow(3)
        await replica.until(lambda stats: stats.generated_tokens >= 3)
        assert (ending.done(), replica.replica.drain_status().running) == (False, 1)

        replica.clock.ahead += 121
        rest = [line async for line in lines if line]
        assert json.loads(rest[-2][6:])["error"]["message"] == HUNG
        replica.steps.resume_steps()


@pytest.mark.capability("RD-1", "RD-9")
async def test_a_drain_ends_when_the_engine_dies():
    """ADR 81: the counts of a dead engine stay as they were."""
    async with a_replica() as replica:
        replica.steps.hold()
        asking = asyncio.create_task(replica.chat(**FOREVER))
        await replica.until(lambda stats: stats.running + stats.waiting == 1)
        await replica.admin("/drain", "POST", json={"timeoutSeconds": 3600})
        replica.steps.failure = RuntimeError("broken")
        replica.steps.resume_steps()

        assert (await asking).status_code == 503
        async with asyncio.timeout(60):
            await replica.replica.drained()


@pytest.mark.capability("RD-1")
async def test_a_replica_that_was_never_ready_has_drained_at_once():
    """ADR 81: no router sends it anything, so it does not wait for routers. Such is a container that restarted."""
    async with a_replica(load=False) as replica:
        replica.replica.drain(3600, refuse_after_seconds=3000)
        async with asyncio.timeout(60):
            await replica.replica.drained()


async def test_a_longer_deadline_does_not_replace_a_shorter_one():
    async with a_replica() as replica:
        asking = asyncio.create_task(replica.chat(**FOREVER))
        await replica.until(lambda stats: stats.running == 1)
        replica.replica.drain(0.2)
        replica.replica.drain(3600)

        assert (await asking).status_code == 503


@pytest.mark.capability("RD-1")
async def test_a_drain_that_comes_while_loading_is_not_forgotten():
    async with a_replica(load=False) as replica:
        await replica.admin("/drain", "POST")
        replica.replica.ready_with(replica.models[0], StartupTimes())

        assert await ready_of(replica) == (503, ReadyReason.DRAINING)
        assert (await replica.chat()).status_code == 503


@pytest.mark.capability("RD-1")
async def test_the_drain_socket_answers_when_the_last_stream_has_ended():
    with tempfile.TemporaryDirectory(prefix="slw") as short:  # socket paths have room for 107 bytes
        directory = Path(short)
        async with a_replica() as replica:
            server = await serve_control(replica.replica, directory)
            assert server is not None
            asking = asyncio.create_task(replica.chat(ignore_eos=True, max_tokens=60))
            await replica.until(lambda stats: stats.running == 1)

            answer = await asyncio.to_thread(ask_for_drain, directory / "drain.sock", 30)

            assert answer == {"draining": True, "running": 0, "waiting": 0}
            assert asking.done() or (await asking).status_code == 200
            server.close()


# --- the token


async def test_a_senseless_drain_request_is_a_400():
    async with a_replica() as replica:
        answer: httpx.Response = await replica.admin("/drain", "POST", content=b'{"timeoutSeconds": -1}')

        assert answer.status_code == 400
        assert not replica.replica.draining
