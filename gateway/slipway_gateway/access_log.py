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

BYTES_PER_TOKEN: Final = 4
USAGE_BYTES: Final = 8192  # at the end of an answer, where its usage stands
CLIENT_LEFT: Final = 499  # nginx's number for a client that did not wait; only in logs and metrics

# Inside a string, JSON escapes its quotes, so these never match text that a model wrote.
_FINISH = re.compile(rb'"finish_reason":\s*"([a-z_]{1,32})"')
_PROMPT_TOKENS = re.compile(rb'"prompt_tokens":\s*(\d{1,9})')
_OUTPUT_TOKENS = re.compile(rb'"completion_tokens":\s*(\d{1,9})')
_CACHED_TOKENS = re.compile(rb'"cached_tokens":\s*(\d{1,9})')


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """The tokens that a request used."""

    input: int = 0
    cached: int = 0  # part of input
    output: int = 0
    is_estimated: bool = False  # the answer has no usage; nothing of cached is known then


NOTHING_USED: Final = TokenUsage()


@dataclass(slots=True)
class RequestRecord:
    """One request from its arrival to its end; times are of the monotonic clock."""

    request_id: str
    path: str
    started: float = field(default_factory=time.monotonic)
    model: str = UNKNOWN_MODEL  # as served: set once it is known, so that a client's text is never logged
    service: str = ""
    revision: str = ""
    adapter: str = ""
    tenant: str = ""
    key: str = ""  # the name of the API key, never the key
    internal_headers: dict[str, str] = field(default_factory=dict)  # for the replica: its tenant and priority
    body_sha256: str = ""  # only where audit records are written
    endpoint: str = ""
    matched_tokens: int = 0  # of the prompt, which the endpoint was sent before
    stream: bool = False
    max_tokens: int | None = None
    request_bytes: int = 0
    response_bytes: int = 0
    events: int = 0
    status: int = 0
    finish: str = ""  # the runtime's finish_reason, or how it went wrong: cancelled, error, refused
    error: str = ""
    failures: list[AttemptFailure] = field(default_factory=list)
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

    @property
    def was_served(self) -> bool:
        """Whether a replica computed something for the client, to the end or not."""
        return bool(self.forwarded) and (self.status < 300 or self.status == CLIENT_LEFT)

    def runtime_finish(self) -> str:
        """The finish_reason of the runtime's answer."""
        return _last_match(_FINISH, b"".join(self.tail))

    def usage(self) -> TokenUsage:
        """The tokens that it used: by the answer's own usage, else estimated."""
        if not self.was_served:
            return NOTHING_USED
        end = b"".join(self.tail)[-USAGE_BYTES:]
        prompt, output = _last_number(_PROMPT_TOKENS, end), _last_number(_OUTPUT_TOKENS, end)
        if prompt is not None:
            return TokenUsage(prompt, _last_number(_CACHED_TOKENS, end) or 0, output or 0)
        # The last events of a stream are its finish and [DONE].
        return TokenUsage(self.request_bytes // BYTES_PER_TOKEN, 0, max(0, self.events - 2), is_estimated=True)

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
            tenant=record.tenant,
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
            matched_tokens=record.matched_tokens,
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
