"""A fake API server with history, watches and faults, for tests of everything that talks to Kubernetes.

    async with FakeApiServer() as server:                      # real sockets on 127.0.0.1
        async with Client(server.connection) as client: ...

    server = FakeApiServer()                                   # no sockets: fits virtual time
    client = server.client()                                   # a real `Client`, minus the network

Play user, kubelet and time:
    server.put(PODS, {...})                 create or replace all of an object, status included
    server.patch_status(PODS, ns, name, {}) merge into its status, as a kubelet does
    server.delete(PODS, ns, name)           as kubectl does: grace, finalizers
    server.finish_pod(ns, name)             the kubelet has stopped a terminating pod: it goes
    server.collect_garbage()                objects whose owner is gone go too
    server.get / server.objects             what is there now

Make it misbehave:
    server.fail(method="POST", path="/pods", status=409)       the next such request is refused, nothing happens
    server.fail(method="POST", lose_reply=True)                it happens, and the connection breaks before the reply
    server.fail(method="PATCH", hang=True, commit=True)        it happens, and the reply never comes
    server.fail(..., times=3, skip=2)                          after two good ones, three bad ones
    server.down = True                      every connection breaks, watches included, until False
    server.drop_watches()                   open watches break off
    server.stall_watches()                  open watches stay open and tell nothing more (half-open connections)
    server.repeat(n)                        open watches get their last n events once more
    server.bookmark()                       open watches get a bookmark
    server.compact()                        history is gone: an older version answers 410
    server.forget(PODS, ns, name)           deleted without an event: only a list can tell

What it saw:
    server.requests                         every request; `server.writes()` for those that are no reads
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
from aiohttp import web

from slipway_kube.auth import Connection, StaticCredentials
from slipway_kube.client import APPLY_PATCH, JSON_PATCH
from slipway_kube.resources import PODS, Resource
from tests import fake_apply
from tests.fake_apply import FailedTest
from tests.fake_client import InProcessClient
from tests.fake_requests import Answer, Dropped, Fault, Request, Route, kind_of, matcher, refusal, route_of, watch_line
from tests.fake_store import Object, Refused, Store


@dataclass(eq=False)
class _Watch:
    """One open watch."""

    kind: str
    version: int  # the lines up to here were sent, or are of other kinds
    news: asyncio.Event = field(default_factory=asyncio.Event)
    sent: list[bytes] = field(default_factory=list)
    extra: list[bytes] = field(default_factory=list)  # to send out of turn
    dropped: bool = False
    stalled: bool = False
    wants_bookmark: bool = False


BOOKMARK_SECONDS = 60.0  # as the real one, more or less
Matcher = Callable[[Object], bool]


class FakeApiServer:
    """See the top of this file."""

    def __init__(self, store: Store | None = None) -> None:
        self.store = store or Store()
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.url = ""
        self._down = False
        self._watches: set[_Watch] = set()
        self._told_version = 0
        self._collected = 0  # version of the store when garbage was last collected
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        application = web.Application(client_max_size=16 * 1024**2)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        self.drop_watches()
        await self._runner.cleanup()

    @property
    def connection(self) -> Connection:
        return Connection(self.url, StaticCredentials())

    def client(self) -> InProcessClient:
        """A client without sockets, for virtual time."""
        return InProcessClient(self)

    # Playing user, kubelet and time

    def put(self, resource: Resource, body: Object) -> Object:
        whole = {"apiVersion": resource.api_version, "kind": resource.kind} | body
        return self._told(self.store.put(kind_of(resource), whole))

    def patch_status(self, resource: Resource, namespace: str, name: str, status: Object) -> Object:
        change = {"status": status}
        merged = self.store.update(
            kind_of(resource), (namespace, name), lambda old: fake_apply.merge_patch(old, change), subresource="status"
        )
        return self._told(merged)

    def delete(self, resource: Resource, namespace: str, name: str, *, grace: int | None = None) -> None:
        self._told(self.store.delete(kind_of(resource), (namespace, name), grace=grace))

    def finish_pod(self, namespace: str, name: str) -> None:
        self.delete(PODS, namespace, name, grace=0)

    def collect_garbage(self) -> None:
        if self._collected == self.store.version:
            return  # nothing has changed since; kubelets of tests call this ten times a second
        self._collected = self.store.version
        alive = {one["metadata"]["uid"] for kind in self.store.kinds() for one in self.store.all(kind)}
        for kind in self.store.kinds():
            for one in self.store.all(kind):
                owners = one["metadata"].get("ownerReferences") or []
                if owners and not any(owner["uid"] in alive for owner in owners):
                    self.store.delete(kind, (one["metadata"].get("namespace", ""), one["metadata"]["name"]))
        self._tell()

    def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        where = (namespace, name)
        return self.store.get(kind_of(resource), where) if self.store.exists(kind_of(resource), where) else None

    def objects(self, resource: Resource, namespace: str = "") -> list[Object]:
        return self.store.all(kind_of(resource), namespace)

    # Misbehaving

    def fail(self, **fault: Any) -> Fault:
        self.faults.append(Fault(**fault))
        return self.faults[-1]

    @property
    def down(self) -> bool:
        return self._down

    @down.setter
    def down(self, down: bool) -> None:
        self._down = down
        if down:
            self.drop_watches()

    def drop_watches(self) -> None:
        for watch in self._watches:
            watch.dropped = True
            watch.news.set()

    def stall_watches(self) -> None:
        for watch in self._watches:
            watch.stalled = True

    def repeat(self, count: int = 1) -> None:
        for watch in self._watches:
            watch.extra += watch.sent[-count:]
            watch.news.set()

    def bookmark(self) -> None:
        for watch in self._watches:
            watch.wants_bookmark = True
            watch.news.set()

    async def watched(self, count: int = 1) -> None:
        """Return when so many watches are open."""
        while len(self._watches) < count:  # noqa: ASYNC110  rare, and simpler than one more event
            await asyncio.sleep(0.005)

    def compact(self) -> None:
        self.store.compact()

    def forget(self, resource: Resource, namespace: str, name: str) -> None:
        self.store.forget(kind_of(resource), (namespace, name))

    # What it saw

    def writes(self) -> list[Request]:
        return [request for request in self.requests if request.method != "GET"]

    @property
    def open_watches(self) -> int:
        return len(self._watches)

    # Serving

    async def answer(self, request: Request) -> Answer:
        """The reply to anything but a watch; `Dropped` when none comes."""
        self.requests.append(request)
        if self._down:
            raise Dropped
        fault = next((fault for fault in self.faults if fault.strikes(request)), None)
        if fault is None:
            return self._reply(request)
        if fault.status:
            refused = Refused(fault.status, fault.message, fault.reason, retry_after=fault.retry_after)
            return refusal(refused)
        if fault.lose_reply or fault.commit:
            self._reply(request)
        if fault.hang:
            await asyncio.Event().wait()
        raise Dropped

    async def watch(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Lines of a watch; `Refused` before the first one, `Dropped` in the middle."""
        self.requests.append(request)
        if self._down:
            raise Dropped
        fault = next((fault for fault in self.faults if fault.strikes(request)), None)
        if fault is not None and fault.status:
            raise Refused(fault.status, fault.message, fault.reason, retry_after=fault.retry_after)
        if fault is not None:
            raise Dropped
        route = route_of(request.path)
        matches = matcher(request.params)
        version = int(request.params.get("resourceVersion") or self.store.version)
        loop = asyncio.get_running_loop()
        ends = loop.time() + float(request.params.get("timeoutSeconds") or 3600)
        bookmark_at = loop.time() + BOOKMARK_SECONDS  # also of a watch that others' news wake, and never its own
        this = _Watch(route.kind, version)
        this.news.set()
        self._watches.add(this)
        try:
            while not this.dropped:
                this.news.clear()
                if this.version < self.store.compacted:
                    yield watch_line("ERROR", msgspec.json.decode(refusal(_too_old()).body))
                    return
                if not this.stalled:
                    told = self.store.version  # what is written while these lines are read comes with the next ones
                    for line in self._news_for(this, route, matches):
                        yield line
                    this.version = max(this.version, told)
                try:
                    async with asyncio.timeout_at(min(ends, bookmark_at)):
                        await this.news.wait()
                except TimeoutError:
                    if loop.time() >= ends:
                        return
                if loop.time() >= bookmark_at:
                    this.wants_bookmark, bookmark_at = True, loop.time() + BOOKMARK_SECONDS
            raise Dropped
        finally:
            self._watches.discard(this)

    def _news_for(self, this: _Watch, route: Route, matches: Matcher) -> list[bytes]:
        lines, this.extra = this.extra, []
        for _, kind, one in self.store.events_after(this.version, route.kind, route.namespace, matches):
            lines.append(watch_line(kind, one))
            this.sent.append(lines[-1])
        if this.wants_bookmark:
            this.wants_bookmark = False
            lines.append(watch_line("BOOKMARK", {"metadata": {"resourceVersion": str(self.store.version)}}))
        return lines

    def _reply(self, request: Request) -> Answer:
        try:
            body, status = self._do(request)
        except Refused as refused:
            return refusal(refused)
        self._tell()
        return Answer(status, msgspec.json.encode(body))

    def _do(self, request: Request) -> tuple[Object, int]:
        if request.path == "/version":
            return {"major": "1", "minor": "36", "gitVersion": "v1.36.0-fake"}, 200
        route = route_of(request.path)
        where, dry_run = (route.namespace, route.name), request.params.get("dryRun") == "All"
        body, params = request.body, request.params
        match request.method:
            case "GET" if route.name:
                return self.store.get(route.kind, where), 200
            case "GET":
                limit = int(params.get("limit") or 0)
                page = self.store.page(route.kind, route.namespace, matcher(params), limit, params.get("continue", ""))
                return {"apiVersion": route.api_version, "kind": "List"} | page, 200
            case "POST" if route.subresource == "eviction":
                return self.store.delete(route.kind, where, dry_run=dry_run), 201
            case "POST":
                return self.store.create(route.kind, route.namespace, body, dry_run=dry_run), 201
            case "PUT":
                new = self.store.update(
                    route.kind, where, lambda _: body, subresource=route.subresource, dry_run=dry_run
                )
                return new, 200
            case "DELETE":
                options = body or {}
                dry_run = options.get("dryRun") == ["All"] if body else dry_run  # a body outweighs the query
                uid = options.get("preconditions", {}).get("uid", "")
                version = options.get("preconditions", {}).get("resourceVersion", "")
                grace = options.get("gracePeriodSeconds")
                return self.store.delete(route.kind, where, uid=uid, version=version, grace=grace, dry_run=dry_run), 200
            case "PATCH":
                return self._patch(request, route, dry_run=dry_run)
        raise Refused(405, "method not allowed", "MethodNotAllowed")

    def _patch(self, request: Request, route: Route, *, dry_run: bool) -> tuple[Object, int]:
        where, body = (route.namespace, route.name), request.body
        if request.content_type == APPLY_PATCH:
            new, created = self.store.apply(
                route.kind,
                where,
                body,
                manager=request.params["fieldManager"],
                force=request.params.get("force") == "true",
                subresource=route.subresource,
                dry_run=dry_run,
            )
            return new, 201 if created else 200

        def change(old: Object) -> Object:
            try:
                if request.content_type == JSON_PATCH:
                    return fake_apply.json_patch(old, body)
                return fake_apply.merge_patch(old, body)  # type: ignore[no-any-return]
            except FailedTest as failed:
                raise Refused(422, f"the server rejected our request: {failed}") from failed

        return self.store.update(route.kind, where, change, subresource=route.subresource, dry_run=dry_run), 200

    def _told(self, one: Object) -> Object:
        self._tell()
        return one

    def _tell(self) -> None:
        """Wake the watches that have something to read. Most replies concern few of the open watches."""
        if self._told_version == self.store.version:
            return
        is_compacted = self._told_version < self.store.compacted  # then nobody knows what has changed
        changed, self._told_version = self.store.kinds_changed_after(self._told_version), self.store.version
        for watch in self._watches:
            if is_compacted or watch.kind in changed:
                watch.news.set()
            elif not watch.stalled and not watch.news.is_set():
                watch.version = self.store.version

    # HTTP

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        seen = Request(
            request.method,
            request.raw_path.split("?")[0],
            dict(request.query),
            msgspec.json.decode(body) if body else None,
            request.content_type if body else "",
        )
        try:
            if seen.params.get("watch") == "true":
                return await self._stream(request, seen)
            answer = await self.answer(seen)
        except Dropped:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return _response(answer)

    async def _stream(self, request: web.Request, seen: Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        lines = self.watch(seen)
        # The head goes out at once, as the real one's does, although the first line may be minutes away.
        first = asyncio.ensure_future(anext(lines, None))
        try:
            await asyncio.sleep(0)
            if first.done() and isinstance(first.exception(), Refused):
                return _response(refusal(first.exception()))  # type: ignore[arg-type]
            await response.prepare(request)
            line = await first
            while line is not None:
                await response.write(line)
                line = await anext(lines, None)
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await lines.aclose()
        return response


def _response(answer: Answer) -> web.Response:
    headers = {} if answer.retry_after is None else {"Retry-After": str(answer.retry_after)}
    return web.Response(status=answer.status, body=answer.body, content_type="application/json", headers=headers)


def _too_old() -> Refused:
    return Refused(410, "too old resource version", "Expired")
