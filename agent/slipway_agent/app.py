"""The admin port: the same paths, bodies, statuses and token as those of our own runtime (`slipway_api.runtime_api`).

`/ready`, `/health` and `/metrics` are open, because the kubelet and Prometheus have no token.
"""

import asyncio
from dataclasses import dataclass
from typing import Final, TypeVar

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import ValidationError

from slipway_agent import metrics_page
from slipway_agent.adapters import Adapters, Listing
from slipway_agent.engine import EngineError
from slipway_agent.refusal import Refusal, unavailable
from slipway_agent.replica import Replica
from slipway_agent.settings import AgentSettings
from slipway_api import names
from slipway_api.admin_token import token_matches
from slipway_api.runtime_api import (
    AdapterList,
    BlockCounts,
    Body,
    DrainRequest,
    Health,
    LoadAdapterRequest,
    ModelInfo,
    QueueCounts,
    SleepRequest,
    SleepStatus,
    State,
)

log = structlog.get_logger()

MOST_WAIT_SECONDS: Final = 2.0  # of an answer to a startup probe
MOST_BODY_BYTES: Final = 64 * 1024
MOST_OPEN_REQUESTS: Final = 64
MOST_LARGE_ANSWERS: Final = 1  # that is made at a time; others wait: the agent has 60 MB
BODY_SECONDS: Final = 10.0
LARGE_PATHS: Final = frozenset({names.PATH_STATE, names.PATH_ADAPTERS, names.PATH_METRICS, names.PATH_MODEL})
OPEN_PATHS: Final = frozenset({names.PATH_READY, names.PATH_HEALTH, names.PATH_METRICS})

_B = TypeVar("_B", bound=Body)


