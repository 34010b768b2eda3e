"""Slow, silent and dying replicas: what counts against them, what is tried again, and how a shutdown ends answers."""

import asyncio
import contextlib

import openai
import pytest
from aiohttp import web

from tests.gateway.doubles import (
    MODEL,
    Runtime,
    a_caller,
    a_gateway,
    begin_stream,
    chunk,
    event,
    events_of,
    hang_up,
    speak,
    text_of,
    until,
)


async def never_answer(runtime: Runtime, request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def say_one_word_and_stop(runtime: Runtime, request: web.Request) -> web.StreamResponse:
    response = await begin_stream(request)
    await response.write(event(chunk("Once")))
    await asyncio.Event().wait()
    return response


def die_with(status: int, kind: str, message: str):
    async def die(runtime: Runtime, request: web.Request) -> web.StreamResponse:
        error = {"message": message, "type": kind, "param": None, "code": status}
        return web.json_response({"error": error}, status=status)

    return die


def ejected(gateway) -> int:
    route = gateway.fleet.table.resolve(MODEL)
    return sum(gateway.fleet.is_ejected(endpoint) for endpoint in route.endpoints)


async def test_a_slow_answer_that_is_not_streamed_is_504_once_and_counts_against_no_replica():
    """Finding 9: it ran twice, ended in 502, and three such requests ejected both healthy replicas."""
    async with (
        Runtime(never_answer) as one,
        Runtime(never_answer) as two,
        a_gateway(one, two, request_seconds=0.2) as gateway,
    ):
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="none", max_retries=0)
        for number in range(6):
            with pytest.raises(openai.InternalServerError) as late:
                await client.chat.completions.create(model=MODEL, messages=[])

            assert late.value.status_code == 504
            assert "Retry-After" not in late.value.response.headers, "it would run again"
            assert one.requests + two.requests == number + 1
        assert ejected(gateway) == 0
        for replica in (one, two):
            if replica.requests:  # one time in sixty-four all six went to the other one
                await asyncio.wait_for(replica.cancelled.wait(), 20)


async def test_the_limit_on_silence_does_not_touch_an_answer_that_is_not_streamed():
    async with (
        Runtime().hold() as runtime,
        a_gateway(runtime, first_byte_seconds=0.05, stream_silence_seconds=0.5) as gateway,
        a_caller(gateway) as caller,
    ):
        call = asyncio.create_task(caller.chat().__aenter__())
        await until(lambda: runtime.requests == 1)
        await asyncio.sleep(0.8)
        runtime.allow(1)

        assert (await call).status == 200
        assert runtime.requests == 1


@pytest.mark.capability("RD-8", "RD-9")
async def test_a_stream_without_a_first_byte_is_answered_by_another_replica_and_the_silent_one_is_ejected():
    """Chaos C2 and C9: a hung or unplugged replica kept its requests although others could answer."""
    async with (
        Runtime(never_answer) as silent,
        Runtime() as well,
        a_gateway(silent, well, first_byte_seconds=1.0) as gateway,
        a_caller(gateway) as caller,
    ):
        for _ in range(12):
            async with caller.chat(stream=True) as response:
                assert text_of(await events_of(response)) == "Once upon a time."

        assert well.requests == 12
        assert 1 <= silent.requests <= 5, "three in a row eject it; then one at a time tries it"


async def test_a_stream_that_no_replica_begins_is_given_up():
    async with (
        Runtime(never_answer) as silent,
        a_gateway(silent, first_byte_seconds=0.05) as gateway,
        a_caller(gateway) as caller,
        caller.chat(stream=True) as response,
    ):
        assert response.status == 502
        assert "no first byte" in (await response.json())["error"]["message"]
        await asyncio.wait_for(silent.cancelled.wait(), 20)


async def test_a_stream_that_falls_silent_ends_with_an_error_event_and_counts_against_its_replica():
    """Chaos C2: two streams hung for 150 s; the limit was 600 s and could not be set."""
    async with (
        Runtime(say_one_word_and_stop) as silent,
        a_gateway(silent, stream_silence_seconds=0.05) as gateway,
        a_caller(gateway) as caller,
    ):
        for _ in range(3):
            async with caller.chat(stream=True) as response:
                assert "fell silent" in (await events_of(response))[-1]["error"]["message"]
        route = gateway.fleet.table.resolve(MODEL)

        assert gateway.fleet.destination(route.service.key).health[route.endpoints[0].name].failures >= 1
        await asyncio.wait_for(silent.cancelled.wait(), 20)


