"""The gateway's two applications: the OpenAI API for clients, and the admin port for probes, metrics and debugging."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from aiohttp import web

from slipway_api.admin_token import token_digest, token_matches
from slipway_api.anthropic_models import anthropic_model, anthropic_model_list, asks_as_anthropic
from slipway_api.names import (
    HEADER_ADMIN_TOKEN,
    PARAMETER_ID,
    PATH_DEMAND,
    PATH_HEALTH,
    PATH_METRICS,
    PATH_OUTCOMES,
    PATH_READY,
    PATH_REQUESTS,
    RERANK_PATHS,
    SCORE_PATHS,
)
from slipway_api.recent_requests import INVALID_ID, REQUEST_ID
from slipway_api.words import count
from slipway_gateway.apis import COUNTING_PATHS, GENERATING_PATHS, refusal_response
from slipway_gateway.console import Console
from slipway_gateway.errors import Refusal, not_synced, unknown_model, unknown_path, wrong_method
from slipway_gateway.fleet import Fleet
from slipway_gateway.front_door import defer_continue, refuse_by_headers
from slipway_gateway.metrics import Metrics
from slipway_gateway.operator_api import OperatorApi
from slipway_gateway.picker.endpoints import Endpoint, Route
from slipway_gateway.request_body import request_id
from slipway_gateway.requests import Requests
from slipway_gateway.tenancy import Tenancy

# An allow-list: whatever else a runtime serves, it does not serve it to the world through us.
SERVING_PATHS: Final = (
    *GENERATING_PATHS, *COUNTING_PATHS, "/v1/embeddings", *SCORE_PATHS, *RERANK_PATHS, "/tokenize", "/detokenize"
)  # fmt: skip
MODELS_PATH: Final = "/v1/models"
PATH_ROUTES: Final = "/debug/routes"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_WARNING: Final = "No API keys are configured: anyone who can reach this gateway may call every model."


def client_app(
    fleet: Fleet,
    requests: Requests,
    *,
    routes_known: asyncio.Event,
    more: Callable[[web.Application], None] = lambda _: None,
) -> web.Application:
    """The application for clients; requests wait for `routes_known`. `more` adds the batch API where that is on."""

    @web.middleware
    async def await_routes(request: web.Request, handler: Handler) -> web.StreamResponse:
        # Kubernetes may send requests to a container that has just restarted. The wait is short (see `startup`).
        if not routes_known.is_set():
            await routes_known.wait()
        return await handler(request)

    @web.middleware
    async def answer_refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refusal as refusal:
            return refusal_response(refusal, request.path, request_id(request), request.headers)
        except web.HTTPNotFound:  # a target that is no path, as of CONNECT
            return refusal_response(unknown_path(request.path), request.path, request_id(request))

    async def models(request: web.Request) -> web.StreamResponse:
        if not fleet.view().synced:
            raise not_synced()
        table = fleet.table
        with requests.tenancy.admit_query(request) as caller:
            may_use = caller.tenant.may_use
            named = (*table.served_models(may_use), *table.served_adapters(may_use))
            served = [_model(name, route) for name, route in named]
        if asks_as_anthropic(request.headers):
            return web.json_response(anthropic_model_list(served))
        return web.json_response({"object": "list", "data": served})

    async def model(request: web.Request) -> web.StreamResponse:
        if not fleet.view().synced:
            raise not_synced()
        name = request.match_info["model"]
        with requests.tenancy.admit_query(request) as caller:
            route = fleet.table.resolve(name, may_use=caller.tenant.may_use)
        if route is None:
            raise unknown_model(name)
        found = _model(name, route)
        return web.json_response(anthropic_model(found) if asks_as_anthropic(request.headers) else found)

    async def reject_path(request: web.Request) -> web.StreamResponse:
        if request.path in (*SERVING_PATHS, MODELS_PATH):
            raise wrong_method(request.method, request.path)
        raise unknown_path(request.path)

    app = web.Application(middlewares=[answer_refusals, refuse_by_headers, await_routes])
    for path in SERVING_PATHS:
        app.router.add_post(path, requests.handle, expect_handler=defer_continue)
    app.router.add_get(MODELS_PATH, models, expect_handler=defer_continue)
    app.router.add_get(MODELS_PATH + "/", models, expect_handler=defer_continue)
    app.router.add_get(MODELS_PATH + "/{model:.+}", model, expect_handler=defer_continue)
    more(app)
    app.router.add_route("*", "/{path:.*}", reject_path, expect_handler=defer_continue)
    return app


class Admin:
    """The admin port. What names services needs one of the pod's tokens."""

    def __init__(
        self,
        fleet: Fleet,
        requests: Requests,
        metrics: Metrics,
        *,
        tokens: Callable[[], Sequence[str]] | None,
        tenancy: Tenancy,
        gateway: str = "",
    ) -> None:
        """`tokens` are read anew for every request, because they rotate; None: no token is needed."""
        self._fleet = fleet
        self._requests = requests
        self._metrics = metrics
        self._operator_api = OperatorApi(fleet, requests.outcomes)
        self._tokens = tokens
        self._tenancy = tenancy
        self.console = Console(fleet, requests, gateway=gateway)
        self._leaving = False

    def leave(self) -> None:
        """From now on `/ready` is 503, so that load balancers send no new client here."""
        self._leaving = True

    def app(self) -> web.Application:
        """The routes."""

        @web.middleware
        async def answer_refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
            try:
                return await handler(request)
            except Refusal as refusal:
                return refusal.response()

        app = web.Application(middlewares=[answer_refusals, refuse_by_headers])
        app.router.add_get(PATH_READY, self._ready)
        app.router.add_get(PATH_HEALTH, self._health)
        app.router.add_get(PATH_METRICS, self._metrics_page)
        app.router.add_get(PATH_ROUTES, self._with_token(self._routes))
        app.router.add_get(PATH_REQUESTS, self._with_token(self._request))
        self.console.add_routes(app, self._with_token)
        app.router.add_get(PATH_DEMAND, self._with_token(self._operator_api.demand))
        app.router.add_get(PATH_OUTCOMES, self._with_token(self._operator_api.outcomes))
        return app

    def _with_token(self, answer: Handler) -> Handler:
        """The handler, for requests with one of the pod's tokens."""

        async def check(request: web.Request) -> web.StreamResponse:
            if self._tokens is not None:
                digests = [token_digest(token) for token in self._tokens()]
                if not token_matches(request.headers.get(HEADER_ADMIN_TOKEN, ""), digests):
                    error = f"the gateway pod's token in {HEADER_ADMIN_TOKEN} opens this"
                    return web.json_response({"error": error}, status=401)
            return await answer(request)

        return check

    async def _ready(self, request: web.Request) -> web.Response:
        """Ready once everything was listed; a later outage of the API server does not make it unready."""
        view = self._fleet.view()
        if self._leaving:
            reason, message = "ShuttingDown", f"{count(self._requests.open, 'request is', 'requests are')} finishing"
        elif not view.synced:
            reason, message = "Syncing", "Pods and InferenceServices have not been listed yet"
            message += f": {view.refusal}" if view.refusal else ""
        elif not self._tenancy.is_usable:
            reason, message = "TenantsInvalid", self._tenancy.fault
        else:
            reason, message = "Ready", f"{count(len(self._fleet.table), 'service is', 'services are')} routed"
            if view.from_snapshot:
                message += f", as they were {view.age_seconds:.0f} s ago, because the API server does not answer"
            if view.refusal:
                message += f"; {view.refusal}"
        body = {
            "ready": reason == "Ready",
            "reason": reason,
            "message": message,
            "fromSnapshot": view.from_snapshot,
            "openToAnyone": self._tenancy.is_open,
            "warning": OPEN_WARNING if self._tenancy.is_open else self._tenancy.fault,
        }
        return web.json_response(body, status=200 if reason == "Ready" else 503)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"healthy": True})

    async def _metrics_page(self, request: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.exposition(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def _routes(self, request: web.Request) -> web.Response:
        view = self._fleet.view()
        body = {"viewAgeSeconds": view.age_seconds, "fromSnapshot": view.from_snapshot, "services": self._services()}
        return web.json_response(body)

    async def _request(self, request: web.Request) -> web.Response:
        """The accounts of the requests with one id; none if this process has none."""
        given = request.query.get(PARAMETER_ID, "")
        if not REQUEST_ID.fullmatch(given):
            return web.json_response({"error": INVALID_ID}, status=400)
        return web.json_response({"requests": self._requests.find(given)})

    def _services(self) -> list[dict[str, Any]]:
        return [
            {
                "service": route.service.key,
                "model": name,
                "weights": dict(route.service.weights),
                "endpoints": [self._endpoint(endpoint) for endpoint in route.ready],
            }
            for name, route in self._fleet.table.served_models()
        ]

    def _endpoint(self, endpoint: Endpoint) -> dict[str, Any]:
        load = self._fleet.load(endpoint)
        return {
            "pod": endpoint.name,
            "revision": endpoint.revision,
            "servedName": endpoint.served_name,
            "adapters": sorted(endpoint.adapters),
            "url": endpoint.url,
            "outstandingTokens": load.tokens,
            "openRequests": load.requests,
            "ejected": self._fleet.is_ejected(endpoint),
            "slow": self._fleet.is_slow(endpoint),
        }


def _model(name: str, route: Route) -> dict[str, Any]:
    """One entry of `/v1/models`. A model stays listed while it has no replica: it exists, it is only not ready."""
    created = route.service.created if route.adapter is None else route.adapter.created
    return {
        "id": name,
        "object": "model",
        "created": int(created.timestamp()) if created else 0,
        "owned_by": "slipway",
        "root": route.name,
        "parent": route.service.served_name if route.adapter is not None else None,
    }
