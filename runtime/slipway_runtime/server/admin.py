"""The admin port: probes without a token; signals, state and drain with one.

The kubelet cannot read a Secret, so `/ready`, `/health` and `/metrics` are open. The rest wants the token whose
SHA-256 the pod was given; without any digest the port is bound to this machine only, and asks for nothing.
"""

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from slipway_api import names
from slipway_api.admin_token import token_matches
from slipway_api.runtime_api import Body, DrainRequest
from slipway_runtime.server.errors import ApiError
from slipway_runtime.server.replica import Replica


async def token_required(http: Request) -> None:
    """Refuse whoever does not hold the token."""
    digests: tuple[str, ...] = http.app.state.admin_token_digests
    if digests and not token_matches(http.headers.get(names.HEADER_ADMIN_TOKEN, ""), digests):
        raise ApiError(401, f"the header {names.HEADER_ADMIN_TOKEN} is missing or wrong")


open_routes = APIRouter()
routes = APIRouter(dependencies=[Depends(token_required)])


def _wire(body: Body, status: int = 200) -> Response:
    return Response(body.wire(), status_code=status, media_type="application/json")


@open_routes.get(names.PATH_READY)
async def ready(http: Request) -> Response:
    """Whether new requests are welcome: 200 or 503."""
    replica: Replica = http.app.state.replica
    body = replica.ready()
    return _wire(body, 200 if body.ready else 503)


@routes.get(names.PATH_SIGNALS)
async def signals(http: Request) -> Response:
    """The load, in less than 300 bytes."""
    replica: Replica = http.app.state.replica
    return _wire(replica.signals())


@routes.get(names.PATH_STATE)
async def state(http: Request) -> Response:
    """All there is to know."""
    replica: Replica = http.app.state.replica
    return _wire(replica.state())


@routes.post(names.PATH_DRAIN)
async def drain(http: Request) -> Response:
    """Refuse new requests and finish the others; answers at once with how far it is."""
    replica: Replica = http.app.state.replica
    raw = await http.body()
    try:
        asked = DrainRequest.model_validate_json(raw) if raw.strip() else DrainRequest()
    except ValueError:
        raise ApiError(400, 'the body is {"timeoutSeconds": …, "reason": …}, or empty') from None
    return _wire(replica.drain(asked.timeout_seconds, asked.reason))


@routes.post(names.PATH_UNDRAIN)
async def undrain(http: Request) -> Response:
    """Take requests again."""
    replica: Replica = http.app.state.replica
    return _wire(replica.undrain())