async def test_a_client_that_does_not_read_is_not_the_replicas_silence():
    """The limit counts only while the gateway waits for the replica."""
    async with (
        Runtime(words=["x" * 400_000] * 40) as runtime,
        a_gateway(runtime, stream_silence_seconds=1.0) as gateway,
        a_caller(gateway) as caller,
    ):
        response = await caller.chat(stream=True)
        await runtime.streaming.wait()
        await asyncio.sleep(2.5)

        assert (await events_of(response))[-1] == "[DONE]"


async def test_a_500_counts_against_its_replica_and_is_not_retried():
    """Chaos C3: a 500 counted as a success, so a dying replica was never ejected; its work may have been done."""
    async with (
        Runtime(die_with(500, "InternalServerError", "cannot schedule new futures")) as dying,
        Runtime() as well,
        a_gateway(dying, well) as gateway,
        a_caller(gateway) as caller,
    ):
        statuses = []
        while dying.requests < 3:
            async with caller.chat() as response:
                statuses.append(response.status)
                body = await response.json()
                assert response.status == 200 or body["error"]["message"] == "cannot schedule new futures"

        assert statuses.count(500) == 3
        assert ejected(gateway) == 1


@pytest.mark.capability("RD-9")
@pytest.mark.parametrize(
    "dead", [die_with(500, "EngineDeadError", "gone"), die_with(503, "ServiceUnavailableError", "the engine stopped")]
)
async def test_an_answer_that_says_the_engine_is_dead_is_tried_elsewhere_and_ejects(dead):
    """Chaos C3: the runtime sends 503 without Retry-After when its engine has died, and vLLM a 500 of its own type."""
    async with (
        Runtime(dead) as dying,
        Runtime() as well,
        a_gateway(dying, well) as gateway,
        a_caller(gateway) as caller,
    ):
        while dying.requests < 3:
            async with caller.chat() as response:
                assert response.status == 200

        assert ejected(gateway) == 1


@pytest.mark.capability("RD-8")
async def test_many_unreachable_replicas_do_not_keep_a_request_from_the_one_that_lives():
    """Chaos C9: a service answered 503 although replicas lived on the other node."""
    async with Runtime() as gone:
        dead = gone.url
    async with Runtime() as well, a_gateway(*[dead] * 6, well) as gateway, a_caller(gateway) as caller:
        for _ in range(20):
            async with caller.chat() as response:
                assert response.status == 200

        assert well.requests == 20


@pytest.mark.parametrize("failure", ["shutdown", "defect"])
async def test_nothing_is_ever_written_into_an_answer_that_has_begun(failure, monkeypatch):
    """Finding 13: a second `HTTP/1.1 503` was written inside a 200 with Content-Length, which then looked whole."""

    async def half(runtime, request):
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "2000000"})
        await response.prepare(request)
        await response.write(b'{"id": ')
        if failure == "defect":
            await runtime.allowed.acquire()
            await response.write(b'"1"')
        await asyncio.Event().wait()
        return response

    async with Runtime(half).hold() as runtime, a_gateway(runtime, drain_seconds=0.0, propagation_seconds=0) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        body = b'{"model": "tiny"}'
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        received = await reader.readuntil(b'{"id": ')
        if failure == "shutdown":
            await gateway.leave()
        else:

            def fail(*arguments):
                raise ValueError("a defect of the gateway")

            monkeypatch.setattr("slipway_gateway.access_log.RequestState.add_forwarded", fail)
            runtime.allow(1)
        with contextlib.suppress(ConnectionResetError):
            received += await reader.read()

        assert received.count(b"HTTP/1.1") == 1
        assert len(received.partition(b"\r\n\r\n")[2]) < 2000, "half an answer does not look whole"
        await asyncio.wait_for(gateway.requests.idle.wait(), 20)
        writer.close()


async def test_memory_of_a_body_is_free_from_the_first_byte_of_its_answer():
    """Finding 7: it was held until the last byte, for as long as a stream lasts."""
    async with (
        Runtime(say_one_word_and_stop) as runtime,
        a_gateway(runtime, max_body_bytes=10_000, max_bodies_bytes=14_000) as gateway,
        a_caller(gateway) as caller,
    ):
        streams = []
        for _ in range(3):
            stream = await caller.chat(stream=True, padding="x" * 5000)
            await stream.content.readuntil(b"\n\n")
            streams.append(stream)

        assert [stream.status for stream in streams] == [200] * 3
        for stream in streams:
            stream.close()


async def test_a_replica_that_hangs_up_is_still_tried_once_more_elsewhere():
    async with (
        Runtime(hang_up) as dead,
        Runtime(speak) as well,
        a_gateway(dead, well) as gateway,
        a_caller(gateway) as caller,
    ):
        for _ in range(5):
            async with caller.chat() as response:
                assert response.status == 200
