"""The errors that calls to the API server raise.

KubeError
├── Unreachable             no answer, or half of one: a write may or may not have happened
├── NotLeader               the writer sent nothing, because this process does not hold the lease
├── LeadershipLost          another process leads, or may lead by now
├── NoCredentials           neither in-cluster credentials nor a kubeconfig
└── StatusError             the server answered with an error status
    ├── BadRequest          400
    ├── Unauthorized        401
    ├── Forbidden           403
    ├── NotFound            404
    ├── Conflict            409: changed meanwhile, or owned by another field manager
    │   └── AlreadyExists   409 to a create
    ├── Gone                410: that resourceVersion is compacted; list again
    ├── Invalid             422: refused by validation, or a failed `test` of a JSON patch
    ├── TooManyRequests     429: try again after `retry_after` seconds
    └── ServerError         5xx
"""
# ruff: noqa: N818  the names are the API's own names of these answers

import msgspec


class KubeError(Exception):
    """Base of the errors of this package."""


class Unreachable(KubeError):
    """No answer, or half of one. A write may or may not have happened: read the object before a retry."""


class NotLeader(KubeError):
    """This process does not hold the lease, so the writer sent nothing."""


class LeadershipLost(KubeError):
    """This process held the lease and must stop: another process leads, or may lead by now."""


class NoCredentials(KubeError):
    """Neither in-cluster credentials nor a usable kubeconfig."""


class StatusError(KubeError):
    """The server answered with an error status."""

    def __init__(self, status: int, message: str, *, reason: str = "", retry_after: float | None = None) -> None:
        super().__init__(f"{status} {reason}: {message}" if reason else f"{status}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after = retry_after


class BadRequest(StatusError):
    """400: the server cannot parse the request."""


class Unauthorized(StatusError):
    """401: the credentials are not, or no longer, accepted."""


class Forbidden(StatusError):
    """403: RBAC or admission refuses the request."""


class NotFound(StatusError):
    """404: there is no such object, or no such kind."""


class Conflict(StatusError):
    """409: the object changed meanwhile, or another field manager owns a field of the request."""


class AlreadyExists(Conflict):
    """409 to a create: an object of this name is already there."""


class Gone(StatusError):
    """410: that resourceVersion is compacted; list again."""


class Invalid(StatusError):
    """422: refused by validation, or the `test` of a JSON patch failed."""


class TooManyRequests(StatusError):
    """429: the server (or a disruption budget) refuses for `retry_after` seconds."""


class ServerError(StatusError):
    """5xx: the server, or a webhook or store behind it, failed."""


_BY_STATUS: dict[int, type[StatusError]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    422: Invalid,
    429: TooManyRequests,
}


class _Details(msgspec.Struct, rename="camel"):
    retry_after_seconds: float = 0


class _Status(msgspec.Struct):
    """The fields of a `meta/v1 Status` that are used here."""

    code: int = 0
    reason: str = ""
    message: str = ""
    details: _Details | None = None


def from_response(status: int, body: bytes, retry_after: str | None = None) -> StatusError:
    """The error for an HTTP answer whose body is a `Status` object, or any body that a proxy in between returned."""
    try:
        detail = msgspec.json.decode(body, type=_Status)
    except msgspec.DecodeError:
        detail = _Status(message=body[:200].decode(errors="replace").strip())
    seconds = _seconds(retry_after)
    if seconds is None and detail.details is not None and detail.details.retry_after_seconds:
        seconds = detail.details.retry_after_seconds
    kind = ServerError if status >= 500 else _BY_STATUS.get(status, StatusError)
    if kind is Conflict and detail.reason == "AlreadyExists":
        kind = AlreadyExists
    return kind(status, detail.message or "no message", reason=detail.reason, retry_after=seconds)


def from_status(body: bytes) -> StatusError:
    """The error inside an ERROR event of a watch; its code is in the object, not in the HTTP status."""
    try:
        code = msgspec.json.decode(body, type=_Status).code
    except msgspec.DecodeError:
        code = 0
    return from_response(code or 500, body)


def _seconds(retry_after: str | None) -> float | None:
    # Kubernetes never sends the HTTP-date form; a date from a proxy counts as no Retry-After.
    try:
        return max(0.0, float(retry_after)) if retry_after else None
    except ValueError:
        return None
