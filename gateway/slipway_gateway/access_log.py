"""The access log: one line and a few numbers for each request. Ids, lengths, times and reasons; never text."""

import re
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import structlog

from slipway_gateway.health import AttemptFailure
from slipway_gateway.metrics import UNKNOWN_MODEL, Metrics

log = structlog.get_logger()

CLIENT_LEFT: Final = 499  # nginx's number for a client that did not wait; only in logs and metrics

# Inside a string, JSON escapes its quotes, so these never match text that a model wrote.
_FINISH = re.compile(rb'"finish_reason":\s*"([a-z_]{1,32})"')
_PROMPT_TOKENS = re.compile(rb'"prompt_tokens":\s*(\d{1,9})')
_OUTPUT_TOKENS = re.compile(rb'"completion_tokens":\s*(\d{1,9})')


@dataclass(slots=True)
class RequestRecord:
    """One request from its arrival to its end; times are of the monotonic clock."""

    request_id: str
    path: str
    started: float = field(default_factory=time.monotonic)
    model: str = UNKNOWN_MODEL  # as served: set once it is known, so that a client's text is never logged
    service: str = ""
    revision: str = ""
    endpoint: str = ""
    stream: bool = False
    max_tokens: int | None = None
    request_bytes: int = 0
    response_bytes: int = 0
    events: int = 0
    status: int = 0
    finish: str = ""  # the runtime's finish_reason, or how it went wrong: cancelled, error, refused
    error: str = ""
    failures: list[AttemptFailure] = field(default_factory=list)
    handovers: int = 0  # how often another replica continued the stream
    upstream_failed: bool = False  # the replica broke off an answer that had begun
    arrived: float = 0.0  # the whole request is here
    sent: float = 0.0  # the last attempt left us
    first_byte: float = 0.0  # the answer's first byte reached us
    forwarded: float = 0.0  # and was forwarded
    tail: deque[bytes] = field(default_factory=lambda: deque(maxlen=4))  # the answer's last pieces: finish and usage

    @property
    def labels(self) -> tuple[str, str, str]:
        """Model, service and revision, as the metrics name them."""
        return self.model, self.service, self.revision

    def add_forwarded(self, piece: bytes) -> None:
        """Count a `piece` of the answer that was forwarded."""
        if not self.forwarded:
            self.forwarded = time.monotonic()
        self.response_bytes += len(piece)
        self.tail.append(piece)

    def set_broken(self, error: str) -> None:
        """The answer could not be finished."""
        self.finish, self.error = "error", error

    def set_cancelled(self) -> None:
        """The client left before the end."""
        self.status, self.finish = CLIENT_LEFT, "cancelled"


class AccessLog:
    """Writes each finished request to the log and to the metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def write(self, record: RequestRecord) -> None:
        """Write the log line and update the metrics."""
        now = time.monotonic()
        end = b"".join(record.tail)
        metrics, labels = self._metrics, record.labels
        metrics.requests.labels(*labels, str(record.status)).inc()
        if record.arrived:
            metrics.duration.labels(*labels).observe(now - record.arrived)
        if record.forwarded:
            metrics.first_byte.labels(*labels).observe(record.first_byte - record.arrived)
            metrics.added_latency.observe(self._added(record))
        log.info(
            "request",
            request_id=record.request_id,
            path=record.path,
            model=record.model,
            service=record.service,
            revision=record.revision,
            endpoint=record.endpoint,
            stream=record.stream,
            status=record.status,
            finish=record.finish or _last_match(_FINISH, end),
            error=record.error,
            attempt_failures=[failure.value for failure in record.failures],
            max_tokens=record.max_tokens,
            prompt_tokens=_last_number(_PROMPT_TOKENS, end),
            output_tokens=_last_number(_OUTPUT_TOKENS, end),
            request_bytes=record.request_bytes,
            response_bytes=record.response_bytes,
            events=record.events,
            handovers=record.handovers,
            read_ms=_milliseconds(record.started, record.arrived),
            first_byte_ms=_milliseconds(record.arrived, record.first_byte),
            added_ms=round(self._added(record) * 1e3, 2) if record.forwarded else None,
            total_ms=_milliseconds(record.started, now),
        )

    @staticmethod
    def _added(record: RequestRecord) -> float:
        """Seconds before the request left and after its answer came: ours, and those of attempts in vain."""
        return (record.sent - record.arrived) + (record.forwarded - record.first_byte)


def _last_match(pattern: re.Pattern[bytes], text: bytes) -> str:
    found = pattern.findall(text)
    return found[-1].decode() if found else ""


def _last_number(pattern: re.Pattern[bytes], text: bytes) -> int | None:
    found = pattern.findall(text)
    return int(found[-1]) if found else None


def _milliseconds(start: float, end: float) -> float | None:
    return round((end - start) * 1e3, 2) if start and end else None
