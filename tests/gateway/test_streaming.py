"""Answers pass through as they are made, end clearly when they break, and are cancelled when the client is gone."""

import asyncio
import json

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
    die_after_two_words,
    end_without_saying_why,
    event,
    events_of,
    text_of,
    until,
)


async def next_event(response) -> str:
    return (await response.content.readuntil(b"\n\n")).decode()


@pytest.mark.capability("API-2")
async def test_every_word_reaches_the_client_before_the_next_one_is_made():
    async with Runtime().hold() as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        runtime.allow(1)
        async with caller.chat(stream=True) as response:
            for number, word in enumerate(runtime.words):
                received = json.loads((await next_event(response)).removeprefix("data: "))

                assert received["choices"][0]["delta"]["content"] == word
                assert runtime.said == number + 1, "the runtime is still waiting before its next word"

                runtime.allow(1)
            assert (await events_of(response))[-1] == "[DONE]"


async def test_a_stream_passes_unchanged():
    async with Runtime() as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        async with caller.session.post(f"{runtime.url}/v1/chat/completions", json={"stream": True}) as direct:
            expected = await direct.read()
        async with caller.chat(stream=True) as response:
            assert await response.read() == expected
            assert response.headers["Content-Type"] == "text/event-stream"


@pytest.mark.capability("API-1", "API-2")
async def test_the_stock_client_reads_a_stream_through_the_gateway():
    async with Runtime() as runtime, a_gateway(runtime) as gateway:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="none", max_retries=0)
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello"}], stream=True
        )
        text = "".join([part.choices[0].delta.content or "" async for part in stream if part.choices])

        assert text == "Once upon a time."


@pytest.mark.capability("API-7", "PF-10")
async def test_a_client_that_leaves_in_the_middle_cancels_the_request_at_the_runtime():
    async with Runtime().hold() as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        runtime.allow(2)
        response = await caller.chat(stream=True)
        await next_event(response)
        response.close()

        await asyncio.wait_for(runtime.cancelled.wait(), 10)
        await asyncio.wait_for(gateway.requests.idle.wait(), 10)


@pytest.mark.capability("API-7", "PF-10")
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_the_first_byte_cancels_the_request_at_the_runtime(stream):
    async def never(runtime, request):
        runtime.streaming.set()
        await asyncio.Event().wait()

    async with Runtime(never) as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        call = asyncio.create_task(caller.chat(stream=stream).__aenter__())
        await runtime.streaming.wait()
        call.cancel()

        await asyncio.wait_for(runtime.cancelled.wait(), 10)
        await asyncio.wait_for(gateway.requests.idle.wait(), 10)


async def test_a_client_that_leaves_while_it_still_sends_leaves_nothing_behind():
    async with Runtime() as runtime, a_gateway(runtime) as gateway:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        await writer.drain()
        await until(lambda: gateway.requests.open)
        writer.close()

        await asyncio.wait_for(gateway.requests.idle.wait(), 10)
        assert runtime.requests == 0


async def test_headers_come_before_a_stream_whose_first_piece_is_half_an_event():
    async def stutter(runtime, request):
        response = await begin_stream(request)
        whole = event(chunk("Once"))
        for part in (
            whole[:25],
            whole[25:] + event(chunk(" upon"))[:9],
            event(chunk(" upon"))[9:],
            b"data: [DONE]\n\n",
        ):
            await response.write(part)
            await runtime.allowed.acquire()
        return response

    async with Runtime(stutter).hold() as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        call = asyncio.create_task(caller.chat(stream=True).__aenter__())
        await until(lambda: any(record.first_byte for record in gateway.requests._open.values()))
        runtime.allow(4)
        async with await call as response:
            assert response.headers["Content-Type"] == "text/event-stream"
            assert text_of(await events_of(response)) == "Once upon"


async def test_a_replica_that_dies_in_the_middle_ends_the_stream_with_an_error_event_after_whole_events_only():
    async with Runtime(die_after_two_words) as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        async with caller.chat(stream=True) as response:
            events = await events_of(response)

        assert text_of(events) == "Once upon"
        assert events[-1]["error"]["type"] == "BadGatewayError"
        assert "[DONE]" not in events
        assert runtime.requests == 1, "what was begun is not begun again"