@dataclass(frozen=True, slots=True)
class AdminPort:
    """The handlers of the port."""

    settings: AgentSettings
    replica: Replica
    adapters: Adapters

    def app(self) -> web.Application:
        """The application."""
        guard = _Guard(self.settings.admin_token_digests).guard
        app = web.Application(middlewares=[guard], client_max_size=MOST_BODY_BYTES)
        app.router.add_get(names.PATH_READY, self.ready)  # HEAD too
        app.router.add_get(names.PATH_HEALTH, self.health)
        app.router.add_get(names.PATH_METRICS, self.metrics)
        app.router.add_get(names.PATH_SIGNALS, self.signals)
        app.router.add_get(names.PATH_STATE, self.state)
        app.router.add_post(names.PATH_DRAIN, self.drain)
        app.router.add_post(names.PATH_UNDRAIN, self.undrain)
        app.router.add_get(names.PATH_ADAPTERS, self.list_adapters)
        app.router.add_post(names.PATH_ADAPTERS, self.load_adapter)
        app.router.add_delete(names.PATH_ADAPTERS + "/{name}", self.unload_adapter)
        app.router.add_get(names.PATH_MODEL, self.model)
        app.router.add_post(names.PATH_MODEL, self.other_model)
        app.router.add_delete(names.PATH_MODEL, self.other_model)
        app.router.add_post(names.PATH_SLEEP, self.sleep)
        app.router.add_post(names.PATH_WAKE_UP, self.wake_up)
        return app

    async def ready(self, http: web.Request) -> web.Response:
        """200 where the replica takes new requests, else 503."""
        try:
            seconds = float(http.query.get(names.PARAMETER_WAIT, "0"))
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds <= MOST_WAIT_SECONDS:
            raise Refusal(400, f"{names.PARAMETER_WAIT} is between 0 and {MOST_WAIT_SECONDS:g} seconds")
        await self.replica.wait_until_started(seconds)
        body = self.replica.ready()
        return _wire(body, 200 if body.ready else 503)

    async def health(self, _: web.Request) -> web.Response:
        """200: the agent answers. A restart of it would not help the engine, whose container has its own probe."""
        return _wire(Health(healthy=True))

    async def metrics(self, _: web.Request) -> web.Response:
        """The metrics of the dialect, under the names of our runtime."""
        replica, metrics = self.replica, self.replica.dialect.metrics
        seconds = replica.dialect.probe.timeout_seconds
        try:
            page = await replica.engine.page(metrics.path, metrics_page.all_names(metrics), seconds=seconds)
        except EngineError as error:
            raise unavailable(error) from None
        body = metrics_page.render(page, metrics, self.settings.served_name)
        return web.Response(body=body, headers={"Content-Type": metrics_page.CONTENT_TYPE})

    async def signals(self, _: web.Request) -> web.Response:
        """The load signals; 503 where the engine's metrics cannot be read."""
        return _wire(await self.replica.signals())

    async def state(self, _: web.Request) -> web.Response:
        """The full state; 503 if the engine does not answer."""
        replica = self.replica
        started = replica.ready().reason
        try:
            now, listing = await replica.readings(), await self.adapters.listing()
        except EngineError as error:
            raise unavailable(error) from None
        longest = _max_model_len(listing, replica.dialect.models.max_model_len_field)
        live = min(now.blocks, round(now.kv_usage * now.blocks))
        fitting = now.blocks // -(-longest // now.block_size) if longest and now.block_size else 0
        log.debug("state", reason=started.value)
        body = State(
            boot_id=replica.boot_id,
            model_name=self._name(listing),
            revision=self.settings.revision,
            uptime_seconds=replica.uptime_seconds,
            block_size=now.block_size,
            max_model_len=longest,
            max_num_seqs=self.settings.max_num_seqs or fitting,
            # No engine reports its cached blocks: they count as free, because they are freed on demand.
            blocks=BlockCounts(total=now.blocks, live=live, cached=0, free=now.blocks - live),
            queue=QueueCounts(running=now.running, waiting=now.waiting),
            draining=replica.draining,
            adapters=tuple(await self.adapters.infos()),
        )
        return _wire(body)

    async def drain(self, http: web.Request) -> web.Response:
        """Begin a drain; its progress, or 503 where nothing can be counted: it has begun all the same."""
        shape = '{"timeoutSeconds": …, "refuseAfterSeconds": …, "reason": …}'
        asked = await _asked(http, DrainRequest, shape, or_empty=True)
        return _wire(await self.replica.drain(refuse_after_seconds=asked.refuse_after_seconds, reason=asked.reason))

    async def undrain(self, _: web.Request) -> web.Response:
        """End a drain."""
        return _wire(await self.replica.undrain())

    async def list_adapters(self, _: web.Request) -> web.Response:
        """All adapters, including failed ones."""
        starting = not self.replica.is_started
        infos = [] if starting else await self.adapters.infos()
        most = self.adapters.most
        listing = AdapterList(
            boot_id=self.replica.boot_id, adapters=tuple(infos), max_adapters=most, max_cpu_adapters=most
        )
        return _wire(listing)

    async def load_adapter(self, http: web.Request) -> web.Response:
        """Load an adapter: 200 when loaded, 202 while it loads."""
        asked = await _asked(http, LoadAdapterRequest, '{"name": …, "uri": …, "digest": …, "pinned": …}')
        if not self.replica.is_started:
            raise Refusal(503, self.replica.ready().message)
        info, is_over = await self.adapters.load(asked)
        return _wire(info, 200 if is_over else 202)

    async def unload_adapter(self, http: web.Request) -> web.Response:
        """Unload an adapter: 200 when it is gone or unknown, 202 while that takes time."""
        if not self.replica.is_started:
            raise Refusal(503, self.replica.ready().message)
        is_gone = await self.adapters.unload(http.match_info["name"])
        return web.Response(status=200 if is_gone else 202)

    async def model(self, _: web.Request) -> web.Response:
        """The model of the engine."""
        if not self.replica.is_started:
            return _wire(ModelInfo(served_name=self.settings.served_name, revision=self.settings.revision))
        try:
            listing = await self.adapters.listing()
        except EngineError as error:
            raise unavailable(error) from None
        source = listing.model.get(self.replica.dialect.models.source_field)
        info = ModelInfo(
            uri=source if isinstance(source, str) else "",
            served_name=self._name(listing),
            revision=self.settings.revision,
            loaded=bool(listing.model),
        )
        return _wire(info)

    async def other_model(self, _: web.Request) -> web.Response:
        """A foreign engine serves the model that it was started with."""
        raise Refusal(
            409, f"{self.replica.dialect.engine} serves the model that it was started with until the pod ends"
        )

    async def sleep(self, http: web.Request) -> web.Response:
        """Free the device's memory; only without open requests."""
        asked = await _asked(http, SleepRequest, '{"level": 1 or 2}', or_empty=True)
        await self.replica.sleep(asked.level)
        return _wire(SleepStatus(sleeping=True, level=asked.level))

    async def wake_up(self, _: web.Request) -> web.Response:
        """End a sleep."""
        await self.replica.wake_up()
        return _wire(SleepStatus(sleeping=False))

    def _name(self, listing: Listing) -> str:
        return self.settings.served_name or str(listing.model.get("id", ""))


