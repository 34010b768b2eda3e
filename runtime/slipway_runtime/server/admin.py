"""The admin port and the drain socket: probes without a token; state, drain, adapters, model, sleep with one.

The kubelet cannot read a Secret, so `/ready`, `/health` and `/metrics` are open. All other endpoints require the token
whose SHA-256 the pod was given; without any digest the port listens on localhost only and requires no token.

The drain socket lets a preStop hook in the same pod start a drain and wait for its end, without a token: only processes
inside the pod can open the socket file. The request is one JSON line; the answer, at the end of the drain, is another.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import structlog
from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from slipway_api import names
from slipway_api.admin_token import token_matches
from slipway_api.recent_requests import INVALID_ID, REQUEST_ID
from slipway_api.runtime_api import (
    AdapterInfo,
    AdapterList,
    BlockCounts,
    Body,
    DrainRequest,
    LastStep,
    LoadAdapterRequest,
    LoadModelRequest,
    QueueCounts,
    SleepRequest,
    SleepStatus,
    State,
)
from slipway_runtime.messages import EngineFacts, EngineStats
from slipway_runtime.server.adapter_registry import AdapterRegistry
from slipway_runtime.server.errors import ApiError, unavailable
from slipway_runtime.server.metrics import longest_queues
from slipway_runtime.server.model_choice import ModelChoice
from slipway_runtime.server.replica import Replica

log = structlog.get_logger()

MOST_WAIT_SECONDS = 2.0  # of an answer to a startup probe
ANSWER_SECONDS = 0.2  # a load or an unload that takes longer answers 202, and continues

_B = TypeVar("_B", bound=Body)


async def token_required(http: Request) -> None:
    """Refuse requests without the admin token."""
    digests: tuple[str, ...] = http.app.state.admin_token_digests
    if digests and not token_matches(http.headers.get(names.HEADER_ADMIN_TOKEN, ""), digests):
        message = f"the header {names.HEADER_ADMIN_TOKEN} is missing or wrong"
        raise ApiError(401, message, headers={"Connection": "close"})  # or its body would be read to the end


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


@open_routes.head(names.PATH_READY, include_in_schema=False)
@open_routes.get(names.PATH_READY)
async def ready(
    http: Request, wait_seconds: Annotated[float, Query(alias=names.PARAMETER_WAIT, ge=0, le=MOST_WAIT_SECONDS)] = 0.0
) -> Response:
    """Readiness: 200 where the replica takes new requests, else 503; before its first time, after `waitSeconds`."""
    replica: Replica = http.app.state.replica
    await replica.wait_until_started(wait_seconds)
    body = replica.ready()
    return _wire(body, 200 if body.ready else 503)


@routes.get(names.PATH_SIGNALS)
async def signals(http: Request) -> Response:
    """The load signals of the replica, in less than 300 bytes."""
    replica: Replica = http.app.state.replica
    return _wire(replica.signals())


@routes.get(names.PATH_STATE)
async def state(http: Request) -> Response:
    """The full state of the replica."""
    replica: Replica = http.app.state.replica
    return _wire(state_of(replica))


@routes.get(names.PATH_REQUESTS)
async def request_accounts(
    http: Request, request_id: Annotated[str, Query(alias=names.PARAMETER_ID)] = ""
) -> dict[str, Any]:
    """The accounts of the requests with one id; none if this process has none."""
    if not REQUEST_ID.fullmatch(request_id):
        raise ApiError(400, INVALID_ID, param=names.PARAMETER_ID)
    replica: Replica = http.app.state.replica
    return {"requests": replica.recent.find(request_id)}


@routes.post(names.PATH_DRAIN)
async def drain(http: Request) -> Response:
    """Begin a drain; answers at once with its progress."""
    replica: Replica = http.app.state.replica
    shape = '{"timeoutSeconds": …, "refuseAfterSeconds": …, "reason": …}'
    asked = await _asked(http, DrainRequest, shape, or_empty=True)
    return _wire(replica.drain(asked.timeout_seconds, asked.reason, refuse_after_seconds=asked.refuse_after_seconds))


@routes.post(names.PATH_UNDRAIN)
async def undrain(http: Request) -> Response:
    """End a drain: take requests again."""
    replica: Replica = http.app.state.replica
    return _wire(replica.undrain())


# --- adapters


@routes.get(names.PATH_ADAPTERS)
async def list_adapters(http: Request) -> Response:
    """All adapters, including failed ones and those that are being unloaded."""
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
    """Load an adapter under a name: 200 when loaded, 202 while it loads. Idempotent."""
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
        await loading  # raises the error of the load
        return _wire(registry.info(asked.name))
    loading.add_done_callback(_retrieve_exception)
    return _wire(registry.info(asked.name) or AdapterInfo(name=asked.name, state="loading"), 202)


@routes.delete(names.PATH_ADAPTERS + "/{name}")
async def unload_adapter(name: str, http: Request) -> Response:
    """Unload an adapter: 202 while its requests finish, 200 when it is unloaded, or is unknown."""
    registry = _registry(http)
    try:
        leaving = await registry.unload(name)
    except ApiError:
        return Response(status_code=202 if registry.leaving(name) else 200)
    if leaving is not None:
        await asyncio.wait([leaving], timeout=ANSWER_SECONDS)
    return Response(status_code=202 if registry.leaving(name) else 200)


def known_credentials(given: Mapping[str, str]) -> dict[str, str]:
    """Keep the keys that a Secret may hold: a caller must not set other environment variables."""
    return {key: value for key, value in given.items() if key in names.CREDENTIALS}


def _registry(http: Request) -> AdapterRegistry:
    replica: Replica = http.app.state.replica
    if replica.loaded is None:
        raise unavailable(replica.ready().message)
    return replica.loaded.adapters


def _retrieve_exception(task: asyncio.Task[object]) -> None:
    """Retrieve the exception of a task without a waiting caller: the list of adapters has the error."""
    if not task.cancelled():
        task.exception()


# --- model and sleep


@routes.get(names.PATH_MODEL)
async def model(http: Request) -> Response:
    """The model of this replica."""
    choice: ModelChoice = http.app.state.model_choice
    return _wire(choice.info())


@routes.post(names.PATH_MODEL)
async def load_model(http: Request) -> Response:
    """Load a model: 202 while it loads, 200 when it serves. 409 where the process has another model."""
    choice: ModelChoice = http.app.state.model_choice
    choice.choose(await _asked(http, LoadModelRequest, "a ModelSpec, with at least a uri"))
    info = choice.info()
    return _wire(info, 200 if info.loaded else 202)


@routes.delete(names.PATH_MODEL)
async def give_model_back(http: Request) -> Response:
    """Give the model of POST /model back: 202, then the process starts over; 200 where there is none. After a drain."""
    choice: ModelChoice = http.app.state.model_choice
    is_accepted = choice.give_back()
    return _wire(choice.info(), 202 if is_accepted else 200)


@routes.post(names.PATH_SLEEP)
async def sleep(http: Request) -> Response:
    """Free the device's memory; only without open requests."""
    asked = await _asked(http, SleepRequest, '{"level": 1 or 2}', or_empty=True)
    replica: Replica = http.app.state.replica
    await replica.sleep(asked.level)
    return _wire(SleepStatus(sleeping=True, level=asked.level))


