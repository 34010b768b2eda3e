"""Exports spans to an OpenTelemetry collector over OTLP (HTTP, protobuf), for gateway and runtime.

OpenTelemetry is imported by these functions only: a process without an endpoint for traces does not load it.
"""

import asyncio
import contextlib
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import SpanContext

PROVIDER: Final = "slipway"  # gen_ai.provider.name
SHUTDOWN_SECONDS: Final = 5.0


class NoOpenTelemetryError(Exception):
    """An endpoint for traces is set, and the packages of the extra `otel` are not installed."""


def start_exporter(endpoint: str, service: str, resource: Mapping[str, str]) -> "TracerProvider":
    """A provider whose ended spans are exported from a thread, through a bounded queue.

    endpoint: the collector's base URL, without /v1/traces.
    service: `service.name` of the spans; `resource` has further attributes; empty ones are left out.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk import trace as sdk
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON
    except ImportError as missing:
        raise NoOpenTelemetryError(
            f"traces need the packages of the extra otel (pip install '.[otel]' in a checkout): {missing}"
        ) from missing
    attributes = {name: value for name, value in resource.items() if value}
    # Ours is the only decision on sampling; the processor's queue is bounded, and drops what does not fit.
    provider = sdk.TracerProvider(
        sampler=ALWAYS_ON, resource=Resource.create({"service.name": service} | attributes), shutdown_on_exit=False
    )
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=10)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
    return provider


def read_parent(headers: Mapping[str, str]) -> "tuple[Context, SpanContext]":
    """The caller's trace (W3C `traceparent`, `tracestate`); its span context is invalid if there is none."""
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
    context = TraceContextTextMapPropagator().extract(carrier)
    return context, trace.get_current_span(context).get_span_context()


def is_in_share(trace_id: int, ratio: float) -> bool:
    """Whether a trace belongs to the exported share `ratio` (0 to 1): the same answer in every process."""
    return (trace_id & 0xFFFFFFFFFFFFFFFF) / 2**64 < ratio


async def stop_exporter(provider: "TracerProvider") -> None:
    """Export the spans that have ended; gives up after a few seconds."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def stop() -> None:
        provider.shutdown()
        with contextlib.suppress(RuntimeError):  # the loop has ended before
            loop.call_soon_threadsafe(done.set)

    # A thread of the executor would hold up the end of the process for as long as the collector does not answer.
    threading.Thread(target=stop, daemon=True).start()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SHUTDOWN_SECONDS):
            await done.wait()
