"""One trace across a gateway and a real replica: both export to a real collector (rotel)."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from slipway_api import trace_settings
from slipway_runtime.messages import FinishReason
from slipway_runtime.server.generation import Record
from slipway_runtime.server.tracing import start_tracing
from slipway_runtime.settings import TraceSettings
from tests.gateway.doubles import MODEL, Caller, a_caller, a_gateway, until
from tests.otlp_collector import Backend, a_collector, values
from tests.runtime.server.serving import Running, a_replica

pytestmark = pytest.mark.timeout(120)

SECRET = "a bear called Quillington, " * 10  # more than a block of the KV cache
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
STAGES = ["prepare", "queue", "prefill", "decode"]
LAST = "5" * 32  # the trace of a request that is sent last: nothing of earlier ones is exported after it


@asynccontextmanager
async def a_traced_pair(**settings: Any) -> AsyncIterator[tuple[Caller, Backend, Running]]:
    """A gateway and a replica that export to one collector with these settings."""
    async with a_collector() as (url, backend), a_replica() as replica:
        given = {"ratio": 0.0, "slow_seconds": 100.0} | settings
        tracing = start_tracing(TraceSettings(endpoint=url, **given), pod="chat-0", namespace="team-a")
        assert tracing is not None
        replica.replica.tracing = tracing
        options = {"otlp_endpoint": url, "trace_ratio": given["ratio"], "trace_slow_seconds": given["slow_seconds"]}
        try:
            async with a_gateway(replica.url, **options) as gateway, a_caller(gateway) as caller:
                yield caller, backend, replica
        finally:
            await tracing.close()


async def ask(caller: Caller, traceparent: str = "", **fields: Any) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": SECRET}], "max_tokens": 6} | fields
    headers = {"traceparent": traceparent} if traceparent else {}
    url = f"{caller.url}/v1/chat/completions"
    async with caller.session.post(url, json=body, headers=headers) as response:
        await response.read()


async def exported_before(caller: Caller, backend: Backend) -> list[Span]:
    """All spans of the requests so far."""
    await ask(caller, f"00-{LAST}-{PARENT}-01")
    spans = 2 + 1 + len(STAGES)
    await until(lambda: sum(span.trace_id.hex() == LAST for span in backend.spans) == spans)
    return [span for span in backend.spans if span.trace_id.hex() != LAST]


@pytest.mark.capability("OB-10")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole answer"])
async def test_the_stages_of_the_replica_are_spans_of_the_gateways_trace(stream: bool):
    async with a_traced_pair() as (caller, backend, replica):
        await ask(caller, SAMPLED, stream=stream, ignore_eos=True)
        await ask(caller, SAMPLED.replace(TRACE, "1" * 32), stream=stream, ignore_eos=True)  # finds its prompt cached
        await until(lambda: len(backend.spans) == 2 * (2 + 1 + len(STAGES)))
        [account] = replica.replica.recent.newest(2)[1:]
    first = [span for span in backend.spans if span.trace_id.hex() == TRACE]
    by_name = {span.name: span for span in first}
    attempt = by_name["chat replica"]
    served = next(span for span in first if span.parent_span_id == attempt.span_id)

    assert backend.service_of[attempt.span_id] == "slipway-gateway"
    assert {backend.service_of[span.span_id] for span in (served, *(by_name[name] for name in STAGES))} == {
        "slipway-runtime"
    }
    assert served.kind == Span.SPAN_KIND_SERVER
    assert backend.resources["slipway-runtime"]["k8s.pod.name"] == "chat-0"
    assert all(by_name[name].parent_span_id == served.span_id for name in STAGES)
    edges = [(by_name[name].start_time_unix_nano, by_name[name].end_time_unix_nano) for name in STAGES]
    assert edges == sorted(edges)
    assert all(end == start for (_, end), (start, _) in pairwise(edges)), "a stage starts when the one before it ends"
    assert attempt.start_time_unix_nano <= served.start_time_unix_nano == edges[0][0]
    # The replica's span ends when its last byte is written, which the gateway may have read by then.
    assert edges[-1][1] <= min(served.end_time_unix_nano, attempt.end_time_unix_nano)

    told = values(served.attributes)
    assert {
        "gen_ai.operation.name": "chat",
        "gen_ai.usage.input_tokens": account["promptTokens"],
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["length"],
        "slipway.request_id": account["requestId"],
    }.items() <= told.items()
    assert values(by_name["decode"].attributes)["gen_ai.usage.output_tokens"] == 6
    [cached] = [span for span in backend.spans if span.name == "prefill" and span.trace_id.hex() == "1" * 32]
    assert values(cached.attributes)["gen_ai.usage.cache_read.input_tokens"] > 0
    assert b"Quillington" not in backend.raw


@pytest.mark.capability("OB-10")
@pytest.mark.parametrize(
    ("settings", "traceparent", "is_exported"),
    [
        ({}, "", False),
        ({}, UNSAMPLED, False),
        ({"ratio": 1.0}, UNSAMPLED, True),
        ({"slow_seconds": 1e-9}, UNSAMPLED, True),
        ({}, SAMPLED, True),
    ],
    ids=["unremarkable", "not sampled by the client", "its share is everything", "slow", "sampled by the client"],
)
async def test_gateway_and_replica_choose_the_same_traces(settings: dict, traceparent: str, is_exported: bool):
    async with a_traced_pair(**settings) as (caller, backend, _):
        await ask(caller, traceparent, stream=True)
        spans = await exported_before(caller, backend)
    of = {backend.service_of[span.span_id] for span in spans}

    assert of == ({"slipway-gateway", "slipway-runtime"} if is_exported else set())
    assert len({span.trace_id for span in spans}) == int(is_exported)


@pytest.mark.capability("OB-10")
async def test_a_request_whose_engine_dies_is_a_failed_span_in_the_gateways_trace():
    async with a_traced_pair() as (caller, backend, replica):
        replica.steps.hold()
        asked = asyncio.create_task(ask(caller, UNSAMPLED, stream=True))
        await until(lambda: replica.client.stats().running + replica.client.stats().waiting or replica.replica._open)
        replica.steps.failure = RuntimeError("the device is gone")
        replica.steps.resume_steps()
        await asked
        await until(lambda: set(backend.service_of.values()) == {"slipway-gateway", "slipway-runtime"})
    [served] = [span for span in backend.spans if backend.service_of[span.span_id] == "slipway-runtime"]

    assert served.status.code == served.status.STATUS_CODE_ERROR
    assert values(served.attributes)["error.type"] == "error"
    assert served.parent_span_id in {span.span_id for span in backend.named("chat replica")}
    assert {span.trace_id.hex() for span in backend.spans} == {TRACE}


def a_record(**fields: Any) -> Record:
    values = {
        "prompt_tokens": 9, "cached_tokens": 0, "completion_tokens": 0, "max_tokens": 0, "arrived": 1.0,
        "finish_reason": FinishReason.STOP, "queued_at": 1.1, "scheduled_at": 1.2, "first_token_at": None,
        "last_token_at": None, "finished_at": 1.3,
    }  # fmt: skip
    return Record(**(values | fields))


@pytest.mark.capability("OB-10")
async def test_a_request_without_tokens_ends_with_its_prefill_and_one_without_a_caller_has_a_trace_of_its_own():
    async with a_collector() as (url, backend):
        tracing = start_tracing(TraceSettings(endpoint=url, ratio=1.0), pod="", namespace="")
        assert tracing is not None
        tracing.export(a_record(), {}, now=1.4, request_id="r", route="embeddings", model="tiny", is_streamed=False)
        await tracing.close()
        await until(lambda: len(backend.spans) == 4)
    [served] = backend.named("embeddings tiny")

    assert served.parent_span_id == b""
    assert {span.name for span in backend.spans} == {"embeddings tiny", "prepare", "queue", "prefill"}
    assert backend.named("prefill")[0].end_time_unix_nano == served.end_time_unix_nano


@pytest.mark.capability("OB-10")
async def test_a_request_that_waited_too_long_ends_in_the_queue():
    async with a_collector() as (url, backend):
        tracing = start_tracing(TraceSettings(endpoint=url, ratio=0.0), pod="", namespace="")
        assert tracing is not None
        late = a_record(finish_reason=FinishReason.TIMEOUT, scheduled_at=None)
        tracing.export(late, {}, now=1.4, request_id="r", route="messages", model="tiny", is_streamed=True)
        await tracing.close()
        await until(lambda: len(backend.spans) == 3)
    [served], [queue] = backend.named("chat tiny"), backend.named("queue")

    assert {span.name for span in backend.spans} == {"chat tiny", "prepare", "queue"}
    assert queue.end_time_unix_nano == served.end_time_unix_nano
    assert values(served.attributes)["error.type"] == "timeout"


@pytest.mark.parametrize("endpoint", ["", "collector:4317"])
def test_without_a_url_nothing_is_exported_and_the_replica_starts(endpoint: str):
    settings = TraceSettings.of({trace_settings.ENV_ENDPOINT: endpoint})

    assert start_tracing(settings, pod="", namespace="") is None


@pytest.mark.parametrize(
    ("variable", "value"),
    [(trace_settings.ENV_RATIO, "2"), (trace_settings.ENV_RATIO, "all"), (trace_settings.ENV_SLOW_SECONDS, "0.0")],
)
def test_an_invalid_number_is_refused_by_its_name(variable: str, value: str):
    with pytest.raises(ValueError, match=variable):
        TraceSettings.of({variable: value})


@pytest.mark.capability("OB-10")
def test_without_an_endpoint_a_replica_imports_no_exporter():
    program = (
        "import sys; import slipway_runtime.serve; from slipway_runtime.server.tracing import start_tracing;"
        "from slipway_runtime.settings import TraceSettings;"
        "start_tracing(TraceSettings.of({}), pod='', namespace='');"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert printed.strip() == "[]"


@pytest.mark.capability("OB-10")
async def test_a_collector_that_is_away_delays_and_fails_no_request():
    async with a_replica() as replica:
        settings = TraceSettings(endpoint="http://127.0.0.1:1", ratio=1.0)
        replica.replica.tracing = tracing = start_tracing(settings, pod="", namespace="")
        assert tracing is not None
        for _ in range(3):
            answer = await replica.chat(max_tokens=2)
            assert answer.status_code == 200
        await tracing.close()
