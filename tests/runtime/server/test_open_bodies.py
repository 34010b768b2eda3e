"""The bodies of all requests that wait for an answer take a bounded number of bytes, however they are sent."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from tests.runtime.server.serving import Running, a_replica

KIB = 1024
HEADERS = {"content-type": "application/json"}


def a_body(size: int, **fields: object) -> bytes:
    """A request of about so many bytes and few tokens."""
    messages = [{"role": "user", "content": "Hello!"}]
    return json.dumps({"messages": messages, "max_tokens": 1, "user": "u" * size, **fields}).encode()


async def chunks(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 16 * KIB):
        yield body[start : start + 16 * KIB]
        await asyncio.sleep(0)


async def held(replica: Running, number: int, size: int) -> list[asyncio.Task[int]]:
    """Requests whose bodies have been read, and whose answers do not come."""

    async def send() -> int:
        url = f"{replica.url}/v1/chat/completions"
        return (await replica.http.post(url, content=a_body(size), headers=HEADERS)).status_code

    replica.steps.hold()
    before = replica.client.stats()
    tasks = [asyncio.create_task(send()) for _ in range(number)]
    await replica.until(lambda stats: stats.running + stats.waiting == before.running + before.waiting + number)
    return tasks


@pytest.mark.capability("SE-2", "API-8")
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_beyond_the_bytes_of_all_open_ones_is_a_429_with_a_time(chunked: bool):
    async with a_replica(max_open_body_bytes=300 * KIB, max_body_bytes=90 * KIB) as replica:
        url, body = f"{replica.url}/v1/chat/completions", a_body(80 * KIB)
        waiting = await held(replica, 3, 80 * KIB)

        refused = await replica.http.post(url, content=chunks(body) if chunked else body, headers=HEADERS)
        small = asyncio.create_task(replica.chat(max_tokens=1))
        await replica.until(lambda stats: stats.running + stats.waiting == 4)
        replica.steps.resume_steps()

        assert refused.status_code == 429, refused.text
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["x-slipway-not-started"]
        error = refused.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert str(300 * KIB) in error["message"]
        assert [await task for task in waiting] == [200, 200, 200]
        assert (await small).status_code == 200
        again = await replica.http.post(url, content=chunks(body) if chunked else body, headers=HEADERS)
        assert again.status_code == 200, "the answered ones have given their bytes back"


async def test_a_stream_gives_the_bytes_of_its_body_back_when_it_begins():
    """What runs is bounded by the rows of a step; the budget is for what waits."""
    async with a_replica(max_open_body_bytes=100 * KIB, max_body_bytes=90 * KIB) as replica:
        url = f"{replica.url}/v1/chat/completions"
        endless = a_body(80 * KIB, stream=True, ignore_eos=True).replace(b'"max_tokens": 1,', b'"max_tokens": 1900,')
        async with replica.http.stream("POST", url, content=endless, headers=HEADERS) as stream:
            await anext(stream.aiter_lines())

            other = await replica.http.post(url, content=a_body(80 * KIB), headers=HEADERS)

    assert other.status_code == 200


async def test_a_refused_and_an_abandoned_body_give_their_bytes_back():
    async with a_replica(max_open_body_bytes=100 * KIB, max_body_bytes=90 * KIB) as replica:
        url = f"{replica.url}/v1/chat/completions"
        for _ in range(3):
            wrong = await replica.http.post(url, content=a_body(80 * KIB, top_k=-5), headers=HEADERS)
            assert wrong.status_code == 400

        answered = await replica.http.post(url, content=a_body(80 * KIB), headers=HEADERS)

    assert answered.status_code == 200
