"""The admin port: probes without a token; signals, state, drain, adapters, model and sleep with one.

The kubelet cannot read a Secret, so `/ready`, `/health` and `/metrics` are open. The rest wants the token whose
SHA-256 the pod was given; without any digest the port is bound to this machine only, and asks for nothing.
"""

import asyncio
from collections.abc import Mapping
from typing import TypeVar

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from slipway_api import names
from slipway_api.admin_token import token_matches
from slipway_api.runtime_api import (
    AdapterInfo,
    AdapterList,
    Body,
    DrainRequest,
    LoadAdapterRequest,
    LoadModelRequest,
    SleepRequest,
    SleepStatus,
)
from slipway_runtime.server.adapters import AdapterRegistry
from slipway_runtime.server.errors import ApiError, unavailable
from slipway_runtime.server.model_choice import ModelChoice
from slipway_runtime.server.replica import Replica
from slipway_runtime.server.state import state_of

ANSWER_SECONDS = 0.2  # a load or an unload that takes longer answers 202, and goes on

_B = TypeVar("_B", bound=Body)


async def token_required(http: Request) -> None:
    """Refuse requests without the admin token."""
    digests: tuple[str, ...] = http.app.state.admin_token_digests
    if digests and not token_matches(http.headers.get(names.HEADER_ADMIN_TOKEN, ""), digests):
        raise ApiError(401, f"the header {names.HEADER_ADMIN_TOKEN} is missing or wrong")


open_routes = APIRouter()
routes = APIRouter(dependencies=[Depends(token_required)])


def _wire(body: Body, status: int = 200) -> Response:
    return Response(body.wire(), status_code=status, media_type="application/json")


async def _asked(http: Request, kind: type[_B], shape: str, *, or_empty: bool = False) -> _B:
    raw = await http.body()
    try:
        return kind.model_validate_json(raw if raw.strip() or not or_empty else b"{}")
    except ValueError:
        raise ApiError(400, f"the body is {shape}{', or empty' if or_empty else ''}") from None


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
    return _wire(state_of(replica))


@routes.post(names.PATH_DRAIN)
async def drain(http: Request) -> Response:
    """Begin a drain; answers at once with how far it is."""
    replica: Replica = http.app.state.replica
    shape = '{"timeoutSeconds": …, "refuseAfterSeconds": …, "reason": …}'
    asked = await _asked(http, DrainRequest, shape, or_empty=True)
    return _wire(replica.drain(asked.timeout_seconds, asked.reason, refuse_after_seconds=asked.refuse_after_seconds))


@routes.post(names.PATH_UNDRAIN)
async def undrain(http: Request) -> Response:
    """Take requests again."""
    replica: Replica = http.app.state.replica
    return _wire(replica.undrain())


# --- adapters


@routes.get(names.PATH_ADAPTERS)
async def list_adapters(http: Request) -> Response:
    """All adapters, those that failed and those that are leaving included. This list is the truth."""
    replica: Replica = http.app.state.replica
    infos = replica.loaded.adapters.infos() if replica.loaded is not None else []
    facts = replica.loaded.engine.facts if replica.loaded is not None else None
    listing = AdapterList(
        boot_id=replica.boot_id,
        adapters=tuple(infos),
        max_adapters=facts.max_adapters if facts else 0,
        max_cpu_adapters=facts.max_cpu_adapters if facts else 0,
    )
    return _wire(listing)


@routes.post(names.PATH_ADAPTERS)
async def load_adapter(http: Request) -> Response:
    """Make a name mean an adapter: 200 when it does, 202 while it loads. Asking again is harmless."""
    asked = await _asked(http, LoadAdapterRequest, '{"name": …, "uri": …, "digest": …, "pinned": …}')
    registry = _registry(http)
    loading = asyncio.create_task(
        registry.load(
            asked.name,
            asked.uri,
            digest=asked.digest,
            pinned=asked.pinned,
            version=asked.version,
            credentials=known_credentials(asked.credentials),
        ),
        name=f"load {asked.name[:64]}",
    )
    done, _ = await asyncio.wait([loading], timeout=ANSWER_SECONDS)
    if done:
        await loading  # raises what there is to say
        return _wire(registry.info(asked.name))
    loading.add_done_callback(_hear)
    return _wire(registry.info(asked.name) or AdapterInfo(name=asked.name, state="loading"), 202)


@routes.delete(names.PATH_ADAPTERS + "/{name}")
async def unload_adapter(name: str, http: Request) -> Response:
    """Forget a name: 202 while requests finish, 200 when its content is gone, or was never here."""
    registry = _registry(http)
    try:
        leaving = await registry.unload(name)
    except ApiError:
        return Response(status_code=202 if registry.leaving(name) else 200)
    if leaving is not None:
        await asyncio.wait([leaving], timeout=ANSWER_SECONDS)
    return Response(status_code=202 if registry.leaving(name) else 200)


def known_credentials(given: Mapping[str, str]) -> dict[str, str]:
    """Those that a Secret may hold: the caller sets no other variable of the environment."""
    return {key: value for key, value in given.items() if key in names.CREDENTIALS}


def _registry(http: Request) -> AdapterRegistry:
    replica: Replica = http.app.state.replica
    if replica.loaded is None:
        raise unavailable(replica.ready().message)
    return replica.loaded.adapters


def _hear(task: asyncio.Task[object]) -> None:
    """Nobody waits any more: what went wrong stands in the list of adapters."""
    if not task.cancelled():
        task.exception()


# --- model and sleep


@routes.get(names.PATH_MODEL)
async def model(http: Request) -> Response:
    """Which model is here."""
    choice: ModelChoice = http.app.state.model_choice
    return _wire(choice.info())


@routes.post(names.PATH_MODEL)
async def load_model(http: Request) -> Response:
    """Serve a model: 202 while it loads, 200 when it answers. A process without one takes it; another one is a 409."""
    choice: ModelChoice = http.app.state.model_choice
    choice.choose(await _asked(http, LoadModelRequest, "a ModelSpec, with at least a uri"))
    info = choice.info()
    return _wire(info, 200 if info.loaded else 202)


@routes.post(names.PATH_SLEEP)
async def sleep(http: Request) -> Response:
    """Give the device's memory back; only with nothing running."""
    asked = await _asked(http, SleepRequest, '{"level": 1 or 2}', or_empty=True)
    replica: Replica = http.app.state.replica
    await replica.sleep(asked.level)
    return _wire(SleepStatus(sleeping=True, level=asked.level))


@routes.post(names.PATH_WAKE_UP)
async def wake_up(http: Request) -> Response:
    """Serve again."""
    replica: Replica = http.app.state.replica
    await replica.wake_up()
    return _wire(SleepStatus(sleeping=False))
