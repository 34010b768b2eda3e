"""The account of one request: which replicas were tried and why, its waits and its end. For `kubectl slipway why`."""

import time
from datetime import UTC, datetime
from typing import Any

from slipway_gateway.request_state import AttemptNote, RequestState


def describe_request(record: RequestState, *, is_open: bool = False) -> dict[str, Any]:
    """The account as JSON. Times are seconds since the request's first byte; None: it did not come so far."""
    now = time.monotonic()
    usage = record.usage()

    def at(moment: float) -> float | None:
        return round(moment - record.started, 4) if moment else None

    return {
        "requestId": record.request_id,
        "path": record.path,
        "startedAt": datetime.fromtimestamp(time.time() - (now - record.started), UTC).isoformat(),
        "isOpen": is_open,
        "model": record.model,
        "service": record.service,
        "adapter": record.adapter,
        "revision": record.revision,
        "endpoint": record.endpoint,
        "tenant": record.tenant,
        "stream": record.stream,
        "status": record.status,
        "finish": record.finish or record.runtime_finish(),
        "error": record.error,
        "tenantLimit": record.tenant_limit,
        "degraded": record.degraded,
        "fallbackFrom": record.fallback_from,
        "handovers": record.handovers,
        "inputTokens": usage.input,
        "cachedTokens": usage.cached,
        "outputTokens": usage.output,
        "isEstimated": usage.is_estimated,
        "readAt": at(record.arrived),
        "admittedAt": at(record.admitted),
        "firstByteAt": at(record.first_byte),
        "endedAt": None if is_open else at(now),
        "ageSeconds": at(now),
        "attempts": [_describe_attempt(note, at(note.at)) for note in list(record.attempts)],
    }


def _describe_attempt(note: AttemptNote, at: float | None) -> dict[str, Any]:
    return {
        "kind": note.kind.value,
        "endpoint": note.endpoint,
        "revision": note.revision,
        "at": at,
        "pickedFor": note.reason.value,
        "cause": note.cause,
        "failure": note.failure,
        "considered": [
            {
                "endpoint": one.endpoint,
                "score": round(one.score, 4),
                "matchedTokens": one.matched_tokens,
                "loadTokens": one.load_tokens,
                "kvUsage": None if one.kv_usage is None else round(one.kv_usage, 4),
                "isHome": one.is_home,
            }
            for one in note.considered
        ],
    }
