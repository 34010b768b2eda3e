"""The state of one request in the gateway: what is known of it, from its arrival to its end.

Each step writes what it learns, and the next ones decide by it. The access log (`access_log`), the accounting of
tenants, outcomes and traces read it when the request has ended. Ids, lengths, times and reasons; never text, but for
the answer's last pieces, from which finish and usage are read.
"""

import random
import re
import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol

from slipway_gateway.health import AttemptFailure
from slipway_gateway.metrics import UNKNOWN_MODEL
from slipway_gateway.mirror import Capture
from slipway_gateway.outcomes import Outcomes, Pace
from slipway_gateway.picker.endpoints import NO_LIMITS, LatencyLimits
from slipway_gateway.picker.pick import Considered, Picked, PickReason
from slipway_gateway.resolve import MayUse, may_use_all
from slipway_gateway.sse import says_its_end

SHUTTING_DOWN: Final = "the gateway is shutting down"
BYTES_PER_TOKEN: Final = 4
MAX_ATTEMPT_NOTES: Final = 12  # the last attempts of a request, for its account
CLIENT_LEFT: Final = 499  # nginx's number for a client that did not wait; only in logs and metrics

# Inside a string, JSON escapes its quotes, so these never match text that a model wrote.
# The second names are those of the responses API, the third those of Anthropic's messages.
_FINISH = re.compile(
    rb'(?:"finish_reason":\s*"|"status":\s*"(?=completed|incomplete|failed)'
    rb'|"stop_reason":\s*"(?=end_turn|max_tokens|stop_sequence|tool_use))([a-z_]{1,32})"'
)
_PROMPT_TOKENS = re.compile(rb'"(?:prompt|input)_tokens":\s*(\d{1,9})')
_OUTPUT_TOKENS = re.compile(rb'"(?:completion|output)_tokens":\s*(\d{1,9})')
_CACHED_TOKENS = re.compile(rb'"cached_tokens":\s*(\d{1,9})')
_READ_TOKENS = re.compile(rb'"cache_read_input_tokens":\s*(\d{1,9})')  # those that `input_tokens` does not count


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """The tokens that a request used."""

    input: int = 0
    cached: int = 0  # part of input
    output: int = 0
    is_estimated: bool = False  # the answer has no usage; nothing of cached is known then


NOTHING_USED: Final = TokenUsage()


class RequestTrace(Protocol):
    """The spans of one request (see `tracing`)."""

    def start_attempt(self, endpoint: str, revision: str, failure: str = "") -> dict[str, str]:
        """Start the span of an attempt, after one that ended with `failure`; the headers for the replica."""

    def finish(self, record: "RequestState") -> None:
        """Export the spans of a request that has ended, if they are wanted."""


class _NoTrace:
    """The trace of a request while tracing is off."""

    def start_attempt(self, endpoint: str, revision: str, failure: str = "") -> dict[str, str]:
        return {}

    def finish(self, record: "RequestState") -> None:
        pass


NO_TRACE: Final[RequestTrace] = _NoTrace()


class AttemptKind(Enum):
    """Why a request was sent to a replica."""

    FIRST = "first"
    RETRY = "retry"
    HEDGE = "hedge"  # beside the first one, which was late
    HANDOVER = "handover"  # to continue a stream that broke off


@dataclass(slots=True)
class AttemptNote:
    """One attempt, for the account of the request (`request_account`)."""

    kind: AttemptKind
    endpoint: str
    revision: str
    at: float
    reason: PickReason
    considered: tuple[Considered, ...]
    cause: str  # of a handover: why the stream broke off
    failure: str = ""


