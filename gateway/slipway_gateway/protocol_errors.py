"""Answers what is not valid HTTP in the shape of all refusals, without the name of the library and its version."""

from aiohttp import web

from slipway_gateway.errors import Refusal, internal

SERVER = "slipway"  # does not reveal the library and its version


class _Protocol(web.RequestHandler):
    """aiohttp's protocol with our error answers: no middleware and no signal sees a request that cannot be parsed."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to a request that cannot be parsed, or whose handler failed; closes the connection."""
        super().handle_error(request, status, exc, message)  # logs it; raises if an answer has begun
        refusal = (
            internal() if status >= 500 else Refusal(status, "BadRequestError", "This is not a valid HTTP request.")
        )
        response = refusal.response()
        response.headers["Server"] = SERVER
        response.force_close()
        return response


async def hide_server(request: web.Request, response: web.StreamResponse) -> None:
    """Set the header `Server` of an answer that is about to be sent."""
    response.headers["Server"] = SERVER


def with_own_errors(protocol: web.RequestHandler) -> web.RequestHandler:
    """The same protocol, with our error answers. aiohttp has no setting for them, and makes its protocols itself."""
    protocol.__class__ = _Protocol
    return protocol
