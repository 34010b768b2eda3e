"""One pass over one service: observe → plan → execute → one status write → events, always from the newest state.

Create, update, restart, drift and deletion are the same call. A pass that dies anywhere is simply followed by the
next one.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Protocol

import msgspec
import structlog

from slipway_api import names
from slipway_api.inference_service import InferenceService
from slipway_api.inference_status import InferenceServiceStatus
from slipway_api.types import ServiceKey
from slipway_kube import resources
from slipway_kube.client import Client
from slipway_kube.errors import Conflict, NotFound
from slipway_kube.recorder import reference
from slipway_kube.writer import Writer
from slipway_operator.controller.executor import Executor, StaleView
from slipway_operator.controller.memory import Memory
from slipway_operator.controller.reading import read
from slipway_operator.controller.store import ServiceStore, StoredService
from slipway_operator.core.actions import Action, CreatePod, DeletePod, DrainPod, Event
from slipway_operator.core.observed import Observed
from slipway_operator.core.service.plan import Plan
from slipway_operator.inputs.observer import Observer
from slipway_operator.metrics import OperatorMetrics

log = structlog.get_logger()

PENDING_RECHECK_SECONDS = 5.0


class Decide(Protocol):
    """The core: given what is seen and the time, what to do."""

    def __call__(self, observed: Observed, now: datetime) -> Plan:
        """Pure: the same input gives the same plan."""


class Events(Protocol):
    """Where events go; never blocks, never fails."""

    def record(
        self,
        regarding: dict[str, str],
        reason: str,
        note: str,
        *,
        action: str,
        warning: bool = False,
        related: dict[str, str] | None = None,
    ) -> None:
        """Say what was decided about `regarding`."""


class Refused(Exception):  # noqa: N818  reads as a fact where it is raised
    """The API server refused an action; it stands in the status, and the pass is tried again after a backoff."""


class Reconciler:
    """Brings one service at a time closer to what its spec asks for."""

    def __init__(
        self,
        client: Client,
        writer: Writer,
        services: ServiceStore,
        observer: Observer,
        executor: Executor,
        events: Events,
        metrics: OperatorMetrics,
        plan: Decide,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._client = client
        self._writer = writer
        self._services = services
        self._observer = observer
        self._executor = executor
        self._events = events
        self._metrics = metrics
        self._plan = plan
        self._now = now
        self._memories: defaultdict[ServiceKey, Memory] = defaultdict(Memory)

    def resync(self) -> None:
        """Forget what was applied, so that the next pass of each service heals what somebody else changed."""
        for memory in self._memories.values():
            memory.applied.clear()

    async def reconcile(self, key: ServiceKey) -> float | None:
        """One pass. Returns after how many seconds time alone calls for the next one; None: not before a change.

        Raises Refused when an action was refused, StaleView when the world moved on, KubeError when it is unreachable.
        """
        stored = self._services.get(key) or await self._read(key)
        if stored is None:
            self._memories.pop(key, None)
            return None
        if self._writer.pending(key):
            # A write of ours has not come back yet: deciding now would be deciding on the past. Its event wakes us.
            return PENDING_RECHECK_SECONDS
        try:
            return await self._bring_closer(key, stored)
        except StaleView:
            # The watch may have missed more than we can see from here, even a deletion: ask before trying again.
            await self._read(key, instead_of=stored)
            raise

    async def _bring_closer(self, key: ServiceKey, stored: StoredService) -> float | None:
        reading = read(stored.body)
        service = reading.service
        memory = self._memories[key]

        observed = self._observer.observe(key, service, memory, fault=reading.fault)
        self._note_ages(observed)
        plan = self._plan(observed, self._now())
        execution = await self._executor.execute(key, stored, plan.actions, memory)

        memory.recommendations = plan.recommendations
        memory.failures = (execution.failure,) if execution.failure is not None else ()
        if memory.failures != observed.failures or memory.taken_names != observed.taken_names:
            # What the server said belongs into the status of this very pass.
            changed = replace(observed, failures=memory.failures, taken_names=memory.taken_names)
            plan = replace(
                self._plan(changed, self._now()), requeue_after=0.0 if execution.failure is None else plan.requeue_after
            )
        if plan.status is not None:
            await self._write_status(key, stored, service, plan.status)
        self._record(key, stored, plan.events, observed, left=execution.left)
        memory.ready = plan.ready  # only now: a pass that fails before has told nobody of the difference
        if execution.failure is not None:
            raise Refused(f"{execution.failure.action}: {execution.failure.reason}: {execution.failure.message}")
        return plan.requeue_after

    async def _read(self, key: ServiceKey, *, instead_of: StoredService | None = None) -> StoredService | None:
        """Ask the server, because the store lacks the service or holds it wrong: a watch can miss anything."""
        try:
            body = msgspec.json.decode(await self._client.get(resources.INFERENCE_SERVICES.path(*key)))
        except NotFound:
            body = None
        if instead_of is not None and (body is None or body["metadata"]["uid"] != instead_of.uid):
            self._services.remove(key, instead_of.uid)
        if body is not None:
            self._services.put(body)
        return self._services.get(key)

    async def _write_status(
        self, key: ServiceKey, stored: StoredService, service: InferenceService, status: InferenceServiceStatus
    ) -> None:
        """One server-side apply of the whole status, skipped when it says what is there already."""
        # The uid keeps this status off a successor of the same name.
        identity = {"metadata": {"name": key.name, "namespace": key.namespace, "uid": stored.uid}}
        before = {**identity, "status": service.status.to_json()} if service.status is not None else None
        try:
            reply = await self._writer.apply(
                resources.INFERENCE_SERVICES,
                key.namespace,
                key.name,
                {**identity, "status": status.to_json()},
                field_manager=names.FIELD_MANAGER,
                last=before,
                subresource="status",
            )
        except (NotFound, Conflict) as exc:
            raise StaleView(f"{key} went away before its status was written") from exc
        if reply is not None:
            self._services.put(msgspec.json.decode(reply))  # so that the next pass reads its own write

    def _record(
        self,
        key: ServiceKey,
        stored: StoredService,
        events: tuple[Event, ...],
        observed: Observed,
        *,
        left: tuple[Action, ...],
    ) -> None:
        """Tell the decisions, except those whose action did not happen."""
        undone = {action.name for action in left if isinstance(action, CreatePod | DrainPod | DeletePod)}
        uids = {one.name: one.uid for one in observed.replicas}
        regarding = reference(names.API_VERSION, "InferenceService", key.namespace, key.name, stored.uid)
        for event in events:
            if event.pod and event.pod in undone:
                continue
            self._metrics.decisions.labels(event.reason).inc()
            log.info(event.message, service=str(key), decision=event.reason, pod=event.pod or None)
            self._events.record(
                regarding,
                event.reason,
                event.message,
                action=event.action,
                warning=event.reason.type == "Warning",
                related=reference("v1", "Pod", key.namespace, event.pod, uids.get(event.pod, ""))
                if event.pod
                else None,
            )

    def _note_ages(self, observed: Observed) -> None:
        now = self._now()
        for one in observed.replicas:
            if one.sample is not None and one.ready:
                self._metrics.signal_age.observe(max(0.0, (now - one.sample.at).total_seconds()))
