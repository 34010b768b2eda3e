"""Refuses requests by their headers alone, on every path of both ports, before anything is known of the caller.

| header            | accepted             | otherwise                                                              |
|-------------------|----------------------|------------------------------------------------------------------------|
| Content-Encoding  | absent, identity     | 415: a megabyte can unpack to a gigabyte                               |
| Transfer-Encoding | absent, chunked      | 501                                                                    |
| Expect            | absent, 100-continue | 417; `100 Continue` is sent when the body is read, so after the key    |

The listener never decompresses, and limits what it reads of a body that no handler has read (`listener`).
"""

from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web
from multidict import CIMultiDictProxy

from slipway_gateway.errors import Refusal, unsupported_encoding, unsupported_expectation, unsupported_transfer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_AWAITS_CONTINUE: Final = web.RequestKey("slipway.awaits_continue", bool)


def refusal_by_headers(headers: CIMultiDictProxy[str]) -> Refusal | None:
    """The refusal that the headers of a request deserve, if any."""
    if any(coding not in ("", "identity") for coding in _codings(headers, "Content-Encoding")):
        return unsupported_encoding()
    if any(coding not in ("", "chunked") for coding in _codings(headers, "Transfer-Encoding")):
        return unsupported_transfer()
    if any(expected not in ("", "100-continue") for expected in _codings(headers, "Expect")):
        return unsupported_expectation()
    return None


@web.middleware
async def refuse_by_headers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Raise the refusal of a request whose headers cannot be accepted."""
    if (refusal := refusal_by_headers(request.headers)) is not None:
        raise refusal
    return await handler(request)


async def defer_continue(request: web.Request) -> None:
    """Handle `Expect: 100-continue` for a route: note it, and send nothing before the body is wanted."""
    request[_AWAITS_CONTINUE] = True


async def ask_for_body(request: web.Request) -> None:
    """Send `100 Continue` to a client that waits for it. Call this before the first byte of a body is read."""
    if request.pop(_AWAITS_CONTINUE, False):
        await request.writer.write(_CONTINUE)
        request.writer.output_size = 0


def _codings(headers: CIMultiDictProxy[str], name: str) -> list[str]:
    return [coding.strip().lower() for value in headers.getall(name, ()) for coding in value.split(",")]
