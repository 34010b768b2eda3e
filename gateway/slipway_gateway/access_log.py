"""The access log: one line and a few numbers for each request, read from its state (`request_state`).

A tenant that sends more than its limits allow may send much more. Of its requests that one limit refuses within a
second the first is logged as any other, and the others as one line with their number.
"""

import asyncio
import time
from typing import Final

import structlog

from slipway_api.recent_requests import RecentRequests
from slipway_gateway.metrics import Metrics
from slipway_gateway.request_account import describe_request
from slipway_gateway.request_state import RequestState

log = structlog.get_logger()

UNAUTHORIZED: Final = 401
REFUSALS_SECONDS: Final = 1.0  # in which a tenant's refused requests are logged together


class RefusalCounts:
    """Counts the refused requests that have no log line of their own, by tenant and limit."""

    def __init__(self) -> None:
        self._unlogged: dict[tuple[str, str], int] = {}  # of the running second

    def add(self, tenant: str, limit: str) -> bool:
        """Whether this refusal is the first of its second, and so has a line of its own."""
        key = (tenant, limit)
        if key in self._unlogged:
            self._unlogged[key] += 1
            return False
        self._unlogged[key] = 0
        asyncio.get_running_loop().call_later(REFUSALS_SECONDS, self._write, key)
        return True

    def flush(self) -> None:
        """Write the counts of the running second."""
        for key in list(self._unlogged):
            self._write(key)

    def _write(self, key: tuple[str, str]) -> None:
        if count := self._unlogged.pop(key, 0):
            tenant, limit = key
            log.info("more requests refused", tenant=tenant, limit=limit, status=429, requests=count)


class AccessLog:
    """Writes each finished request to the log and to the metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.refusals = RefusalCounts()
        self.recent = RecentRequests()

    def write(self, record: RequestState) -> None:
        """Write the log line and update the metrics."""
        now = time.monotonic()
        if record.capture is not None:
            record.capture.end(is_whole=record.status == 200 and record.finish != "error")
        metrics, labels = self._metrics, record.labels
        metrics.requests.labels(*labels, str(record.status)).inc()
        if record.arrived:
            metrics.duration.labels(*labels).observe(now - record.arrived)
        if record.forwarded:
            metrics.first_byte.labels(*labels).observe(record.first_byte - record.arrived)
            metrics.added_latency.observe(self._added(record))
        output_tokens = record.output_tokens
        if record.outcomes is not None and record.counts_for_revision:
            record.outcomes.record(
                record.service,
                record.revision,
                is_error=record.is_error,
                failed=record.failed,
                ttft_seconds=record.ttft_seconds,
                output_tokens=record.events if output_tokens is None else output_tokens,
            )
        if record.outcomes is not None and record.service:
            record.outcomes.record_service(
                record.service,
                counts=record.counts_for_service,
                is_error=record.is_error,
                is_good=record.is_good,
                ttft_seconds=record.client_ttft_seconds,
                output_tokens=record.usage().output,
            )
        if record.tenant_limit and record.status == 429 and not self.refusals.add(record.tenant, record.tenant_limit):
            return
        log.info(
            "request",
            request_id=record.request_id,
            path=record.path,
            model=record.model,
            service=record.service,
            adapter=record.adapter,
            tenant=record.tenant,
            revision=record.revision,
            endpoint=record.endpoint,
            stream=record.stream,
            status=record.status,
            finish=record.finish or record.runtime_finish(),
            error=record.error,
            attempt_failures=[failure.value for failure in record.failures],
            max_tokens=record.max_tokens,
            prompt_tokens=record.prompt_tokens,
            output_tokens=output_tokens,
            request_bytes=record.request_bytes,
            response_bytes=record.response_bytes,
            events=record.events,
            matched_tokens=record.matched_tokens,
            handovers=record.handovers,
            read_ms=_milliseconds(record.started, record.arrived),
            held_ms=_milliseconds(record.arrived, record.admitted),
            first_byte_ms=_milliseconds(record.arrived, record.first_byte),
            added_ms=round(self._added(record) * 1e3, 2) if record.forwarded else None,
            total_ms=_milliseconds(record.started, now),
        )
        if record.status != UNAUTHORIZED:  # strangers must not displace the accounts of others
            self.recent.add(record.request_id, describe_request(record))

    @staticmethod
    def _added(record: RequestState) -> float:
        """Seconds before the request left and after its answer came: ours, and those of attempts in vain."""
        return (record.sent - record.admitted) + (record.forwarded - record.first_byte)


def _milliseconds(start: float, end: float) -> float | None:
    return round((end - start) * 1e3, 2) if start and end else None
