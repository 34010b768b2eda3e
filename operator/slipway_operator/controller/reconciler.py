"""Reconciles one object in one pass: observe → plan → execute → one status write → events, from the newest state.

Create, update, restart, drift and deletion are the same call. After a pass that fails anywhere, the next one starts
from the beginning.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec
import structlog

from slipway_api import names
from slipway_api.conditions import EventReason
from slipway_kube.client import Client
from slipway_kube.errors import Conflict, KubeError, NotFound, Unreachable
from slipway_kube.recorder import reference
from slipway_kube.writer import Writer
from slipway_operator.controller.executor import Executor, StaleView
from slipway_operator.controller.internal_error import internal_error_status
from slipway_operator.controller.kinds import Decision, Key, Kind, Memory, StoredObject
from slipway_operator.controller.store import ObjectStore
from slipway_operator.core.actions import ABSENT, Event, events_of
from slipway_operator.metrics import OperatorMetrics

log = structlog.get_logger()

PENDING_RECHECK_SECONDS = 5.0


class Events(Protocol):
    """A recorder of Kubernetes Events; never blocks, never raises."""

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
        """Post an event about `regarding`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a pass that did not fail."""

    requeue_after: float | None = None
    """Seconds until time alone calls for the next pass; None: not before a change."""


class Reconciler:
    """Reconciles one object at a time, of any kind."""

    def __init__(
        self,
        client: Client,
        writer: Writer,
        kinds: Mapping[str, Kind],
        stores: Mapping[str, ObjectStore],
        executor: Executor,
        events: Events,
        metrics: OperatorMetrics,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        monotonic: Callable[[], float],
    ) -> None:
        self._client = client
        self._writer = writer
        self._kinds = kinds
        self._stores = stores
        self._executor = executor
        self._events = events
        self._metrics = metrics
        self._now = now
        self._monotonic = monotonic
        self._memories: defaultdict[Key, Memory] = defaultdict(Memory)

    def forget_applied(self, key: Key) -> None:
        """Let the next pass of this object compare its children with the API server, and correct differences."""
        if key in self._memories:
            memory = self._memories[key]
            for child in list(memory.applied):
                memory.recheck(child)
            memory.applied.clear()

    def recheck_child(self, key: Key, child: str) -> bool:
        """Let the next pass compare one child with the API server; False if this process has not applied it."""
        return key in self._memories and self._memories[key].recheck(child)

    def applied_children(self) -> Iterator[tuple[Key, str]]:
        """Owner and key of each child that this process has applied."""
        for key, memory in self._memories.items():
            yield from ((key, child) for child, digest in memory.applied.items() if digest != ABSENT)

    async def reconcile(self, key: Key) -> Outcome:
        """Make one pass.

        A refused action ends only its lane: the pass succeeds, and the next one is due when the lane may be tried
        again. Raises StaleView if an object had changed since it was read, KubeError otherwise.
        """
        stored = self._stores[key.kind].get(key) or await self._read(key)
        if stored is None:
            self._memories.pop(key, None)
            return Outcome()
        if self._writer.pending(key):
            # The caches do not show an earlier write yet, so a plan would be stale. The write's event queues the key.
            return Outcome(PENDING_RECHECK_SECONDS)
        try:
            return await self._run_pass(key, stored)
        except StaleView:
            # The watch may have missed events, even a deletion: read the object before the next try.
            await self._read(key, instead_of=stored)
            raise
        except KubeError:
            raise
        except Exception as exc:
            await self._note_internal_error(key, exc)
            raise

    async def _run_pass(self, key: Key, stored: StoredObject) -> Outcome:
        kind, memory = self._kinds[key.kind], self._memories[key]
        before = _for_next_plan(memory)
        decision = kind.plan(kind.observe(key, stored, memory), self._now())
        execution = await self._executor.execute(key, stored, decision.actions, memory)
        self._record(key, stored, decision, (*events_of(execution.done), *map(restoration, execution.corrections)))
        if isinstance(execution.error, Unreachable):
            # Perhaps only this write gets no answer, and the status can be written.
            with suppress(KubeError, StaleView):
                await self._write_status(key, stored, decision)
        if execution.error is not None and not isinstance(execution.error, StaleView):
            raise execution.error
        await self._write_status(key, stored, decision)
        self._record(key, stored, decision, decision.notes)
        memory.carried = decision.carried  # only now: a pass that fails earlier has posted no event
        if execution.error is not None:
            raise execution.error
        if execution.is_unfinished or _for_next_plan(memory) != before:
            return Outcome(0.0)  # the next plan reports the refusals, and chooses other names
        return Outcome(self._earlier(decision.requeue_after, memory))

    def _earlier(self, requeue_after: float | None, memory: Memory) -> float | None:
        """Seconds until the next pass: as planned, or when the first stopped lane may be tried again."""
        now = self._monotonic()
        moments = [max(0.0, one.retry_at - now) for one in memory.refusals.values()]
        return min((one for one in (requeue_after, *moments) if one is not None), default=None)

    async def _note_internal_error(self, key: Key, error: Exception) -> None:
        """Write into the status that a pass failed by a fault of ours: the last one may say that all is well."""
        stored = self._stores[key.kind].get(key)
        if stored is None:
            return
        before = stored.body.get("status") or {}
        status, sentence = internal_error_status(before, error, generation=stored.generation, now=self._now())
        with suppress(KubeError, StaleView):
            await self._write_status(key, stored, Decision(actions=(), status=status, status_before=before))
            if sentence:
                regarding = reference(
                    self._kinds[key.kind].resource.api_version, key.kind, key.namespace, key.name, stored.uid
                )
                self._events.record(regarding, EventReason.INTERNAL_ERROR, sentence, action="Plan", warning=True)

    async def _read(self, key: Key, *, instead_of: StoredObject | None = None) -> StoredObject | None:
        """GET the object, because the store lacks it or has an old version: a watch may have missed events."""
        store = self._stores[key.kind]
        try:
            path = self._kinds[key.kind].resource.path(key.namespace, key.name)
            body = msgspec.json.decode(await self._client.get(path))
        except NotFound:
            body = None
        if instead_of is not None and (body is None or body["metadata"]["uid"] != instead_of.uid):
            store.remove(instead_of.body)
        if body is not None:
            store.put(body)
        return store.get(key)

    async def _write_status(self, key: Key, stored: StoredObject, decision: Decision) -> None:
        """One server-side apply of the whole status, skipped if there is none, or it equals the present one."""
        if decision.status is None:
            return
        # The uid keeps this status from being written to a new object of the same name.
        identity: dict[str, Any] = {"metadata": {"name": key.name, "namespace": key.namespace, "uid": stored.uid}}
        before = None if decision.status_before is None else {**identity, "status": dict(decision.status_before)}
        try:
            reply = await self._writer.apply(
                self._kinds[key.kind].resource,
                key.namespace,
                key.name,
                {**identity, "status": dict(decision.status)},
                field_manager=names.FIELD_MANAGER,
                last=before,
                subresource="status",
            )
        except (NotFound, Conflict) as exc:
            raise StaleView(f"{key} was deleted before its status was written") from exc
        if reply is not None:
            self._stores[key.kind].update(msgspec.json.decode(reply))  # so that the next pass reads its own write

    def _record(self, key: Key, stored: StoredObject, decision: Decision, events: Iterable[Event]) -> None:
        """Post events."""
        api_version = self._kinds[key.kind].resource.api_version
        regarding = reference(api_version, key.kind, key.namespace, key.name, stored.uid)
        for event in events:
            self._metrics.decisions.labels(event.reason).inc()
            log.info(event.message, object=str(key), decision=event.reason, pod=event.pod or None)
            self._events.record(
                regarding,
                event.reason,
                event.message,
                action=event.action,
                warning=event.reason.type == "Warning",
                related=reference("v1", "Pod", key.namespace, event.pod, decision.pod_uids.get(event.pod, ""))
                if event.pod
                else None,
            )


def restoration(correction: str) -> Event:
    """The event of a child that another client had edited or deleted, and that is restored."""
    return Event(reason=EventReason.CHILD_RESTORED, action="Restore", message=correction)


def _for_next_plan(memory: Memory) -> tuple[Any, ...]:
    """The results of an execution that change the next plan, without the time of a refusal."""
    failures = [(one.action, one.reason, one.message) for one in memory.failures]
    return memory.taken_names, memory.lost_claims, sorted(failures)