@routes.post(names.PATH_WAKE_UP)
async def wake_up(http: Request) -> Response:
    """End a sleep: serve requests again."""
    replica: Replica = http.app.state.replica
    await replica.wake_up()
    return _wire(SleepStatus(sleeping=False))


def state_of(replica: Replica) -> State:
    """The current state of the replica; before the engine is loaded, its numbers are zeros."""
    stats, loaded = replica.stats(), replica.loaded
    facts = loaded.engine.facts if loaded else None
    blocks = BlockCounts(
        total=stats.blocks_total,
        live=stats.blocks_live,
        cached=stats.blocks_cached,
        free=stats.blocks_total - stats.blocks_live - stats.blocks_cached,
    )
    return State(
        boot_id=replica.boot_id,
        model_name=replica.identity.model,
        revision=replica.identity.revision,
        tokenizer_sha256=loaded.tokenizer_sha256 if loaded else "",
        uptime_seconds=replica.uptime_seconds,
        block_size=facts.block_size if facts else 0,
        bytes_per_token=facts.bytes_per_token if facts else 0,
        max_model_len=facts.max_model_len if facts else 0,
        max_num_seqs=facts.max_num_seqs if facts else 0,
        blocks=blocks,
        queue=QueueCounts(
            running=stats.running,
            waiting=stats.waiting,
            waiting_tokens=stats.waiting_tokens,
            waiting_by_tenant=longest_queues(stats),
        ),
        draining=replica.draining,
        startup=replica.startup,
        kv_tiers=_tiers(blocks, facts, stats),
        last_step=_last_step(stats, replica.clock()),
        adapters=tuple(loaded.adapters.infos()) if loaded else (),
        quantization=facts.quantization if facts else "",
        warnings=facts.warnings if facts else (),
    )


def _tiers(device: BlockCounts, facts: EngineFacts | None, stats: EngineStats) -> dict[str, BlockCounts]:
    """KV block counts by memory tier; no block in host memory is live."""
    if facts is None:
        return {}
    if not facts.host_blocks:
        return {"device": device}
    cached, total = stats.host_blocks, facts.host_blocks
    return {"device": device, "host": BlockCounts(total=total, live=0, cached=cached, free=total - cached)}


def _last_step(stats: EngineStats, now: float) -> LastStep | None:
    batch = stats.last_batch
    if batch is None:
        return None
    ago = max(now - batch.at, 0.0)
    return LastStep(rows=batch.rows, tokens=batch.tokens, seconds=round(batch.seconds, 6), seconds_ago=round(ago, 3))


async def serve_control(replica: Replica, directory: Path) -> asyncio.Server | None:
    """Listen on `drain.sock`; None where the socket cannot be created, as without a run directory on a laptop."""
    path = directory / "drain.sock"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            raw = await reader.readline()
            asked: dict[str, Any] = json.loads(raw) if raw.strip() else {}
            seconds = asked.get("timeoutSeconds")
            replica.drain(
                float(seconds) if seconds is not None else None,
                "asked from inside the pod",
                refuse_after_seconds=float(asked.get("refuseAfterSeconds", 0)),
            )
            await replica.drained()
            writer.write(replica.drain_status().wire() + b"\n")
            await writer.drain()
        except (ValueError, ConnectionError) as error:
            log.warning("drain socket", error=type(error).__name__)
        finally:
            writer.close()

    return await _listen(path, answer)


async def _listen(
    path: Path, answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> asyncio.Server | None:
    try:
        _remove_stale_socket(path)
        server = await asyncio.start_unix_server(answer, path)
    except OSError as error:
        log.info("no drain socket", path=str(path), error=error.strerror)
        return None
    return server


def _remove_stale_socket(path: Path) -> None:
    path.unlink(missing_ok=True)  # left by a killed process
