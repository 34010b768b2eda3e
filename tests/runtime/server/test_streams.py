"""A stream is prompt, ends when its reader leaves, and says so when something breaks."""

import asyncio
import json

import httpx
import pytest
from openai import APIError

from slipway_runtime.engine.client import QueueLimits
from slipway_runtime.messages import EngineStats
from tests.runtime.server.serving import FOREVER, Running, a_replica


def nothing_left(stats: EngineStats) -> bool:
    return stats.blocks_live == stats.running == stats.waiting == 0


@pytest.mark.capability("API-2")
async def test_the_first_event_arrives_before_the_second_token_is_computed():
    async with a_replica() as replica:
        replica.steps.hold()
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            seen: asyncio.Queue[str] = asyncio.Queue()

            async def read() -> None:
                async with replica.streaming("What is a pod?", max_tokens=4, ignore_eos=True) as stream:
                    async for line in stream.aiter_lines():
                        if line.startswith("data: {"):
                            seen.put_nowait(line)

            tasks.create_task(read())
            await replica.until(lambda stats: stats.running + stats.waiting == 1)
            replica.steps.allow(1)
            role, first = json.loads((await seen.get())[6:]), json.loads((await seen.get())[6:])

            assert role["choices"][0]["delta"]["role"] == "assistant"
            assert first["choices"][0]["delta"]["content"]
            assert replica.client.stats().generated_tokens == 1
            replica.steps.resume_steps()


@pytest.mark.capability("API-2")
async def test_every_token_is_an_event_of_its_own():
    async with a_replica() as replica, replica.streaming("What is a pod?", max_tokens=12, ignore_eos=True) as stream:
        events = [json.loads(line[6:]) async for line in stream.aiter_lines() if line.startswith("data: {")]

    assert len(events) == 1 + 12, "the role, and a token each"


@pytest.mark.capability("API-7", "PF-10")
async def test_leaving_a_stream_frees_its_blocks_within_a_step():
    async with a_replica() as replica:
        async with replica.streaming(**FOREVER) as stream:
            lines = stream.aiter_lines()
            for _ in range(8):
                await anext(lines)
            assert replica.client.stats().blocks_live > 0
        # Left in the middle: the connection closes, and at most the step under way goes on.
        stats = await replica.until(nothing_left)

        assert stats.aborted == 1
        assert stats.generated_tokens < 1_000


@pytest.mark.capability("API-7")
async def test_after_a_disconnect_not_a_single_further_step_holds_its_blocks():
    async with a_replica() as replica:
        async with replica.streaming(**FOREVER) as stream:
            await anext(stream.aiter_lines())
            replica.steps.hold()
            steps = replica.client.stats().steps
        async with asyncio.timeout(60):
            while replica.replica._open:  # noqa: ASYNC110  the server has noticed
                await asyncio.sleep(0.01)
        replica.steps.allow(3)
        stats = await replica.until(nothing_left)

        assert stats.steps <= steps + 3


@pytest.mark.capability("API-7")
async def test_giving_up_on_an_answer_in_one_piece_frees_its_blocks():
    async with a_replica() as replica:
        asking = asyncio.create_task(replica.chat(**FOREVER))
        await replica.until(lambda stats: stats.generated_tokens > 5)
        asking.cancel()

        stats = await replica.until(nothing_left)

        assert stats.aborted == 1


@pytest.mark.capability("API-7")
async def test_leaving_the_queue_leaves_no_trace():
    async with a_replica(max_num_seqs=1) as replica:
        running = asyncio.create_task(replica.chat(**FOREVER))
        await replica.until(lambda stats: stats.running == 1)
        queued = asyncio.create_task(replica.chat(stream=True, **FOREVER))
        await replica.until(lambda stats: stats.waiting == 1)
        queued.cancel()

        await replica.until(lambda stats: stats.waiting == 0 and stats.running == 1)
        running.cancel()
        stats = await replica.until(nothing_left)

        assert stats.admitted == stats.aborted == 2


@pytest.mark.capability("BS-4")
async def test_beyond_the_queue_a_429_says_when_to_come_back():
    async with a_replica(max_num_seqs=1, limits=QueueLimits(max_requests=2)) as replica:
        replica.steps.hold()
        held = [asyncio.create_task(replica.chat(max_tokens=2)) for _ in range(2)]
        await replica.until(lambda stats: stats.running + stats.waiting == 2)

        whole, stream = await replica.chat(), await replica.chat(stream=True)

        for refused in (whole, stream):
            assert refused.status_code == 429
            assert refused.headers["retry-after"].isdigit()
            assert int(refused.headers["retry-after"]) >= 1
            assert int(refused.headers["retry-after-ms"]) >= 1
            assert refused.json()["error"]["type"] == "RateLimitError"
        assert replica.client.stats().admitted == 2
        replica.steps.resume_steps()
        assert [(await task).status_code for task in held] == [200, 200]


async def test_the_engine_dying_ends_a_stream_with_an_error_event_and_not_a_reset():
    async with a_replica() as replica:
        async with replica.streaming(**FOREVER) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            replica.steps.failure = RuntimeError("the GPU fell off the bus")
            rest = [line async for line in lines if line]

        error = json.loads(rest[-2][6:])["error"]
        assert error["code"] == 503
        assert "GPU" not in error["message"], "what broke is for the log"
        assert rest[-1] == "data: [DONE]"
        assert (await replica.chat()).status_code == 503


async def test_the_openai_client_raises_on_an_error_event():
    async with a_replica() as replica:
        stream = await replica.openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], stream=True, extra_body=FOREVER
        )
        await anext(aiter(stream))
        replica.steps.failure = RuntimeError("broken")
        with pytest.raises(APIError):
            async for _ in stream:
                pass


async def test_the_engine_dying_before_the_first_token_is_a_503_that_a_gateway_may_retry():
    async with a_replica() as replica:
        replica.steps.hold()
        asked = [asyncio.create_task(replica.chat(stream=stream)) for stream in (True, False)]
        await replica.until(lambda stats: stats.running + stats.waiting == 2)
        replica.steps.failure = RuntimeError("broken")
        replica.steps.resume_steps()

        assert [(await task).status_code for task in asked] == [503, 503]


async def test_many_streams_at_once_all_end_well():
    async with a_replica(max_num_seqs=8) as replica:

        async def one(number: int) -> str:
            async with replica.streaming(f"Count from {number} to 20.", max_tokens=20) as stream:
                return [line async for line in stream.aiter_lines() if line][-1]

        ends = await asyncio.gather(*(one(number) for number in range(24)))
        stats = await replica.until(nothing_left)

    assert set(ends) == {"data: [DONE]"}
    assert stats.admitted == stats.finished == 24


async def test_a_reader_that_hangs_up_mid_headers_costs_nothing():
    async with a_replica() as replica:
        await _hang_up(replica)
        assert (await replica.chat(max_tokens=1)).status_code == 200


async def _hang_up(replica: Running) -> None:
    url = httpx.URL(replica.url)
    _, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 100\r\ncontent-type: application/json\r\n\r\n{"
    )
    await writer.drain()
    writer.close()