@dataclass(slots=True)
class RequestState:
    """One request from its arrival to its end; times are of the monotonic clock."""

    request_id: str
    path: str
    started: float = field(default_factory=time.monotonic)
    model: str = UNKNOWN_MODEL  # as served: set once it is known, so that a client's text is never logged
    service: str = ""
    adapter: str = ""  # the adapter that shall answer; empty: the base
    revision: str = ""
    is_pinned: bool = False  # the client chose the revision: what it met there says nothing of the split
    tenant: str = ""
    key: str = ""  # the name of the API key, never the key
    may_use: MayUse = may_use_all  # what the tenant may use: it resolves names among these
    internal_headers: dict[str, str] = field(default_factory=dict)  # for the replica: its tenant and priority
    limit_headers: dict[str, str] = field(default_factory=dict)  # for the client: what is left of its tenant's limits
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
    handovers: int = 0  # how often another replica continued the stream
    upstream_failed: bool = False  # the replica broke off an answer that had begun
    arrived: float = 0.0  # the whole request is here
    admitted: float = 0.0  # and no longer held for want of a replica
    sent: float = 0.0  # the last attempt left us
    first_byte: float = 0.0  # the answer's first byte reached us
    forwarded: float = 0.0  # and was forwarded
    tail: deque[bytes] = field(default_factory=lambda: deque(maxlen=4))  # the answer's last pieces: finish and usage
    failed: list[tuple[str, AttemptFailure]] = field(default_factory=list)  # failed attempts by revision
    is_abandoned: bool = False  # the client left, or the deadline passed, when a replica had the prompt
    is_cut: bool = False  # the gateway itself ended it, because it shuts down
    outcomes: Outcomes | None = None
    request_key: str = field(default_factory=lambda: f"{random.getrandbits(64):x}")  # of its draws that last
    pace: Pace | None = None  # of a stream, from its first token on
    copied: bool = False  # it was considered for a copy
    latency_limits: LatencyLimits = NO_LIMITS  # of its service's spec.slo
    capture: Capture | None = None  # of an answer that is compared with its copy's
    trace: RequestTrace = NO_TRACE
    fallback_from: str = ""  # the served name of the service that was asked, when another one answers
    tenant_limit: str = ""  # the limit of its tenant that refused it
    degraded: str = ""  # what was taken from the request because of overload
    _found: dict[re.Pattern[bytes], bytes | None] = field(default_factory=dict, repr=False)
    _found_at: int = -1  # so many bytes of the answer had been forwarded
    attempts: deque[AttemptNote] = field(default_factory=lambda: deque(maxlen=MAX_ATTEMPT_NOTES))

    @property
    def labels(self) -> tuple[str, str, str]:
        """Model, service and revision, as the metrics name them."""
        return self.model, self.service, self.revision

    def note_attempt(self, picked: Picked, kind: AttemptKind, cause: str = "") -> None:
        """Note that the request is sent to this endpoint."""
        endpoint = picked.endpoint
        note = AttemptNote(
            kind, endpoint.name, endpoint.revision, time.monotonic(), picked.reason, picked.considered, cause
        )
        self.attempts.append(note)

    def note_failure(self, endpoint: str, failure: str) -> None:
        """Note why the last attempt at this endpoint failed."""
        for note in reversed(self.attempts):
            if note.endpoint == endpoint and not note.failure:
                note.failure = failure
                return

    def add_forwarded(self, piece: bytes) -> None:
        """Count a `piece` of the answer that was forwarded."""
        if self.pace is not None:
            self.pace.add(piece.count(b"\n\n"))
        elif not self.forwarded:
            self.forwarded = time.monotonic()
            if self.outcomes is not None and self.stream and self.status == 200:
                self.pace = self.outcomes.client_pace(
                    self.service, self.revision, self.first_byte, is_pinned=self.is_pinned
                )
        self.response_bytes += len(piece)
        if self.capture is not None:
            self.capture.add(piece)
        self.tail.append(piece)

    @property
    def was_served(self) -> bool:
        """Whether a replica computed something for the client, to the end or not."""
        return bool(self.forwarded) and (self.status < 300 or self.status == CLIENT_LEFT)

    @property
    def prompt_tokens(self) -> int | None:
        """Of the answer's own usage."""
        return self._last_number(_PROMPT_TOKENS)

    @property
    def output_tokens(self) -> int | None:
        """Of the answer's own usage."""
        return self._last_number(_OUTPUT_TOKENS)

    def runtime_finish(self) -> str:
        """The finish_reason of the runtime's answer."""
        return (self._last_match(_FINISH) or b"").decode()

    def usage(self) -> TokenUsage:
        """The tokens that it used: by the answer's own usage, else estimated.

        A prompt that was sent to a replica counts, although its client left before the first byte of an answer.
        """
        if not self.was_served:
            if self.is_abandoned and not self.forwarded and not self.is_cut:
                return TokenUsage(self.request_bytes // BYTES_PER_TOKEN, 0, 0, is_estimated=True)
            return NOTHING_USED
        prompt, output = self.prompt_tokens, self.output_tokens
        if prompt is not None:
            read = self._last_number(_READ_TOKENS) or 0
            return TokenUsage(prompt + read, read or self._last_number(_CACHED_TOKENS) or 0, output or 0)
        # The last events of a stream are its finish and [DONE].
        return TokenUsage(self.request_bytes // BYTES_PER_TOKEN, 0, max(0, self.events - 2), is_estimated=True)

    def _last_number(self, pattern: re.Pattern[bytes]) -> int | None:
        found = self._last_match(pattern)
        return None if found is None else int(found)

    def _last_match(self, pattern: re.Pattern[bytes]) -> bytes | None:
        """The last match in the answer's last pieces. Searched once, since several parts of the gateway ask for it."""
        if self._found_at != self.response_bytes:
            self._found_at, self._found = self.response_bytes, {}
        if pattern not in self._found:
            matches = pattern.findall(b"".join(self.tail))
            self._found[pattern] = matches[-1] if matches else None
        return self._found[pattern]

    def set_broken(self, error: str) -> None:
        """The answer could not be finished."""
        self.finish, self.error = "error", error
        self.is_cut = self.is_cut or error == SHUTTING_DOWN

    @property
    def counts_for_revision(self) -> bool:
        """Whether the split chose the replica, and neither client nor gateway ended the request before the answer."""
        return bool(self.revision) and not self.is_pinned and self.status not in (0, CLIENT_LEFT) and not self.is_cut

    @property
    def ttft_seconds(self) -> float | None:
        """Of a stream: from the last attempt's start to its first byte."""
        return self.first_byte - self.sent if self.pace is not None else None

    @property
    def is_error(self) -> bool:
        """Whether the client got a 5xx status, or an answer that broke off."""
        return self.status >= 500 or self.finish == "error"

    @property
    def counts_for_service(self) -> bool:
        """Whether it ended with a success or a 5xx: others are the client's doing, or refused by a limit."""
        return 200 <= self.status < 300 or self.status >= 500

    @property
    def client_ttft_seconds(self) -> float | None:
        """Of a stream: from the whole request's arrival to the first byte, held and retried time included."""
        return self.first_byte - self.arrived if self.pace is not None else None

    @property
    def is_good(self) -> bool:
        """Whether it has no error and is within the latency limits of its service; what was not streamed has none."""
        if self.is_error:
            return False
        ttft, itl = self.client_ttft_seconds, self.pace.mean_seconds if self.pace is not None else None
        limits = self.latency_limits
        return not (
            (ttft is not None and limits.ttft_seconds is not None and ttft > limits.ttft_seconds)
            or (itl is not None and limits.itl_seconds is not None and itl > limits.itl_seconds)
        )

    def set_cancelled(self) -> None:
        """The client left before the end; one that closes after the last event, as stock clients do, has all of it."""
        if not says_its_end(b"".join(self.tail)):
            self.status, self.finish = CLIENT_LEFT, "cancelled"
