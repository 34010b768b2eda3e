"""Traces of requests for OpenTelemetry: one span for a request, one for each attempt; names and numbers, never text.

A trace of the client's (W3C `traceparent`) is continued, and each attempt hands its own span to the replica. Whether a
trace is exported is decided when its request has ended: always when the client samples it, when the gateway or a
replica failed, or when the first byte came late; else for a share of the traces, by their id. Off without an endpoint,
and then no OpenTelemetry package is imported.
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from slipway_api import otlp
from slipway_gateway.request_state import NO_TRACE, RequestState, RequestTrace

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

OPERATIONS: Final[Mapping[str, str]] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


class Tracing:
    """Exports the traces of one gateway over OTLP (HTTP, protobuf)."""

    def __init__(self, endpoint: str, *, ratio: float = 0.0, slow_seconds: float = 0.0, instance: str = "") -> None:
        """`endpoint`: the collector's base URL; empty: off. `ratio`: the share of unremarkable traces."""
        self._provider: TracerProvider | None = None
        self._ratio = ratio
        self.slow_seconds = slow_seconds
        if not endpoint:
            return
        self._provider = otlp.start_exporter(endpoint, "slipway-gateway", {"service.instance.id": instance})
        self._tracer = self._provider.get_tracer("slipway-gateway")

    def start(self, headers: Mapping[str, str], path: str) -> RequestTrace:
        """The trace of a request that has just come."""
        if self._provider is None:
            return NO_TRACE
        from opentelemetry.trace import SpanKind

        context, parent = otlp.read_parent(headers)
        operation = OPERATIONS.get(path, path.strip("/"))
        span = self._tracer.start_span(operation, context, kind=SpanKind.SERVER)
        is_in_share = otlp.is_in_share(span.get_span_context().trace_id, self._ratio)
        is_sampled = (parent.is_valid and parent.trace_flags.sampled) or is_in_share
        return _Trace(self, span, operation, headers.get("tracestate", ""), is_sampled=is_sampled)

    def start_span(self, name: str, parent: "Span") -> "Span":
        """A span of an attempt."""
        from opentelemetry import trace

        return self._tracer.start_span(name, trace.set_span_in_context(parent), kind=trace.SpanKind.CLIENT)

    async def close(self) -> None:
        """Export what has ended, within a few seconds."""
        if self._provider is not None:
            await otlp.stop_exporter(self._provider)


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
            "gen_ai.provider.name": otlp.PROVIDER,
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
