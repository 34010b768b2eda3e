"""Before the first byte another replica may answer; after it none; and retries are bounded."""

import asyncio

import pytest
from aiohttp import web

from tests.gateway.doubles import (
    Runtime,
    a_caller,
    a_gateway,
    be_draining,
    be_full,
    begin_stream,
    chunk,
    die_after_two_words,
    event,
    events_of,
    hang_up,
    text_of,
)


async def a_dead_port() -> str:
    """An address that refuses connections: a server had it a moment ago."""
    async with Runtime() as runtime:
        return runtime.url


@pytest.mark.parametrize("trouble", [be_draining, be_full, hang_up])
@pytest.mark.parametrize("stream", [True, False])
async def test_another_replica_answers_when_the_first_cannot(trouble, stream):
    async with (
        Runtime(trouble) as troubled,
        Runtime() as well,
        a_gateway(troubled, well) as gateway,
        a_caller(gateway) as caller,
    ):
        for _ in range(10):
            async with caller.chat(stream=stream) as response:
                assert response.status == 200
                await response.read()

        assert troubled.requests >= 1, "both replicas were tried"
        assert well.requests == 10


async def test_another_replica_answers_when_the_first_is_gone():
    dead = await a_dead_port()
    async with Runtime() as well, a_gateway(dead, well) as gateway, a_caller(gateway) as caller:
        for _ in range(10):
            async with caller.chat() as response:
                assert response.status == 200

        assert well.requests == 10


async def test_a_replica_that_dies_between_its_headers_and_its_first_byte_is_retried():
    async def headers_only(runtime, request):
        response = await begin_stream(request)
        response.force_close()
        request.transport.close()
        return response

    async with (
        Runtime(headers_only) as troubled,
        Runtime() as well,
        a_gateway(troubled, well) as gateway,
        a_caller(gateway) as caller,
    ):
        for _ in range(4):
            async with caller.chat(stream=True) as response:
                assert text_of(await events_of(response)) == "Once upon a time."


async def test_a_stream_that_has_begun_is_never_retried():
    async with (
        Runtime(die_after_two_words) as troubled,
        Runtime(die_after_two_words) as other,
        a_gateway(troubled, other) as gateway,
        a_caller(gateway) as caller,
    ):
        async with caller.chat(stream=True) as response:
            await events_of(response)

        assert troubled.requests + other.requests == 1


@pytest.mark.capability("BS-4")
async def test_when_every_replica_is_full_the_client_gets_their_429_with_its_time_to_come_back():
    async with (
        Runtime(be_full) as one,
        Runtime(be_full) as two,
        a_gateway(one, two) as gateway,
        a_caller(gateway) as caller,
        caller.chat() as response,
    ):
        assert response.status == 429
        assert response.headers["Retry-After"] == "7"
        assert response.headers["retry-after-ms"] == "6500"
        assert (await response.json())["error"]["message"] == "The queue is full."
        assert (one.requests, two.requests) == (1, 1)


async def test_when_every_replica_drains_the_client_gets_a_503_with_a_time_to_come_back():
    async with (
        Runtime(be_draining) as runtime,
        a_gateway(runtime) as gateway,
        a_caller(gateway) as caller,
        caller.chat() as response,
    ):
        assert response.status == 503
        assert response.headers["Retry-After"] == "3"


async def test_a_replica_that_said_503_is_left_alone_while_another_can_serve():
    async with (
        Runtime(be_draining) as draining,
        Runtime() as well,
        a_gateway(draining, well) as gateway,
        a_caller(gateway) as caller,
    ):
        for _ in range(20):
            async with caller.chat() as response:
                assert response.status == 200

        assert draining.requests <= 1


async def test_a_request_that_kills_replicas_is_tried_twice_not_on_the_whole_fleet():
    async with (
        Runtime(hang_up) as one,
        Runtime(hang_up) as two,
        Runtime(hang_up) as three,
        a_gateway(one, two, three) as gateway,
        a_caller(gateway) as caller,
        caller.chat() as response,
    ):
        assert response.status == 502
        assert "connection lost" in (await response.json())["error"]["message"]
        assert one.requests + two.requests + three.requests == 2


async def test_an_idle_connection_that_the_replica_closed_costs_nobody_an_error():
    """With one replica, the retry after a lost connection goes to that same replica."""

    async def hang_up_once(runtime, request):
        if runtime.requests == 1:
            return await hang_up(runtime, request)
        return web.json_response({"ok": True})

    async with Runtime(hang_up_once) as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        async with caller.chat() as response:
            assert response.status == 200
        assert runtime.requests == 2


async def test_errors_that_are_answers_are_passed_on_and_not_retried():
    async def too_long(runtime, request):
        return web.json_response({"error": {"message": "maximum context length is 64 tokens"}}, status=400)

    async with (
        Runtime(too_long) as one,
        Runtime(too_long) as two,
        a_gateway(one, two) as gateway,
        a_caller(gateway) as caller,
        caller.chat() as response,
    ):
        assert response.status == 400
        assert "maximum context length" in await response.text()
        assert one.requests + two.requests == 1


async def test_retries_stop_when_the_budget_is_spent():
    async with Runtime(hang_up) as one, Runtime(hang_up) as two:
        async with a_gateway(one, two) as gateway, a_caller(gateway) as caller:
            for _ in range(60):
                async with caller.chat():
                    pass

        # 60 requests: 20 saved retries and 0.2 for each request after the first, 31 at the very most.
        assert 60 + 20 <= one.requests + two.requests <= 60 + 20 + 12


async def test_load_goes_where_fewest_tokens_are_outstanding():
    async def forever(runtime, request):
        response = await begin_stream(request)
        await response.write(event(chunk("Once")))
        await asyncio.Event().wait()
        return response

    async with (
        Runtime(forever) as one,
        Runtime(forever) as two,
        a_gateway(one, two) as gateway,
        a_caller(gateway) as caller,
    ):
        long = await caller.chat(stream=True, max_tokens=4000)
        first = one if one.requests else two
        others = [await caller.chat(stream=True, max_tokens=10) for _ in range(5)]

        assert first.requests == 1, "one long answer outweighs five short ones"
        for response in (long, *others):
            response.close()
