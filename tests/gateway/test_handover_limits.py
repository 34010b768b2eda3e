"""The limits of a handover: time, memory, who may continue a stream, and what counts as a hang."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from slipway_api.stream_marks import handover_mark, tokens_mark
from slipway_gateway.picker.endpoints import Service
from tests.gateway.doubles import (
    MODEL,
    Runtime,
    a_caller,
    a_gateway,
    begin_stream,
    chunk,
    event,
    events_of,
    text_of,
    until,
)
from tests.gateway.handovers import MESSAGES, a_pair

CHAT = "/v1/chat/completions"
MARKS = "x-slipway-token-ids"


async def speak_with_marks(
    runtime: Runtime, request: web.Request, *, identity: str = "tiny/r1/t1"
) -> web.StreamResponse:
    """The words from where the request says it stands, each a token with its place as its id."""
    resume = runtime.bodies[-1].get("slipway_resume")
    done = len(resume["answers"][0]["output_token_ids"]) if resume else 0
    response = await begin_stream(request, **{MARKS: identity})
    for place, word in enumerate(runtime.words[done:], done):
        await runtime.allowed.acquire()
        await response.write(event(chunk(word)) + tokens_mark(0, [place], ended=False))
        runtime.streaming.set()
    await response.write(event(chunk("", "stop")) + tokens_mark(0, [], ended=True) + b"data: [DONE]\n\n")
    return response


async def break_after_two_words(runtime: Runtime, request: web.Request) -> web.StreamResponse:
    response = await begin_stream(request, **{MARKS: "tiny/r1/t1"})
    await response.write(event(chunk("Once")) + tokens_mark(0, [0], ended=False))
    await response.write(event(chunk(" upon")) + tokens_mark(0, [1], ended=False))
    await response.write(event(chunk(" not covered by a mark")))
    await runtime.allowed.acquire()
    request.transport.close()
    return response


async def hand_over_after_two_words(runtime: Runtime, request: web.Request) -> web.StreamResponse:
    response = await begin_stream(request, **{MARKS: "tiny/r1/t1"})
    await response.write(event(chunk("Once")) + tokens_mark(0, [0], ended=False))
    await response.write(
        event(chunk(" upon")) + tokens_mark(0, [1], ended=False) + handover_mark("the spot notice came")
    )
    return response


async def stream_through(*runtimes: Runtime, **settings: Any) -> list[Any]:
    async with a_gateway(*runtimes, **settings) as gateway, a_caller(gateway) as caller:
        return await _read(caller)


def error_of(events: list[Any]) -> str:
    return events[-1]["error"]["message"]


@pytest.mark.capability("RD-2", "RD-4")
@pytest.mark.parametrize("end", [break_after_two_words, hand_over_after_two_words])
async def test_without_another_replica_a_stream_ends_with_an_error_event(end):
    async with (
        Runtime(end) as runtime,
        a_gateway(runtime, handover_seconds=0.3) as gateway,
        a_caller(gateway) as caller,
    ):
        runtime.behaviour = end

        async def once(runtime: Runtime, request: web.Request) -> web.StreamResponse:
            return await end(runtime, request) if runtime.requests == 1 else web.Response(status=503)

        runtime.behaviour = once
        async with caller.chat(stream=True) as response:
            events = await events_of(response)

    assert text_of(events) == "Once upon"
    assert "no other replica could continue it" in error_of(events)


@pytest.mark.capability("RD-4")
async def test_a_replica_that_comes_back_in_time_continues_the_stream():
    async def die_then_load(runtime: Runtime, request: web.Request) -> web.StreamResponse:
        if runtime.requests == 1:
            return await break_after_two_words(runtime, request)
        if runtime.requests == 2:
            return web.json_response({"error": {"message": "loading"}}, status=503, headers={"Retry-After": "1"})
        return await speak_with_marks(runtime, request)

    async with Runtime(die_then_load) as runtime:
        events = await stream_through(runtime)

    assert text_of(events) == "Once upon a time."
    assert events[-1] == "[DONE]"
    assert runtime.headers[0][MARKS] == "1"
    assert runtime.headers[2][MARKS] == "resume"


@pytest.mark.capability("RD-4")
async def test_another_revision_or_tokenizer_never_continues_a_stream():
    async def other(runtime: Runtime, request: web.Request) -> web.StreamResponse:
        if runtime.requests == 1 and not resumed(runtime):
            return await break_after_two_words(runtime, request)
        return await speak_with_marks(runtime, request, identity="tiny/r1/t2" if resumed(runtime) else "tiny/r1/t1")

    def resumed(runtime: Runtime) -> bool:
        return "slipway_resume" in runtime.bodies[-1]

    async with Runtime(other) as one:
        events = await stream_through(one, handover_seconds=0.8)

    assert text_of(events) == "Once upon"
    assert "no other replica could continue it" in error_of(events)


@pytest.mark.capability("RD-2")
async def test_with_handover_off_marks_are_not_asked_for_and_a_stream_ends_with_an_error_event():
    async def plain(runtime: Runtime, request: web.Request) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(event(chunk("Once")))
        request.transport.close()
        return response

    async with Runtime(plain) as runtime, Runtime() as other, a_gateway(runtime, other) as gateway:
        key = f"static/{MODEL}"
        gateway.fleet.set_service(key, Service(key=key, served_name=MODEL, handover=False))
        other.behaviour = plain
        async with a_caller(gateway) as caller, caller.chat(stream=True) as response:
            events = await events_of(response)
        headers = [*runtime.headers, *other.headers]
        bodies = [*runtime.bodies, *other.bodies]

    assert len(headers) == 1
    assert MARKS not in headers[0]
    assert "seed" not in bodies[0]
    assert events[-1]["error"]["type"] == "BadGatewayError"


@pytest.mark.parametrize(("limits", "reason"), [
    ({"max_handover_stream_bytes": 1500}, "too_large"),
    ({"max_handover_bytes": 3000}, "memory"),
])  # fmt: skip
async def test_a_stream_without_room_for_its_tokens_loses_its_handover_and_never_its_answer(limits, reason):
    words = [f" word{number}" for number in range(2000)]
    async with Runtime(speak_with_marks, words=words) as runtime, a_gateway(runtime, **limits) as gateway:
        async with a_caller(gateway) as caller, caller.chat(stream=True) as response:
            events = await events_of(response)
        metrics = gateway.metrics.exposition().decode()

    assert text_of(events) == "".join(words)
    assert f'slipway_gateway_handover_disabled_total{{reason="{reason}",service="static/tiny"}} 1.0' in metrics
    assert "slipway_gateway_handover_bytes 0.0" in metrics


async def test_what_is_kept_is_counted_while_the_stream_lasts():
    async with Runtime(speak_with_marks).hold() as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        runtime.allow(1)
        async with caller.chat(stream=True) as response:
            await response.content.readany()
            [line] = [
                each
                for each in gateway.metrics.exposition().decode().splitlines()
                if each.startswith("slipway_gateway_handover_bytes ")
            ]
            assert float(line.split()[1]) > 1000
            runtime.allow(10)
            assert (await response.read()).endswith(b"[DONE]\n\n")
        await until(lambda: gateway.metrics.exposition().decode().count("slipway_gateway_handover_bytes 0.0"))


async def test_a_replica_without_marks_is_forwarded_as_it_is():
    async with Runtime() as runtime:
        events = await stream_through(runtime)

    assert text_of(events) == "Once upon a time."


@pytest.mark.capability("API-7")
async def test_a_services_timeout_ends_a_stream_with_an_error_event_and_is_told_to_the_replica():
    async with Runtime(speak_with_marks).hold() as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        key = f"static/{MODEL}"
        gateway.fleet.set_service(key, Service(key=key, served_name=MODEL, request_seconds=0.5))
        runtime.allow(1)
        async with caller.chat(stream=True) as response:
            events = await events_of(response)
        async with caller.chat() as response:
            late = response.status, json.loads(await response.read())
        await asyncio.wait_for(runtime.cancelled.wait(), 20)

    assert text_of(events) == "Once"
    assert events[-1]["error"]["code"] == 504
    assert 0.3 < float(runtime.headers[0]["x-slipway-deadline"]) <= 0.5
    assert late[0] == 504


@pytest.mark.parametrize(("headers", "requests"), [({}, 2), ({"x-slipway-not-started": "1"}, 3)])
async def test_a_503_is_retried_once_if_the_request_had_started_and_like_any_refusal_if_not(headers, requests):
    async def unavailable(runtime: Runtime, request: web.Request) -> web.StreamResponse:
        told = {"Retry-After": "1", "x-slipway-model": MODEL} | headers
        return web.json_response({"error": {"message": "gone"}}, status=503, headers=told)

    async with Runtime(unavailable) as one, Runtime(unavailable) as two, Runtime(unavailable) as three:
        async with a_gateway(one, two, three) as gateway, a_caller(gateway) as caller, caller.chat() as response:
            status = response.status
        asked = one.requests + two.requests + three.requests

    assert status == 503
    assert asked == requests


@pytest.mark.capability("RD-9")
async def test_a_hung_replicas_streams_and_waiting_requests_move_and_the_text_stays():
    body = {"messages": MESSAGES, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    async with a_pair(hang_seconds=1.0) as pair:
        whole = await pair.ask(CHAT, body)
        for replica in pair.replicas:
            replica.steps.hold()
            replica.steps.allow(6)
        running = asyncio.create_task(pair.ask(CHAT, body))
        await until(lambda: any(replica.client.stats().running for replica in pair.replicas))
        hung, other = sorted(pair.replicas, key=lambda replica: -replica.client.stats().running)
        await until(lambda: hung.client.stats().generated_tokens >= 3)
        other.steps.resume_steps()
        read = await asyncio.wait_for(running, 60)
        metrics = pair.gateway.metrics.exposition().decode()

    assert read == whole
    assert 'reason="hung",revision="static",service="static/tiny"} 1.0' in metrics


@pytest.mark.capability("RD-9")
async def test_a_stream_that_only_waits_beside_one_that_goes_on_is_not_moved():
    """One stream of the replica pauses for longer than a hang, while another one brings tokens all the time."""
    first = asyncio.Event()

    async def pause(runtime: Runtime, request: web.Request) -> web.StreamResponse:
        if first.is_set():
            response = await begin_stream(request, **{MARKS: "tiny/r1/t1"})
            for place in range(30):
                await response.write(event(chunk("x")) + tokens_mark(0, [place], ended=False))
                await asyncio.sleep(0.05)
            await response.write(event(chunk("", "stop")) + tokens_mark(0, [], ended=True) + b"data: [DONE]\n\n")
            return response
        first.set()
        return await speak_with_marks(runtime, request)

    async with Runtime(pause).hold() as runtime, Runtime(speak_with_marks) as spare:  # noqa: SIM117  it would not fit
        async with a_gateway(runtime, spare, hang_seconds=0.4) as gateway, a_caller(gateway) as caller:
            pinned = gateway.fleet.table.endpoint("static/tiny-1")
            gateway.fleet.set_endpoint("static/tiny-1", None)
            runtime.allow(1)
            async with caller.chat(stream=True) as waiting:
                await waiting.content.readany()
                going = asyncio.create_task(_read(caller))
                await until(lambda: runtime.requests == 2)
                gateway.fleet.set_endpoint("static/tiny-1", pinned)
                assert "[DONE]" in await going
                runtime.allow(10)
                assert (await waiting.read()).endswith(b"[DONE]\n\n")

    assert spare.requests == 0


async def _read(caller: Any) -> list[Any]:
    async with caller.chat(stream=True) as response:
        return await events_of(response)
