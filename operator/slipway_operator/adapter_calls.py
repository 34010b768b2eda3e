"""Executes the calls of adapters' plans in the background, and keeps what replicas answered for the next plans.

All of it may be lost: a new leader asks the replicas for their lists, and reads the pods' annotations.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, Final

import msgspec
import structlog

from slipway_api import names
from slipway_api.adapter_conditions import AdapterReason
from slipway_api.lora_adapter import NEXT_VERSION
from slipway_api.runtime_api import AdapterInfo, LoadAdapterRequest
from slipway_api.types import ServiceKey
from slipway_kube.client import Client
from slipway_kube.errors import KubeError, NotFound, StatusError
from slipway_kube.objects import Pod
from slipway_kube.resources import SECRETS
from slipway_kube.writer import Writer
from slipway_operator.adapter_client import AdapterClient, LoadRefused
from slipway_operator.adapter_routes import PodRoutes
from slipway_operator.controller.executor import Perform
from slipway_operator.controller.isolation import BackgroundCalls, FairSlots
from slipway_operator.controller.kinds import Key, StoredObject
from slipway_operator.core.adapter.calls import (
    ListAdapters,
    LoadAdapter,
    ProbeAdapter,
    ReplicaCall,
    RouteAdapter,
    UnloadAdapter,
    UnrouteAdapter,
)
from slipway_operator.core.adapter.observed import Listing, Outcome
from slipway_operator.replica_client import Address, ReplicaError, ReplicaRefused, address_of
from slipway_operator.secrets import CredentialsInvalid, decoded

log = structlog.get_logger()

CALLS, CALLS_OF_A_SERVICE = 128, 16
GATHER_SECONDS: Final = 0.05  # news within so long wake each adapter once
SILENT_SECONDS: Final = 5.0  # a replica that did not answer is not asked again before

OnNews = Callable[[ServiceKey, frozenset[str] | None], None]
"""Called with a service, and the names of the adapters that changed on one of its replicas; None: any of them."""


class AdapterCalls:
    """Performs the actions of `core.adapter.calls`; `listing`, `outcome`, `is_busy` and the like tell the results."""

    def __init__(
        self,
        client: Client,
        writer: Writer,
        adapters: AdapterClient,
        pod_of: Callable[[str, str], Pod | None],
        *,
        is_closed: Callable[[ServiceKey], bool],
        now: Callable[[], datetime],
    ) -> None:
        """`pod_of` finds a cached pod; `is_closed` tells whether a service's replicas require the serving token."""
        self.on_news: OnNews = lambda _service, _adapters: None
        self._client = client
        self._adapters = adapters
        self._pod_of = pod_of
        self._is_closed = is_closed
        self._now = now
        self._calls: BackgroundCalls[ServiceKey] = BackgroundCalls(
            FairSlots(total=CALLS, per_owner=CALLS_OF_A_SERVICE), on_done=lambda _owner, _subject: None
        )
        self._listings: dict[str, Listing] = {}
        self._silent: dict[str, datetime] = {}
        self._listing_now: set[str] = set()
        self._outcomes: defaultdict[str, dict[str, Outcome]] = defaultdict(dict)
        self._probed: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
        self._busy: set[tuple[str, str]] = set()  # (uid of the pod, adapter)
        self._loading: dict[tuple[str, str], tuple[LoadAdapter, datetime]] = {}  # by uid and name on the replica
        self._routes = PodRoutes(writer, pod_of, on_written=self._tell)
        self._news: dict[ServiceKey, set[str] | None] = {}

    @property
    def performers(self) -> Mapping[type, Perform]:
        """By type of action."""
        return {
            ListAdapters: self._list,
            LoadAdapter: self._load,
            ProbeAdapter: self._probe,
            RouteAdapter: partial(self._route, is_routed=True),
            UnrouteAdapter: partial(self._route, is_routed=False),
            UnloadAdapter: self._unload,
        }

    # --- what plans read ----------------------------------------------------------------------------------------------

    def listing(self, uid: str) -> Listing | None:
        """The replica's adapters, as it last told."""
        return self._listings.get(uid)

    def silent_since(self, uid: str) -> datetime | None:
        """Since when the replica has not answered for its list."""
        return self._silent.get(uid)

    def is_listing(self, uid: str) -> bool:
        """Whether its list is asked for, or was a moment ago without an answer."""
        return uid in self._listing_now

    def outcome(self, uid: str, adapter: str) -> Outcome | None:
        """The result of the last load or probe."""
        return self._outcomes[uid].get(adapter) if uid in self._outcomes else None

    def probed(self, uid: str) -> frozenset[tuple[str, str]]:
        """(boot id, digest) that answered a probe."""
        return frozenset(self._probed.get(uid, ()))

    def route_failure(self, uid: str) -> str:
        """Why the annotation by which the gateway routes to this pod could not be written; empty: it could."""
        return self._routes.failure(uid)

    def is_busy(self, uid: str, adapter: str) -> bool:
        """Whether a call about the adapter is under way on the replica, or a write is not in the caches yet."""
        return (uid, adapter) in self._busy or self._routes.is_changing(uid, adapter)

    def forget(self, uid: str) -> None:
        """Forget a replica whose pod is deleted."""
        for known in (self._listings, self._silent, self._outcomes, self._probed):
            known.pop(uid, None)
        self._routes.forget(uid)
        for key in [one for one in self._loading if one[0] == uid]:
            del self._loading[key]

    def _forget_if_gone(self, namespace: str, call: ReplicaCall) -> None:
        """Forget what was learnt of a replica whose pod was deleted meanwhile."""
        pod = self._pod_of(namespace, call.name)
        if pod is None or pod.uid != call.uid:
            self.forget(call.uid)

    async def stop(self) -> None:
        """Cancel what is under way."""
        await self._calls.stop()
        await self._routes.stop()

    # --- actions ------------------------------------------------------------------------------------------------------

    async def _list(self, key: Key, _stored: StoredObject, call: ListAdapters) -> None:
        address, service = self._address(key, call), ServiceKey(key.namespace, call.service)
        if address is None or call.uid in self._listing_now:
            return
        self._listing_now.add(call.uid)

        async def ask() -> None:
            try:
                await self._refresh(address, service, call.uid)
            except ReplicaError as exc:
                self._silent.setdefault(call.uid, self._now())
                log.debug("no list of adapters", replica=address.pod, error=str(exc))
                asyncio.get_running_loop().call_later(SILENT_SECONDS, self._listing_now.discard, call.uid)
            else:
                self._listing_now.discard(call.uid)
            self._forget_if_gone(key.namespace, call)

        self._calls.start(service, f"{call.uid} list", ask)

    async def _refresh(self, address: Address, service: ServiceKey, uid: str) -> None:
        pod = self._pod_of(address.namespace, address.pod)
        answer = await self._adapters.list(address)
        self._silent.pop(uid, None)
        before, now = self._listings.get(uid), self._now()
        after = Listing(
            at=now,
            boot_id=answer.boot_id,
            restarts=_restarts(pod),
            adapters={info.name: info for info in answer.adapters},
            max_adapters=answer.max_adapters,
            max_cpu_adapters=answer.max_cpu_adapters,
        )
        self._listings[uid] = after
        self._finish_loads(uid, after)
        is_new = before is None or (before.boot_id, before.restarts) != (after.boot_id, after.restarts)
        changed = None if is_new or before is None else _changed(before.adapters, after.adapters)
        if changed is None or changed:
            self._tell(service, changed)

    def _finish_loads(self, uid: str, listing: Listing) -> None:
        """Record the outcomes of loads that were still running when they were answered."""
        for (of, name), (call, began) in list(self._loading.items()):
            if of != uid:
                continue
            info = listing.adapters.get(name)
            if info is not None and info.state == "loading":
                continue
            del self._loading[of, name]
            if info is not None and info.state == "failed":
                self._record(call, ok=False, reason=info.reason or AdapterReason.ENGINE_REJECTED, message=info.message)
            elif info is not None:
                self._record(call, ok=True, seconds=(self._now() - began).total_seconds())

    async def _load(self, key: Key, _stored: StoredObject, call: LoadAdapter) -> None:
        async def load(address: Address) -> None:
            began = self._now()
            try:
                credentials = await self._credentials(key.namespace, call.credentials_secret)
                request = LoadAdapterRequest(
                    name=call.load_as,
                    uri=call.uri,
                    digest=call.digest,
                    pinned=call.pinned,
                    version=call.version,
                    credentials=credentials,
                )
                info = await self._adapters.load(address, request)
            except CredentialsInvalid as exc:
                self._record(call, ok=False, reason=AdapterReason.CREDENTIALS_INVALID, message=str(exc))
            except LoadRefused as exc:
                self._record(call, ok=False, reason=exc.reason, message=str(exc))
                await self._look_again(address, key, call)
            except ReplicaError as exc:
                self._record(call, ok=False, message=str(exc))
            else:
                self._learn(call.uid, info)
                if info.state == "loading":
                    self._loading[call.uid, call.load_as] = call, began
                else:
                    self._record(call, ok=True, seconds=(self._now() - began).total_seconds())

        self._start(key, call, call.adapter, load)

    async def _look_again(self, address: Address, key: Key, call: LoadAdapter) -> None:
        with suppress(ReplicaError):  # the next plan asks
            await self._refresh(address, ServiceKey(key.namespace, call.service), call.uid)

    async def _probe(self, key: Key, _stored: StoredObject, call: ProbeAdapter) -> None:
        service = ServiceKey(key.namespace, call.service)

        async def probe(address: Address) -> None:
            try:
                await self._adapters.probe(address, call.service, call.probed_as, is_closed=self._is_closed(service))
            except LoadRefused as exc:
                self._record(call, ok=False, reason=exc.reason, message=str(exc))
            except ReplicaError as exc:
                self._record(call, ok=False, message=str(exc))
            else:
                self._probed[call.uid].add((call.boot_id, call.digest))

        self._start(key, call, call.adapter, probe)

    async def _unload(self, key: Key, _stored: StoredObject, call: UnloadAdapter) -> None:
        async def unload(address: Address) -> None:
            is_gone = await self._adapters.unload(address, call.unloaded_as)
            listing = self._listings.get(call.uid)
            info = listing.adapters.get(call.unloaded_as) if listing is not None else None
            if info is not None:
                self._learn(call.uid, info.model_copy(update={"state": "draining"}), is_gone=is_gone)

        self._start(key, call, call.adapter, unload)

    async def _route(self, key: Key, _stored: StoredObject, call: RouteAdapter, *, is_routed: bool) -> None:
        """Change the pod's annotation, together with the changes that other adapters want at the same time."""
        if self._address(key, call) is not None:
            self._routes.change(
                ServiceKey(key.namespace, call.service), call.name, call.uid, call.adapter, is_routed=is_routed
            )

    def _tell(self, service: ServiceKey, adapters: frozenset[str] | None) -> None:
        """Report a change in a moment, together with those that follow: each costs its adapters a pass."""
        if not self._news:
            asyncio.get_running_loop().call_later(GATHER_SECONDS, self._tell_all)
        known = self._news.setdefault(service, set())
        if adapters is None or known is None:
            self._news[service] = None
        else:
            known |= adapters

    def _tell_all(self) -> None:
        news, self._news = self._news, {}
        for service, adapters in news.items():
            self.on_news(service, None if adapters is None else frozenset(adapters))

    # --- results ------------------------------------------------------------------------------------------------------

    def _start(
        self,
        key: Key,
        call: LoadAdapter | ProbeAdapter | UnloadAdapter,
        adapter: str,
        run: Callable[[Address], Awaitable[None]],
    ) -> None:
        """Run the call in the background; the adapter counts as busy on the replica until it ends."""
        address, service = self._address(key, call), ServiceKey(key.namespace, call.service)
        if address is None or (call.uid, adapter) in self._busy:
            return
        self._busy.add((call.uid, adapter))

        async def guarded() -> None:
            try:
                await run(address)
            except ReplicaRefused as exc:
                log.info("a replica refused a call about an adapter", pod=call.name, adapter=adapter, error=str(exc))
            finally:
                self._busy.discard((call.uid, adapter))
                self._forget_if_gone(key.namespace, call)
                self._tell(service, frozenset({adapter}))

        self._calls.start(service, f"{call.uid} {adapter} {type(call).__name__}", guarded)

    def _record(
        self,
        call: LoadAdapter | ProbeAdapter,
        *,
        ok: bool,
        reason: str = "",
        message: str = "",
        seconds: float = 0.0,
    ) -> None:
        self._outcomes[call.uid][call.adapter] = Outcome(
            at=self._now(), version=call.version, ok=ok, reason=reason, message=message, seconds=seconds
        )

    def _learn(self, uid: str, info: AdapterInfo, *, is_gone: bool = False) -> None:
        """Correct the replica's list by an answer about one adapter."""
        listing = self._listings.get(uid)
        if listing is None:
            return
        adapters = dict(listing.adapters)
        if is_gone:
            adapters.pop(info.name, None)
        else:
            adapters[info.name] = info
        self._listings[uid] = replace(listing, adapters=adapters)

    async def _credentials(self, namespace: str, secret: str) -> dict[str, str]:
        """The keys of the Secret, read for this call and not kept."""
        if not secret:
            return {}
        try:
            raw = await self._client.get(SECRETS.path(namespace, secret))
        except NotFound as exc:
            raise CredentialsInvalid(f"there is no Secret {secret} in the namespace {namespace}") from exc
        except StatusError as exc:
            if exc.status != 403:
                raise CredentialsInvalid(f"the Secret {secret} cannot be read: {exc.message}") from exc
            sentence = (
                f"the operator may not read Secrets of the namespace {namespace}: add it to the chart's value "
                "adapterCredentials.namespaces, which creates a Role there"
            )
            raise CredentialsInvalid(sentence) from exc
        except KubeError as exc:
            raise CredentialsInvalid(f"the Secret {secret} cannot be read now: {exc}") from exc
        return decoded(msgspec.json.decode(raw), secret)

    def _address(self, key: Key, call: ReplicaCall) -> Address | None:
        """The replica's address; None when its pod is another one by now, or is not controlled by the service."""
        pod = self._pod_of(key.namespace, call.name)
        if pod is None or pod.uid != call.uid or not pod.status.pod_ip:
            return None
        address = address_of(pod)
        return address if address.owner_uid == call.owner_uid else None


def _restarts(pod: Pod | None) -> int:
    server = pod.container(names.SERVER_CONTAINER) if pod is not None else None
    return server.restart_count if server is not None else 0


def _changed(before: Mapping[str, AdapterInfo], after: Mapping[str, AdapterInfo]) -> frozenset[str]:
    """The names whose entry differs in more than its counters; a version beside another one changes that one too."""

    def facts(info: AdapterInfo | None) -> tuple[Any, ...] | None:
        # The places of a loaded adapter change with every request.
        loaded = info is not None and info.state in ("disk", "host", "slot")
        return None if info is None else (loaded or info.state, info.digest, info.version, info.pinned)

    changed: Iterable[str] = {one for one in {*before, *after} if facts(before.get(one)) != facts(after.get(one))}
    return frozenset(_served_as(one) for one in changed)


def _served_as(listed: str) -> str:
    return listed.partition(NEXT_VERSION)[0]
