"""Traces of requests for OpenTelemetry: one span for a request, one for each attempt; names and numbers, never text.

A trace of the client's (W3C `traceparent`) is continued, and each attempt hands its own span to the replica. Whether a
trace is exported is decided when its request has ended: always when the client samples it, when the gateway or a
replica failed, or when the first byte came late; else for a share of the traces, by their id. Off without an endpoint,
and then no OpenTelemetry package is imported.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from slipway_gateway.request_state import NO_TRACE, RequestState, RequestTrace

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

PROVIDER: Final = "slipway"
OPERATIONS: Final[Mapping[str, str]] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
SHUTDOWN_SECONDS: Final = 5.0


class NoOpenTelemetryError(Exception):
    """An endpoint for traces is set, and the packages of the extra `otel` are not installed."""


class Tracing:
    """Exports the traces of one gateway over OTLP (HTTP, protobuf)."""

    def __init__(self, endpoint: str, *, ratio: float = 0.0, slow_seconds: float = 0.0, instance: str = "") -> None:
        """`endpoint`: the collector's base URL; empty: off. `ratio`: the share of unremarkable traces."""
        self._provider: TracerProvider | None = None
        self._ratio = ratio
        self.slow_seconds = slow_seconds
        if not endpoint:
            return
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
        resource = Resource.create({"service.name": "slipway-gateway", "service.instance.id": instance})
        # Ours is the only decision on sampling; the processor's queue is bounded, and drops what does not fit.
        self._provider = sdk.TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=10)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
        self._tracer = self._provider.get_tracer("slipway-gateway")

    def start(self, headers: Mapping[str, str], path: str) -> RequestTrace:
        """The trace of a request that has just come."""
        if self._provider is None:
            return NO_TRACE
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        propagator = TraceContextTextMapPropagator()
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        context = propagator.extract(carrier)
        parent = trace.get_current_span(context).get_span_context()
        operation = OPERATIONS.get(path, path.strip("/"))
        span = self._tracer.start_span(operation, context, kind=trace.SpanKind.SERVER)
        share = (span.get_span_context().trace_id & 0xFFFFFFFFFFFFFFFF) / 2**64  # the same in every process
        is_sampled = (parent.is_valid and parent.trace_flags.sampled) or share < self._ratio
        return _Trace(self, span, operation, carrier.get("tracestate", ""), is_sampled=is_sampled)

    def start_span(self, name: str, parent: "Span") -> "Span":
        """A span of an attempt."""
        from opentelemetry import trace

        return self._tracer.start_span(name, trace.set_span_in_context(parent), kind=trace.SpanKind.CLIENT)

    async def close(self) -> None:
        """Export what has ended, within a few seconds."""
        if self._provider is not None:
            try:
                async with asyncio.timeout(SHUTDOWN_SECONDS):
                    await asyncio.to_thread(self._provider.shutdown)
            except TimeoutError:
                pass


class _Trace:
    """The spans of one request; those that are not exported are never ended."""

    def __init__(self, tracing: Tracing, span: "Span", operation: str, state: str, *, is_sampled: bool) -> None:
        self._tracing = tracing
        self._span = span
        self._operation = operation
        self._state = state
        self._is_sampled = is_sampled
        self._started = (time.time_ns(), time.monotonic())
        self._attempts: list[tuple[Span, int]] = []  # with the end of each but the last

    def start_attempt(self, endpoint: str, revision: str, failure: str = "") -> dict[str, str]:
        """The span of an attempt, and the headers that name it to the replica."""
        self._end_attempt(failure)
        span = self._tracing.start_span(f"{self._operation} replica", self._span)
        namespace, _, pod = endpoint.rpartition("/")
        span.set_attributes({"k8s.namespace.name": namespace, "k8s.pod.name": pod, "slipway.revision": revision})
        self._attempts.append((span, 0))
        context = span.get_span_context()
        headers = {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(self._is_sampled):02x}"}
        return headers | ({"tracestate": self._state} if self._state else {})

    def finish(self, record: RequestState) -> None:
        """Describe the request, and export its spans if they are wanted."""
        ttft = record.first_byte - record.arrived if record.first_byte else 0.0
        has_failed = record.status >= 500 or record.finish == "error"
        if not (self._is_sampled or has_failed or ttft > self._tracing.slow_seconds):
            return
        self._end_attempt(record.error if has_failed or record.upstream_failed else "")
        for span, end in self._attempts:
            span.end(end)
        usage = record.usage()
        finish = record.runtime_finish() if record.was_served else ""
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": record.model,
            "gen_ai.request.max_tokens": record.max_tokens,
            "gen_ai.response.model": record.adapter or record.model,
            "gen_ai.response.finish_reasons": (finish,) if finish else None,
            "gen_ai.usage.input_tokens": usage.input or None,
            "gen_ai.usage.output_tokens": usage.output or None,
            "http.response.status_code": record.status,
            "url.path": record.path,
            "slipway.request_id": record.request_id,
            "slipway.service": record.service,
            "slipway.revision": record.revision,
            "slipway.adapter": record.adapter or None,
            "slipway.tenant": record.tenant or None,
            "slipway.finish": record.finish or None,
            "slipway.attempts": len(self._attempts),
            "slipway.handovers": record.handovers,
            "error.type": record.error if has_failed else None,
        }
        self._span.set_attributes({name: value for name, value in attributes.items() if value not in (None, "")})
        if record.model:
            self._span.update_name(f"{self._operation} {record.model}")
        for event, at in (
            ("request read", record.arrived),
            ("replica chosen", record.admitted),
            ("first byte", record.first_byte),
        ):
            if at:
                self._span.add_event(event, timestamp=self._nanoseconds(at))
        if has_failed:
            self._set_error(self._span, record.error)
        self._span.end()

    def _end_attempt(self, failure: str) -> None:
        """Remember when the running attempt ended, and that it failed."""
        if not self._attempts:
            return
        span, _ = self._attempts[-1]
        if failure:
            span.set_attribute("error.type", failure)
            self._set_error(span, failure)
        self._attempts[-1] = (span, time.time_ns())

    def _nanoseconds(self, monotonic: float) -> int:
        wall, then = self._started
        return wall + int((monotonic - then) * 1e9)

    @staticmethod
    def _set_error(span: "Span", message: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        span.set_status(Status(StatusCode.ERROR, message))
