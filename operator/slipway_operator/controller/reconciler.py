"""Reconciles one object in one pass: observe → plan → execute → one status write → events, from the newest state.

Create, update, restart, drift and deletion are the same call. After a pass that fails anywhere, the next one starts
from the beginning.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
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
from slipway_operator.controller.kinds import Decision, Key, Kind, Memory, Refusal, StoredObject
from slipway_operator.controller.store import ObjectStore
from slipway_operator.core.actions import (
    NO_ANSWER,
    Action,
    ClaimPod,
    CreatePod,
    DeletePod,
    DrainPod,
    Failure,
    RestoreLabels,
    ReturnPod,
)
from slipway_operator.metrics import OperatorMetrics

log = structlog.get_logger()

PENDING_RECHECK_SECONDS = 5.0
_ABOUT_PODS = (CreatePod, ClaimPod, ReturnPod, DrainPod, DeletePod, RestoreLabels)


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


class Refused(Exception):  # noqa: N818  reads as a fact where it is raised
    """The API server refused an action; the status says so, and the action is tried again after a backoff."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a pass that did not fail."""

    requeue_after: float | None = None
    """Seconds until time alone calls for the next pass; None: not before a change."""
    is_holding: bool = False
    """A refused action waits for its backoff: the pass did the rest, and its failures count on."""


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
            self._memories[key].applied.clear()

    def hold_refused(self, key: Key, seconds: float) -> None:
        """Do not try the refused action again before so many seconds have passed."""
        memory = self._memories[key]
        if memory.refusal is not None:
            memory.refusal = replace(memory.refusal, retry_at=self._monotonic() + seconds)

    async def reconcile(self, key: Key) -> Outcome:
        """Make one pass.

        Raises Refused when an action was refused, StaleView when an object had changed meanwhile, KubeError otherwise.
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
        except (Refused, KubeError):
            raise
        except Exception as exc:
            await self._note_internal_error(key, exc)
            raise

    async def _run_pass(self, key: Key, stored: StoredObject) -> Outcome:
        kind, memory = self._kinds[key.kind], self._memories[key]
        names_before, failures_before = (memory.taken_names, memory.lost_claims), memory.failures
        observed = kind.observe(key, stored, memory)
        decision = kind.plan(observed, self._now())
        try:
            execution = await self._executor.execute(key, stored, decision.actions, memory)
        except Unreachable as exc:
            await self._note_no_answer(key, stored, observed, memory, exc)
            raise

        memory.unanswered = 0
        if not execution.is_holding:
            memory.failures = (execution.failure,) if execution.failure is not None else ()
            # It holds nothing yet: `hold_refused` says until when, unless the rest of this pass fails otherwise.
            memory.refusal = (
                Refusal(execution.failure.action, stored.generation, self._monotonic()) if execution.failure else None
            )
        requeue_after = 0.0 if execution.is_unfinished else decision.requeue_after
        if (memory.failures, (memory.taken_names, memory.lost_claims)) != (failures_before, names_before):
            # The server's refusal belongs in the status of this pass.
            decision = kind.plan(kind.with_memory(observed, memory), self._now())
            requeue_after = 0.0 if execution.failure is None else decision.requeue_after
        if decision.status is not None:
            await self._write_status(key, stored, decision)
        self._record(key, stored, decision, left=execution.left)
        memory.carried = decision.carried  # only now: a pass that fails earlier has posted no event
        if execution.failure is not None:
            raise Refused(f"{execution.failure.action}: {execution.failure.reason}: {execution.failure.message}")
        if execution.is_holding and memory.refusal is not None:
            wait = max(0.0, memory.refusal.retry_at - self._monotonic())
            return Outcome(wait if requeue_after is None else min(wait, requeue_after or wait), is_holding=True)
        return Outcome(requeue_after)

    async def _note_no_answer(
        self, key: Key, stored: StoredObject, observed: Any, memory: Memory, exc: Unreachable
    ) -> None:
        """Write into the status that a write got no answer, if that happens twice in a row: one may be a coincidence.

        If the API server does not answer at all, this fails too, and the log has it.
        """
        memory.unanswered += 1
        if memory.unanswered < 2:
            return
        kind = self._kinds[key.kind]
        memory.failures = (Failure(action="", reason=NO_ANSWER, message=str(exc), at=self._now()),)
        decision = kind.plan(kind.with_memory(observed, memory), self._now())
        if decision.status is not None:
            with suppress(KubeError, StaleView):
                await self._write_status(key, stored, decision)

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
        """One server-side apply of the whole status, skipped when it equals the present one."""
        # The uid keeps this status from being written to a new object of the same name.
        identity: dict[str, Any] = {"metadata": {"name": key.name, "namespace": key.namespace, "uid": stored.uid}}
        before = None if decision.status_before is None else {**identity, "status": dict(decision.status_before)}
        try:
            reply = await self._writer.apply(
                self._kinds[key.kind].resource,
                key.namespace,
                key.name,
                {**identity, "status": dict(decision.status or {})},
                field_manager=names.FIELD_MANAGER,
                last=before,
                subresource="status",
            )
        except (NotFound, Conflict) as exc:
            raise StaleView(f"{key} was deleted before its status was written") from exc
        if reply is not None:
            self._stores[key.kind].update(msgspec.json.decode(reply))  # so that the next pass reads its own write

    def _record(self, key: Key, stored: StoredObject, decision: Decision, *, left: tuple[Action, ...]) -> None:
        """Post the events, except those of actions that were not executed."""
        undone = {action.name for action in left if isinstance(action, _ABOUT_PODS)}
        api_version = self._kinds[key.kind].resource.api_version
        regarding = reference(api_version, key.kind, key.namespace, key.name, stored.uid)
        for event in decision.events:
            if event.pod and event.pod in undone:
                continue
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