class _Guard:
    """Refuses strangers and floods, and turns refusals into error bodies."""

    def __init__(self, digests: tuple[str, ...]) -> None:
        self._digests = digests
        self._open = 0
        self._large = asyncio.Semaphore(MOST_LARGE_ANSWERS)

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Middleware."""
        try:
            return await self._guarded(request, handler)
        except Refusal as refusal:
            response = web.Response(status=refusal.status, body=refusal.body(), content_type="application/json")
            if refusal.status == 503:
                response.headers["Retry-After"] = "1"
            if refusal.status in (401, 408, 413):
                response.force_close()  # or the rest of the body would be read
            return response

    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        is_open = request.path in OPEN_PATHS
        if not is_open and self._digests and not token_matches(_token(request), self._digests):
            raise Refusal(401, f"the header {names.HEADER_ADMIN_TOKEN} is missing or wrong")
        if self._open >= MOST_OPEN_REQUESTS:
            raise Refusal(503, f"too many requests are open: the limit is {MOST_OPEN_REQUESTS}")
        self._open += 1
        try:
            if request.path in LARGE_PATHS and request.method == "GET":
                async with self._large:
                    return await _answered(request, handler)
            return await _answered(request, handler)
        finally:
            self._open -= 1


async def _answered(http: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(http)
    except web.HTTPException as error:
        raise Refusal(error.status, error.reason) from None
    except (Refusal, asyncio.CancelledError):
        raise
    except Exception as error:  # noqa: BLE001  its text may hold what an engine answered
        log.error("request", path=http.path[:100], error=type(error).__name__)
        raise Refusal(500, "the agent failed") from None


def _token(http: web.Request) -> str:
    return http.headers.get(names.HEADER_ADMIN_TOKEN, "")


def _wire(body: Body, status: int = 200) -> web.Response:
    return web.Response(body=body.wire(), status=status, content_type="application/json")


async def _asked(http: web.Request, kind: type[_B], shape: str, *, or_empty: bool = False) -> _B:
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in http.content.iter_chunked(2**14):
                raw += chunk
                if len(raw) > MOST_BODY_BYTES:
                    raise Refusal(413, f"the body is larger than {MOST_BODY_BYTES} bytes")
    except TimeoutError:
        raise Refusal(408, f"the body took longer than {BODY_SECONDS:g} s") from None
    try:
        return kind.model_validate_json(bytes(raw) if raw.strip() or not or_empty else b"{}")
    except ValidationError:
        raise Refusal(400, f"the body is {shape}{', or empty' if or_empty else ''}") from None


def _max_model_len(listing: Listing, field: str) -> int:
    value = listing.model.get(field)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31 else 0
