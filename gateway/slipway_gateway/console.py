"""The console on the admin port: one page, and the data that it polls. Read-only, but for the chat that a user starts.

The page and its files contain no data and need no token. Data and chat need the token of the admin port. The chat goes
through the same pipeline as a client's request, with the API key that its user types in, and its text is not kept.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from slipway_api import names
from slipway_api.pod_labels import read_state
from slipway_gateway.fleet import Fleet
from slipway_gateway.front_door import defer_continue
from slipway_gateway.kinds import ConditionFacts, InferenceService
from slipway_gateway.picker.endpoints import Endpoint
from slipway_gateway.requests import Requests
from slipway_gateway.watch import Watch

PATH_CONSOLE: Final = "/console"
PATH_DATA: Final = "/console/data"
PATH_CHAT: Final = "/v1/chat/completions"  # the path of the serving port, which is also the path at the replica
PAGE: Final = Path(__file__).parent / "console_page"
FILES: Final = {"console.css": "text/css", "console.js": "text/javascript"}
MOST_REQUESTS: Final = 25
MOST_EVENTS: Final = 40
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Console:
    """Serves the page, its data and its chat."""

    def __init__(self, fleet: Fleet, requests: Requests, *, gateway: str = "") -> None:
        self._fleet = fleet
        self._requests = requests
        self._gateway = gateway
        self.watch: Watch | None = None  # None: without Kubernetes only the routing table is shown

    def add_routes(self, app: web.Application, with_token: Callable[[Handler], Handler]) -> None:
        """Add the console's routes to the admin port."""
        app.router.add_get(PATH_CONSOLE, self._file("index.html", "text/html"))
        for name, kind in FILES.items():
            app.router.add_get(f"{PATH_CONSOLE}/{name}", self._file(name, kind))
        app.router.add_get(PATH_DATA, with_token(self._data))
        app.router.add_post(PATH_CHAT, with_token(self._chat), expect_handler=defer_continue)

    @staticmethod
    def _file(name: str, kind: str) -> Handler:
        text = (PAGE / name).read_text()

        async def answer(request: web.Request) -> web.Response:
            return web.Response(text=text, content_type=kind, charset="utf-8", headers=HEADERS)

        return answer

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        # Browsers send this header; another site's page must not spend what an open gateway gives to anyone.
        if request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
            error = "Only the console's own page may chat here. Send other requests to the serving port."
            return web.json_response({"error": {"message": error}}, status=403)
        return await self._requests.handle(request)

    async def _data(self, request: web.Request) -> web.Response:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        view = self._fleet.view()
        services = [self._service(name, key) for name, key in self._named_services()]
        body = {
            "now": now,
            "gateway": self._gateway,
            "synced": view.synced,
            "viewAgeSeconds": round(view.age_seconds, 1) if view.synced else None,
            "openToAnyone": self._requests.tenancy.is_open,
            "openRequests": self._requests.open,
            "endedRequests": self._requests.access_log.recent.total,
            "services": services,
            "adapters": self._adapters(),
            "pools": self._pools(),
            "events": _events(self._objects()),
            "requests": self._requests.access_log.recent.newest(MOST_REQUESTS),
        }
        return web.json_response(body, headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"})

    def _named_services(self) -> Iterable[tuple[str, str]]:
        return ((name, route.service.key) for name, route in self._fleet.table.served_models())

    def _objects(self) -> Mapping[str, InferenceService]:
        """The InferenceServices by key."""
        if self.watch is None:
            return {}
        return {f"{namespace}/{name}": one for (namespace, name), one in self.watch.services.cache.items()}

    def _service(self, name: str, key: str) -> dict[str, Any]:
        route, namespace, own_name = self._fleet.table.route(key), *key.split("/", 1)
        service, watch = route.service, self.watch
        found = watch.services.get(namespace, own_name) if watch is not None else None
        queued = dict(zip((one.name for one in route.endpoints), self._fleet.waiting(key), strict=False))
        body: dict[str, Any] = {
            "service": key,
            "model": name,
            "desired": found.status.desired_replicas if found is not None else None,
            "stalled": service.stalled,
            "suspended": service.is_suspended,
            "held": self._fleet.demand.waiting_by_service().get(key, 0),
            "replicas": [{**self._replica(one), "queued": queued.get(one.name, 0)} for one in route.ready],
            "revisions": [{"hash": hash, "weight": weight} for hash, weight in service.weights.items()],
        }
        if found is not None:
            status, autoscaling = found.status, found.status.autoscaling or {}
            roles = {status.update_revision: "new", status.current_revision: "stable"}
            for revision in body["revisions"]:
                revision["role"] = roles.get(revision["hash"], "old")
            body["rollout"] = {
                "isRunning": bool(status.current_revision) and status.update_revision != status.current_revision,
                "step": status.canary.step,
                "weight": status.canary.weight,
                "gate": status.canary.gate,
                "failures": status.canary.failures,
                "metrics": status.canary.metrics,
                "failed": status.failed_revision,
            }
            body["conditions"] = [
                {"type": one.type, "status": one.status, "reason": one.reason, "message": one.message}
                for one in status.conditions
            ]
            body["templates"] = [{"name": one.name, "blocks": list(one.blocks)} for one in status.templates]
            body["recommended"] = autoscaling.get("recommendedReplicas")
            body["signals"] = autoscaling.get("signals") or []
            body["decisions"] = autoscaling.get("history") or []
        return body

    def _replica(self, endpoint: Endpoint) -> dict[str, Any]:
        load, usage = self._fleet.load(endpoint), self._fleet.kv_usage(endpoint)
        return {
            "pod": endpoint.name,
            "revision": endpoint.revision,
            "adapters": sorted(endpoint.adapters),
            "kvUsage": None if usage is None else round(usage, 4),
            "tokens": load.tokens,
            "open": load.requests,
            "ejected": self._fleet.is_ejected(endpoint),
        }

    def _adapters(self) -> list[dict[str, Any]]:
        table = self._fleet.table
        return [
            {
                "adapter": one.key,
                "model": one.name,
                "service": one.service,
                "alias": one.alias,
                "stalled": one.stalled,
                "loaded": len(table.adapter_route(key).endpoints) if one.service in table.services else 0,
            }
            for key, one in sorted(table.adapters.items())
        ]

    def _pools(self) -> list[dict[str, Any]]:
        """The pods of each WarmPool by state; the gateway does not read the pools themselves."""
        counted: dict[str, Counter[str]] = {}
        for pod in self.watch.pods.cache.values() if self.watch is not None else ():
            if pool := pod.labels.get(names.LABEL_POOL, ""):
                state = read_state(pod.labels).value or "unknown"
                counted.setdefault(f"{pod.namespace}/{pool}", Counter())[state] += 1
        return [{"pool": pool, "pods": dict(states)} for pool, states in sorted(counted.items())]


def _events(objects: Mapping[str, InferenceService]) -> list[dict[str, str]]:
    """The last changes of conditions and of numbers of replicas, newest first."""
    found = [_of_condition(key, one) for key, object in objects.items() for one in object.status.conditions]
    for key, object in objects.items():
        for one in (object.status.autoscaling or {}).get("history") or ():
            text = f"replicas: {one.get('from')} → {one.get('to')}; {one.get('reason', '')}"
            found.append({"time": str(one.get("time", "")), "service": key, "event": "Scaled", "text": text})
    return sorted(found, key=lambda event: event["time"], reverse=True)[:MOST_EVENTS]


def _of_condition(key: str, condition: ConditionFacts) -> dict[str, str]:
    event = f"{condition.type}={condition.status}"
    text = f"{condition.reason}: {condition.message}" if condition.message else condition.reason
    return {"time": condition.last_transition_time, "service": key, "event": event, "text": text}
