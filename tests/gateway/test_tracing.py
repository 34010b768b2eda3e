"""Traces of requests: sent by the gateway to a real collector (rotel), and decoded from what that passes on."""

import asyncio
import subprocess
import sys
from typing import Any

import aiohttp
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.gateway.doubles import (
    MODEL,
    Behaviour,
    Runtime,
    a_caller,
    a_gateway,
    be_full,
    die_after_two_words,
    hang_up,
    speak,
    until,
)
from tests.otlp_collector import a_collector, values

pytestmark = pytest.mark.timeout(60)

SECRET = "a bear called Quillington"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=7"}


async def ask(caller: Any, **options: Any) -> None:
    async with caller.chat(messages=[{"role": "user", "content": SECRET}], max_tokens=9, **options) as response:
        await response.read()


@pytest.mark.capability("OB-10")
async def test_a_request_is_one_trace_from_the_clients_span_to_the_replicas():
    async with (
        a_collector() as (url, backend),
        Runtime() as runtime,
        a_gateway(runtime, otlp_endpoint=url, trace_ratio=0.0) as gateway,
        a_caller(gateway) as caller,
    ):
        await ask(caller, stream=True, headers=SAMPLED | {"x-request-id": "story-7"})
        await until(lambda: len(backend.spans) == 2)
        [attempt] = backend.named("chat replica")
        [request] = backend.named(f"chat {MODEL}")
        handed_on = runtime.headers[0]
    told = values(request.attributes)

    assert request.trace_id.hex() == attempt.trace_id.hex() == TRACE
    assert request.parent_span_id.hex() == PARENT
    assert attempt.parent_span_id == request.span_id
    assert handed_on["traceparent"] == f"00-{TRACE}-{attempt.span_id.hex()}-01", "the replica continues the attempt"
    assert handed_on["tracestate"] == "vendor=7"
    assert (request.kind, attempt.kind) == (Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT)
    assert request.start_time_unix_nano <= attempt.start_time_unix_nano
    assert attempt.end_time_unix_nano <= request.end_time_unix_nano
    assert {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "slipway",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 5,
        "http.response.status_code": 200,
        "slipway.request_id": "story-7",
        "slipway.service": f"static/{MODEL}",
    }.items() <= told.items()
    assert [event.name for event in request.events] == ["request read", "replica chosen", "first byte"]
    assert set(backend.resources) == {"slipway-gateway"}
    assert b"Quillington" not in backend.raw
    assert b"Once" not in backend.raw


@pytest.mark.capability("OB-10")
@pytest.mark.parametrize(
    ("behaviour", "settings", "headers", "exported"),
    [
        (speak, {}, {}, 0),
        (speak, {"trace_ratio": 1.0}, {}, 2),
        (speak, {"trace_slow_seconds": 1e-9}, {}, 2),
        (speak, {}, SAMPLED, 2),
        (speak, {}, {"traceparent": SAMPLED["traceparent"][:-1] + "0"}, 0),
        (be_full, {}, {}, 0),
        (hang_up, {}, {}, 3),
        (die_after_two_words, {}, {}, 2),
    ],
    ids=[
        "unremarkable",
        "its share is everything",
        "slow",
        "sampled by the client",
        "not sampled by the client",
        "refused with 429",
        "failed before the answer",
        "broken off in the answer",
    ],
)
async def test_failed_and_slow_requests_are_exported_always_and_the_others_by_their_share(
    behaviour: Behaviour, settings: dict, headers: dict, exported: int
):
    async with a_collector() as (url, backend), Runtime(behaviour) as runtime:
        options = {"otlp_endpoint": url, "trace_ratio": 0.0} | settings
        async with a_gateway(runtime, **options) as gateway, a_caller(gateway) as caller:
            await ask(caller, stream=True, headers=headers)
            # The last one to end is exported last: behind it comes nothing of the request before.
            runtime.behaviour = speak
            await ask(caller, stream=True, headers={"traceparent": f"00-{'5' * 32}-{PARENT}-01"})
            await until(lambda: any(span.trace_id.hex() == "5" * 32 and span.parent_span_id.hex() == PARENT
                                    for span in backend.spans))  # fmt: skip
    spans = [span for span in backend.spans if span.trace_id.hex() != "5" * 32]

    assert len(spans) == exported
    if behaviour in (hang_up, die_after_two_words):
        assert all(span.status.code == span.status.STATUS_CODE_ERROR for span in spans)
        assert all(values(span.attributes)["error.type"] for span in spans)
    for sent in runtime.headers[:1]:
        is_sampled = headers is SAMPLED or settings.get("trace_ratio") == 1.0
        assert sent["traceparent"].endswith("-01" if is_sampled else "-00")


@pytest.mark.capability("OB-10")
async def test_a_collector_that_is_away_delays_and_fails_no_request():
    async with Runtime() as runtime:
        options = {"otlp_endpoint": "http://127.0.0.1:1", "trace_ratio": 1.0}
        async with a_gateway(runtime, **options) as gateway, a_caller(gateway) as caller:
            for _ in range(5):
                async with caller.chat(stream=True) as response:
                    assert response.status == 200
                    assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def test_without_an_endpoint_nothing_of_opentelemetry_is_imported_and_the_clients_trace_passes():
    program = (
        "import sys; import slipway_gateway.serve; print([m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    printed, _ = await process.communicate()
    async with Runtime() as runtime, a_gateway(runtime) as gateway, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{gateway.port}/v1/chat/completions"
        async with session.post(url, json={"model": MODEL, "messages": []}, headers=SAMPLED) as response:
            assert response.status == 200

    assert printed.strip() == b"[]"
    assert runtime.headers[0]["traceparent"] == SAMPLED["traceparent"]
