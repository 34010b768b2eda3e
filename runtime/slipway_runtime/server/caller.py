"""What the gateway says of who asks, in headers that it removes from what clients send."""

from dataclasses import dataclass
from typing import Final

from starlette.requests import Request as HttpRequest

from slipway_api import names, stream_marks
from slipway_runtime.server.errors import ApiError
from slipway_runtime.server.openai_types import GenerationRequest

LONGEST_DEADLINE_SECONDS: Final = 86_400.0  # no answer takes a day


@dataclass(frozen=True)
class Caller:
    """Tenant, priority and deadline of a request, and whether the gateway asked for token ids."""

    tenant: str = ""
    priority: int | None = None
    seconds: float | None = None  # until nobody wants the answer any more
    wants_token_ids: bool = False  # marks in the stream, so that another replica can continue it
    may_resume: bool = False  # `slipway_resume` in the body is the gateway's

    @classmethod
    def of(cls, request: HttpRequest) -> "Caller":
        """Read the headers; a senseless one is a 400."""
        headers = request.headers
        try:
            seconds = float(headers[names.HEADER_DEADLINE]) if names.HEADER_DEADLINE in headers else None
            priority = int(headers[names.HEADER_PRIORITY]) if headers.get(names.HEADER_PRIORITY) else None
        except ValueError:
            raise ApiError(400, f"{names.HEADER_DEADLINE} and {names.HEADER_PRIORITY} are numbers") from None
        if seconds is not None and not seconds < float("inf"):
            raise ApiError(400, f"{names.HEADER_DEADLINE} is a number of seconds")
        if seconds is not None and seconds <= 0:
            raise ApiError(504, "the deadline of the request has passed")
        seconds = min(seconds, LONGEST_DEADLINE_SECONDS) if seconds is not None else None
        asked = headers.get(names.HEADER_TOKEN_IDS, "")
        return cls(
            tenant=headers.get(names.HEADER_TENANT, "")[:128],
            priority=priority,
            seconds=seconds,
            wants_token_ids=asked in {stream_marks.REPORT, stream_marks.RESUME},
            may_resume=asked == stream_marks.RESUME,
        )

    def check(self, body: GenerationRequest) -> None:
        """Refuse an answer that began elsewhere unless the gateway's header announces it: a client could forge one."""
        if body.slipway_resume is not None and not self.may_resume:
            raise ApiError(400, "Unrecognized request argument supplied: slipway_resume", param="slipway_resume")

    def priority_of(self, body: GenerationRequest) -> int:
        """Higher goes first. The gateway knows better; vLLM's field, where lower goes first, is turned around."""
        if self.priority is not None:
            return self.priority
        return -(body.priority or 0)

    def cache_salt(self, body: GenerationRequest) -> str:
        """Prefixes are shared within a tenant only, and a client may divide its own further."""
        return self.salted(body.cache_salt)

    def salted(self, own: str | None) -> str:
        """The salt of a request whose client gave `own`."""
        return f"{self.tenant}\x1f{own or ''}" if self.tenant or own else ""
