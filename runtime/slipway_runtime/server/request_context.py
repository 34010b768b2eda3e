"""Context of a request: the caller, from the gateway's headers, and the base model or adapter that its model names.

The gateway sets tenant, priority, deadline and token ids, and removes these headers from clients' requests.
"""

from dataclasses import dataclass
from typing import Final

from starlette.requests import Request as HttpRequest

from slipway_api import names, stream_marks
from slipway_api.text_blocks import TextBlocks
from slipway_runtime.messages import AdapterState
from slipway_runtime.server.errors import ApiError, unavailable
from slipway_runtime.server.openai_types import GenerationRequest
from slipway_runtime.server.replica import LoadedModel, Replica

LONGEST_DEADLINE_SECONDS: Final = 86_400.0  # no answer takes a day
HIGHEST_PRIORITY: Final = 1000  # as the field `priority`, and as the gateway's tenants


@dataclass(frozen=True)
class Caller:
    """Tenant, priority and deadline of a request, and whether the gateway asked for token ids."""

    tenant: str = ""
    priority: int | None = None
    seconds: float | None = None  # until the deadline
    wants_token_ids: bool = False  # token marks in the stream, so that another replica can resume it
    may_resume: bool = False  # whether `slipway_resume` in the body comes from the gateway
    text_blocks: TextBlocks | None = None  # by which the gateway names the beginnings of the prompt

    @classmethod
    def of(cls, request: HttpRequest) -> "Caller":
        """Parse the headers; raises ApiError 400 for an invalid one, 504 for a deadline that has passed."""
        headers = request.headers
        try:
            seconds = float(headers[names.HEADER_DEADLINE]) if names.HEADER_DEADLINE in headers else None
            priority = int(headers[names.HEADER_PRIORITY]) if headers.get(names.HEADER_PRIORITY) else None
        except ValueError:
            raise ApiError(400, f"{names.HEADER_DEADLINE} and {names.HEADER_PRIORITY} are numbers") from None
        if priority is not None and abs(priority) > HIGHEST_PRIORITY:
            raise ApiError(400, f"{names.HEADER_PRIORITY} is between -{HIGHEST_PRIORITY} and {HIGHEST_PRIORITY}")
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
            text_blocks=_text_blocks(headers.get(names.HEADER_TEXT_BLOCKS, "")),
        )

    def check(self, body: GenerationRequest) -> None:
        """Refuse `slipway_resume` unless the gateway's header announces it: a client could forge an answer."""
        if body.slipway_resume is not None and not self.may_resume:
            raise ApiError(400, "Unrecognized request argument supplied: slipway_resume", param="slipway_resume")

    def priority_of(self, body: GenerationRequest) -> int:
        """The priority, higher first: the gateway's, else vLLM's field negated, where lower is first."""
        if self.priority is not None:
            return self.priority
        return -(body.priority or 0)

    def cache_salt(self, body: GenerationRequest) -> str:
        """The cache salt: prefixes are shared within a tenant only, and a client's own salt divides them further."""
        return self.salted(body.cache_salt)

    def salted(self, own: str | None) -> str:
        """The cache salt of the tenant combined with the client's salt `own`."""
        return f"{self.tenant}\x1f{own or ''}" if self.tenant or own else ""


@dataclass(frozen=True)
class Served:
    """The model that serves a request, alone or with an adapter."""

    model: LoadedModel
    name: str  # the `model` field of the response
    digest: str = ""  # of the adapter; empty: the base model alone

    def fingerprint(self, replica: Replica) -> str:
        """The `system_fingerprint` of its answers."""
        return (
            f"{replica.fingerprint}/{self.digest.removeprefix('sha256:')[:12]}" if self.digest else replica.fingerprint
        )


def served_by(replica: Replica, name: str, http: HttpRequest | None = None) -> Served:
    """The base model or adapter named `name`. Raises ApiError where it cannot be served."""
    registry = replica.loaded.adapters if replica.loaded is not None else None
    adapter = None if replica.identity.answers_to(name) or registry is None else registry.find(name)
    if adapter is None:
        return Served(replica.model_for(name), replica.identity.model)
    model = replica.model_for("")
    if adapter.state is AdapterState.LOADING:
        raise unavailable(f"the adapter {adapter.name} is loading")
    if adapter.state is AdapterState.FAILED:
        raise unavailable(f"the adapter {adapter.name} could not be loaded: {adapter.error}", retry_after_seconds=None)
    if http is not None:
        http.scope["state"]["adapter"] = adapter.name
    return Served(model, adapter.name, adapter.digest)


def _text_blocks(header: str) -> TextBlocks | None:
    """The text blocks in this header. One that cannot be read counts as absent: the answer does not depend on it."""
    try:
        return TextBlocks.of_header(header) if header else None
    except ValueError:
        return None
