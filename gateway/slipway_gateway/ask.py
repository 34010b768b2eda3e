"""What a request asks for, read once from its bounded body. Whether its fields make sense, the runtime judges."""

import re
import uuid
from typing import Any, Final

import msgspec
from aiohttp import web

from slipway_api.names import HEADER_PIN_REVISION, HEADER_REQUEST_ID
from slipway_gateway.errors import bad_request, busy, too_large

BYTES_PER_TOKEN: Final = 4
EXPECTED_OUTPUT_TOKENS: Final = 256  # when the client does not say
MOST_OUTPUT_TOKENS: Final = 4096  # a client's generous limit is not a forecast
# A generated token holds a place in the batch for a whole step; a prompt token shares one with a thousand others.
OUTPUT_WEIGHT: Final = 4

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class _Body(msgspec.Struct):
    """The few fields that routing needs. Untyped: what is wrong with them, the runtime says in its own words."""

    model: Any = None
    stream: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    n: Any = None


_decode = msgspec.json.Decoder(_Body).decode
_decode_raw = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request, as far as routing is concerned."""

    model: str
    stream: bool
    pin: str  # the revision that the client insists on
    max_tokens: int | None
    work: int  # about how much the answer will cost, in tokens
    body: bytes

    def body_for(self, served_name: str) -> bytes:
        """The body, calling the model what its replicas call it; every other byte stays as the client wrote it."""
        if self.model == served_name:
            return self.body
        fields = _decode_raw(self.body)
        fields["model"] = msgspec.Raw(msgspec.json.encode(served_name))
        return msgspec.json.encode(fields)


class BodyBudget:
    """A bound on the bytes of all requests inside the gateway, which hold their bodies until they are answered."""

    def __init__(self, *, each: int, total: int) -> None:
        self.each = each
        self._left = total

    async def read(self, request: web.Request) -> bytes:
        """The whole body; pair with `release`. Refuses what is too large, alone or together with the others."""
        if (request.content_length or 0) > self.each:
            raise too_large(self.each)
        pieces, size = [], 0
        try:
            async for piece in request.content.iter_any():
                size += len(piece)
                self._left -= len(piece)
                if size > self.each:
                    raise too_large(self.each)
                if self._left < 0:
                    raise busy()
                pieces.append(piece)
        except web.RequestPayloadError as error:
            self._left += size
            raise bad_request("The body cannot be read as its Transfer-Encoding or Content-Encoding says.") from error
        except BaseException:
            self._left += size
            raise
        return b"".join(pieces)

    def release(self, body: bytes) -> None:
        """This body is no longer held."""
        self._left += len(body)


def parse(body: bytes, request: web.Request) -> Ask:
    """Make sense of a body, or refuse it."""
    try:
        fields = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request("The body is not a JSON object.") from error
    if not isinstance(fields.model, str) or not fields.model:
        raise bad_request("The body needs a `model`: a string that names what shall answer.", param="model")
    asked_for = fields.max_completion_tokens if fields.max_tokens is None else fields.max_tokens
    max_tokens = asked_for if isinstance(asked_for, int) and asked_for > 0 else None
    expected = min(max_tokens or EXPECTED_OUTPUT_TOKENS, MOST_OUTPUT_TOKENS)
    answers = fields.n if isinstance(fields.n, int) and 0 < fields.n <= 128 else 1
    return Ask(
        model=fields.model,
        stream=fields.stream is True,
        pin=request.headers.get(HEADER_PIN_REVISION, ""),
        max_tokens=max_tokens,
        work=len(body) // BYTES_PER_TOKEN + expected * answers * OUTPUT_WEIGHT,
        body=body,
    )


def request_id(request: web.Request) -> str:
    """The client's id for this request where it is sane, so that its logs and ours meet; else a new one."""
    given = request.headers.get(HEADER_REQUEST_ID, "")
    return given if _SANE_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
