"""The spans of a request in a replica, in the trace of the gateway's attempt: names and numbers, never text.

    chat <model>   the request, from the end of its body to its last token: a child of the caller's span
      prepare      chat template, tokens, admission
      queue        waiting for its first step
      prefill      until its first token
      decode       until its last token

The spans are made when the request has ended, from the times of its record. The rule is the gateway's: exported are
traces that the caller samples, failed and slow requests, and a share of the others, by the id of the trace.
"""

import time
from collections.abc import Mapping
from typing import Any, Final

import structlog

from slipway_api import otlp, trace_settings
from slipway_runtime.messages import FinishReason
from slipway_runtime.server.generation import Record
from slipway_runtime.settings import TraceSettings

log = structlog.get_logger()

OPERATIONS: Final[Mapping[str, str]] = {"completions": "text_completion", "embeddings": "embeddings"}  # else chat
FAILED: Final = frozenset({FinishReason.ERROR, FinishReason.OUT_OF_MEMORY, FinishReason.TIMEOUT})


class Tracing:
    """Exports the spans of one replica's requests over OTLP."""

    def __init__(self, settings: TraceSettings, *, pod: str, namespace: str) -> None:
        """Raises NoOpenTelemetryError if the packages are missing."""
        resource = {"service.instance.id": pod, "k8s.pod.name": pod, "k8s.namespace.name": namespace}
        self._provider = otlp.start_exporter(settings.endpoint, "slipway-runtime", resource)
        self._tracer = self._provider.get_tracer("slipway-runtime")
        self._ratio = settings.ratio
        self._slow_seconds = settings.slow_seconds

    def export(
        self,
        record: Record,
        headers: Mapping[str, str],
        *,
        now: float,
        request_id: str,
        route: str,
        model: str,
        is_streamed: bool,
    ) -> None:
        """Export the spans of a request that has ended, if its trace is one to export. now: of the record's clock."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        context, parent = otlp.read_parent(headers)
        has_failed = record.finish_reason in FAILED
        answered = record.first_token_at if is_streamed and record.first_token_at else record.finished_at
        is_wanted = has_failed or answered - record.arrived > self._slow_seconds
        if parent.is_valid:
            is_wanted = is_wanted or parent.trace_flags.sampled or otlp.is_in_share(parent.trace_id, self._ratio)
            if not is_wanted:
                return
        wall = time.time_ns()

        def at(moment: float) -> int:
            return wall - int((now - moment) * 1e9)

        operation = OPERATIONS.get(route, "chat")
        request = self._tracer.start_span(
            f"{operation} {model}", context, kind=SpanKind.SERVER, start_time=at(record.arrived)
        )
        if not (is_wanted or otlp.is_in_share(request.get_span_context().trace_id, self._ratio)):
            return  # a span that does not end is not exported
        numbers = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": otlp.PROVIDER,
            "gen_ai.response.model": model,
            "gen_ai.response.finish_reasons": (str(record.finish_reason),),
            "slipway.request_id": request_id,
            "slipway.tenant": record.tenant,
            "slipway.adapter": record.adapter,
            "slipway.preemptions": record.preemptions,
            "error.type": str(record.finish_reason) if has_failed else "",
        }
        prompt = {
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        }
        answer = {
            "gen_ai.usage.output_tokens": record.completion_tokens,
            "slipway.draft_tokens": record.draft_tokens,
            "slipway.accepted_tokens": record.accepted_tokens,
        }
        request.set_attributes(_given(numbers | prompt | answer))
        if has_failed:
            from opentelemetry.trace import Status, StatusCode

            request.set_status(Status(StatusCode.ERROR, str(record.finish_reason)))
        inside = set_span_in_context(request)
        for name, start, end, attributes in (
            ("prepare", record.arrived, record.queued_at, {}),
            ("queue", record.queued_at, record.scheduled_at, {}),
            ("prefill", record.scheduled_at, record.first_token_at, prompt),
            ("decode", record.first_token_at, record.last_token_at, answer),
        ):
            if start is None or (name == "prepare" and end is None):
                break  # the request ended before this stage, or its engine died with what it knew
            end = record.finished_at if end is None else end
            span = self._tracer.start_span(name, inside, attributes=_given(attributes), start_time=at(start))
            span.end(at(end))
        request.end(at(record.finished_at))

    async def close(self) -> None:
        """Export what has ended, within a few seconds."""
        await otlp.stop_exporter(self._provider)


def start_tracing(settings: TraceSettings, *, pod: str, namespace: str) -> Tracing | None:
    """None without an endpoint, or with one that cannot be used: a cluster may set the variable in every pod, so this
    logs a warning, and the replica serves without traces.
    """
    if not settings.endpoint:
        return None
    if not settings.endpoint.startswith(("http://", "https://")):
        remedy = f"set {trace_settings.ENV_ENDPOINT} to an http(s) URL such as http://otel-collector.observability:4318"
        log.warning("no traces are exported", reason="the endpoint is not a URL", remedy=remedy)
        return None
    try:
        return Tracing(settings, pod=pod, namespace=namespace)
    except otlp.NoOpenTelemetryError as missing:
        log.warning("no traces are exported", reason=str(missing), endpoint=settings.endpoint)
        return None


def _given(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value != ""}
