"""The attempts of one request: what a failed one brought, and which answers of a replica another one may better."""

from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import msgspec
from multidict import CIMultiDict

from slipway_api.names import HEADER_MODEL, HEADER_NOT_STARTED
from slipway_gateway.errors import refuses_gateway
from slipway_gateway.fleet import Fleet, Lease
from slipway_gateway.health import AttemptFailure
from slipway_gateway.journal import Journal
from slipway_gateway.picker.endpoints import Endpoint
from slipway_gateway.picker.pick import Picked
from slipway_gateway.upstream import (
    LostError,
    MovedError,
    Reply,
    RevisionError,
    SilentError,
    UnreachableError,
    UpstreamError,
    answers_for_other,
)

MAX_KEPT_BYTES = 64 * 1024  # of an answer that is kept, and forwarded when no other replica can answer
UNAVAILABLE_SECONDS = 2.0  # ejection of a replica that answered 503: by then the watch shows that it is not ready
ENGINE_DEAD_TYPE = "EngineDeadError"  # vLLM's and our name for it, in the `type` of a 500
VLLM_ENGINE_DEAD = "EngineCore encountered an issue"  # beginning of the message; the type is InternalServerError

FAILURES: dict[type[UpstreamError], AttemptFailure] = {
    UnreachableError: AttemptFailure.UNREACHABLE,
    LostError: AttemptFailure.LOST,
    SilentError: AttemptFailure.SILENT,
    MovedError: AttemptFailure.MOVED,
    RevisionError: AttemptFailure.WRONG_REVISION,
}


@dataclass(frozen=True, slots=True)
class RejectedAttempt:
    """A replica's answer that another replica may better, kept whole."""

    failure: AttemptFailure
    status: int
    headers: CIMultiDict[str]
    body: bytes


@dataclass(slots=True)
class Attempts:
    """The attempts of one request so far."""

    failed: dict[str, AttemptFailure] = field(default_factory=dict)  # by endpoint
    last_answer: RejectedAttempt | None = None  # of the last attempt, if it brought one
    picked: Picked | None = None  # for the next attempt

    @property
    def matched_tokens(self) -> int:
        """Of the prompt: the tokens that the endpoint of the next attempt has cached."""
        return self.picked.matched_tokens if self.picked is not None else 0

    @property
    def lost(self) -> frozenset[str]:
        """The endpoints whose connections broke or could not be made: their nodes may be lost."""
        failures = (AttemptFailure.LOST, AttemptFailure.UNREACHABLE)
        return frozenset(name for name, failure in self.failed.items() if failure in failures)


@dataclass(slots=True)
class Opened:
    """An attempt whose answer has begun, with its connection and its lease in `stack`."""

    endpoint: Endpoint
    reply: Reply
    lease: Lease
    journal: Journal | None
    headers: dict[str, str]  # of the request
    served_name: str
    matched_tokens: int  # of the prompt, which the endpoint was believed to have cached
    sent: float  # when the request left us, of the monotonic clock
    stack: AsyncExitStack = field(repr=False)

    @property
    def is_stream(self) -> bool:
        """Whether this is the stream that was asked for, and nothing that another replica may better."""
        reply = self.reply
        is_own = not answers_for_other(self.endpoint, reply)
        return reply.status == 200 and reply.is_stream and bool(reply.first) and is_own

    async def drop(self) -> None:
        """Close it unread: another replica was faster."""
        if self.journal is not None:
            self.journal.close()
        await self.stack.aclose()


async def rejected_attempt(fleet: Fleet, endpoint: Endpoint, reply: Reply) -> RejectedAttempt | None:
    """The replica's answer when another replica may better it; None: this is the answer for the client.

    What says that it was not started is retried. Of the others a 503 is, because the replica has lost what it did,
    and a 500 that says that the engine is dead; after any other 500, which counts against the replica too, the work
    may have been done.
    """
    if reply.status == 401 and endpoint.token_digests:
        # Its port asks for the gateway's token alone, so it is not the client at fault: the key was replaced (ADR 172).
        fleet.record_unavailable(endpoint, UNAVAILABLE_SECONDS)
        answer = refuses_gateway().response()
        assert isinstance(answer.body, bytes)
        return RejectedAttempt(AttemptFailure.UNAVAILABLE, answer.status, CIMultiDict(answer.headers), answer.body)
    is_ours = HEADER_MODEL in reply.headers
    was_started = is_ours and HEADER_NOT_STARTED not in reply.headers
    if reply.status < 500 and reply.status != 429:
        fleet.record_success(endpoint)
        return None
    if reply.status not in (429, 500, 503):
        fleet.record_success(endpoint)  # 501, 504: of the request, not of the replica
        return None
    body = reply.first
    while len(body) <= MAX_KEPT_BYTES and (piece := await reply.read_more()):
        body += piece
    match reply.status:
        case 429:
            failure = AttemptFailure.SHED
        case 503 if was_started:
            failure = AttemptFailure.INTERRUPTED
        case 503 if "Retry-After" in reply.headers:
            failure = AttemptFailure.UNAVAILABLE
            fleet.record_unavailable(endpoint, UNAVAILABLE_SECONDS)
        case _:
            failure = AttemptFailure.ENGINE_DEAD
            fleet.record_failure(endpoint)
            if reply.status == 500 and not _says_engine_dead(body):
                reply.first = body
                return None
    reply.headers.popall("Content-Length", None)  # of the body as it was sent, not as we kept it
    return RejectedAttempt(failure, reply.status, reply.headers, body)


def _says_engine_dead(body: bytes) -> bool:
    try:
        error = msgspec.json.decode(body)["error"]
        return bool(error["type"] == ENGINE_DEAD_TYPE or error["message"].startswith(VLLM_ENGINE_DEAD))
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError, RecursionError):
        return False