async def test_the_stock_client_raises_when_a_replica_dies_in_the_middle():
    async with Runtime(die_after_two_words) as runtime, a_gateway(runtime) as gateway:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="none", max_retries=0)
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello"}], stream=True
        )
        with pytest.raises(openai.APIError, match="broke off"):
            async for _ in stream:
                pass


async def test_a_stream_that_stops_without_a_reason_is_not_passed_off_as_finished():
    async with Runtime(end_without_saying_why) as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        async with caller.chat(stream=True) as response:
            events = await events_of(response)

        assert text_of(events) == "Once"
        assert "without saying why" in events[-1]["error"]["message"]


async def test_the_runtimes_own_error_event_is_passed_on_alone():
    async def fail(runtime, request):
        response = await begin_stream(request)
        await response.write(event(chunk("Once")) + event({"error": {"message": "out of luck", "code": 500}}))
        return response

    async with Runtime(fail) as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        async with caller.chat(stream=True) as response:
            events = await events_of(response)

        assert [body["error"]["message"] for body in events if "error" in body] == ["out of luck"]


async def test_half_an_answer_that_is_not_a_stream_never_looks_whole():
    async def half(runtime, request):
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "2000000"})
        await response.prepare(request)
        await response.write(b'{"id": ')
        request.transport.close()
        return response

    async with Runtime(half) as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        with pytest.raises((ConnectionError, Exception), match=r"payload|closed|disconnect|reset"):
            async with caller.chat() as response:
                await response.read()


@pytest.mark.capability("API-2")
async def test_a_client_that_does_not_read_holds_the_replica_back():
    """The gateway buffers a bounded part of a stream, whatever its length."""
    piece, sent = b": " + b"x" * 65_536 + b"\n\n", 0

    async def flood(runtime, request):
        nonlocal sent
        response = await begin_stream(request)
        while True:
            await response.write(piece)
            sent += len(piece)
            runtime.streaming.set()

    async with Runtime(flood) as runtime, a_gateway(runtime) as gateway:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
        body = json.dumps({"model": MODEL, "stream": True}).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await runtime.streaming.wait()
        before = -1
        while before != sent:  # until nothing moves any more
            before = sent
            await asyncio.sleep(0.2)

        assert sent < 64 << 20, "the kernel's buffers and a few chunks of ours, not the whole stream"
        writer.close()
        await asyncio.wait_for(runtime.cancelled.wait(), 10)


async def test_many_streams_do_not_wait_for_each_other():
    async def one_word_each(runtime, request):
        response = await begin_stream(request)
        await response.write(event(chunk("Once")))
        await asyncio.Event().wait()
        return response

    async with Runtime(one_word_each) as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        responses = [await caller.chat(stream=True) for _ in range(20)]
        firsts = [await next_event(response) for response in responses]

        assert all("Once" in first for first in firsts)
        for response in responses:
            response.close()


async def test_leaving_lets_running_streams_finish_and_asks_clients_to_connect_anew():
    async with Runtime().hold() as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        runtime.allow(1)
        running = await caller.chat(stream=True)
        await next_event(running)
        leaving = asyncio.create_task(gateway.leave())
        await asyncio.sleep(0)
        async with caller.session.get(f"{caller.admin_url}/ready") as ready:
            assert ready.status == 503
            assert (await ready.json())["reason"] == "ShuttingDown"
        runtime.allow(100)

        assert (await events_of(running))[-1] == "[DONE]"
        await leaving


async def test_what_outlives_the_limit_ends_with_an_error_event():
    async with (
        Runtime().hold() as runtime,
        a_gateway(runtime, drain_seconds=0.0) as gateway,
        a_caller(gateway) as caller,
    ):
        runtime.allow(1)
        running = await caller.chat(stream=True)
        await next_event(running)
        waiting = asyncio.create_task(caller.chat(stream=True).__aenter__())
        await until(lambda: runtime.requests == 2)
        await gateway.leave()

        assert "shutting down" in (await events_of(running))[-1]["error"]["message"]
        refused = await waiting
        assert refused.status == 503
        assert refused.headers["Retry-After"] == "1"
        await asyncio.wait_for(runtime.cancelled.wait(), 10)
