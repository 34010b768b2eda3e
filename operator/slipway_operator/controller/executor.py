"""From actions to writes and calls, in the plan's order; the first refusal stops the list.

Whoever repeats a list, or is killed in the middle of it, does no harm: pods are created under names that only one
attempt uses, deleted by uid, and everything else is applied to an end state.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import structlog

from slipway_api import names
from slipway_api.conditions import Reason
from slipway_api.types import ServiceKey, rfc3339
from slipway_kube import resources
from slipway_kube.client import Client
from slipway_kube.errors import AlreadyExists, Conflict, Invalid, NotFound, StatusError
from slipway_kube.objects import Object, Pod
from slipway_kube.resources import Resource
from slipway_kube.writer import Writer
from slipway_operator.controller.memory import Memory
from slipway_operator.controller.store import ServiceStore, StoredService
from slipway_operator.core.actions import (
    Action,
    AddFinalizer,
    ApplyChild,
    CreatePod,
    CreateRevision,
    DeletePod,
    DeleteRevision,
    DrainPod,
    RemoveFinalizer,
)
from slipway_operator.core.observed import Failure
from slipway_operator.metrics import OperatorMetrics
from slipway_operator.replica_client import Address, ReplicaClient, ReplicaError

log = structlog.get_logger()

CHILDREN: Mapping[str, Resource] = {
    resource.kind: resource
    for resource in (
        resources.SERVICES,
        resources.CONFIG_MAPS,
        resources.DISRUPTION_BUDGETS,
        resources.NETWORK_POLICIES,
    )
}
REASONS_SHOWN = 200  # characters of a drain reason that go into an annotation


class StaleView(Exception):  # noqa: N818  not an error: look again
    """What we acted on has changed meanwhile: read anew and decide anew."""


@dataclass(frozen=True, slots=True)
class Execution:
    """How far a list of actions came."""

    done: tuple[Action, ...]
    left: tuple[Action, ...] = ()
    failure: Failure | None = None
    """What the API server refused; None with something left: a name was taken, the plan has to choose another."""


class Executor:
    """Does what plans ask for."""

    def __init__(
        self,
        client: Client,
        writer: Writer,
        replicas: ReplicaClient,
        services: ServiceStore,
        address_of: Callable[[ServiceKey, str], Address | None],
        metrics: OperatorMetrics,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._client = client
        self._writer = writer
        self._replicas = replicas
        self._services = services
        self._address_of = address_of
        self._metrics = metrics
        self._now = now

    async def execute(
        self, key: ServiceKey, service: StoredService, actions: Sequence[Action], memory: Memory
    ) -> Execution:
        """Do the actions in order. Raises StaleView, Unreachable or NotLeader: nothing after that was tried."""
        done: list[Action] = []
        drains: list[DrainPod] = []
        try:
            for position, action in enumerate(actions):
                try:
                    reached = await self._do(key, service, action, memory)
                except (NotFound, Conflict, Invalid) as exc:
                    if isinstance(action, AddFinalizer | RemoveFinalizer):
                        raise StaleView(f"{key} changed before its finalizer could") from exc
                    return self._stopped(action, exc, done, actions[position:])
                except StatusError as exc:
                    return self._stopped(action, exc, done, actions[position:])
                if not reached:
                    self._count(action, "name taken")
                    return Execution(tuple(done), tuple(actions[position:]))
                done.append(action)
                self._tell(key, action)
                if isinstance(action, DrainPod):
                    drains.append(action)
        finally:
            # The label is the promise and stands already; the call only makes the runtime hurry. A pod that does not
            # answer costs its timeout once, not once per pod.
            await asyncio.gather(*(self._ask_to_drain(key, drain) for drain in drains))
        return Execution(tuple(done))

    async def _do(self, key: ServiceKey, service: StoredService, action: Action, memory: Memory) -> bool:
        """Do one action; False when the name it needs belongs to somebody else."""
        match action:
            case AddFinalizer(finalizer=finalizer):
                await self._set_finalizers(key, service, add=finalizer)
            case RemoveFinalizer(finalizer=finalizer):
                await self._set_finalizers(key, service, remove=finalizer)
            case CreatePod():
                return await self._create(key, service, action, memory)
            case DrainPod(marked=False):
                await self._mark_draining(key, action)
            case DrainPod():
                pass
            case DeletePod():
                await self._writer.delete(
                    resources.PODS,
                    key.namespace,
                    action.name,
                    uid=action.uid,
                    grace_seconds=action.grace_seconds,
                    owner=key,
                )
            case ApplyChild():
                await self._apply_child(key, action, memory)
            case CreateRevision():
                await self._create_revision(key, service, action)
            case DeleteRevision():
                await self._writer.delete(
                    resources.CONTROLLER_REVISIONS, key.namespace, action.name, uid=action.uid, owner=key
                )
        return True

    async def _apply_child(self, key: ServiceKey, action: ApplyChild, memory: Memory) -> None:
        """Make the child as it should be. One that somebody else made is left alone, and told."""
        resource, name = CHILDREN[action.manifest["kind"]], action.manifest["metadata"]["name"]
        if action.key not in memory.applied:
            with contextlib.suppress(NotFound):
                there = msgspec.json.decode(await self._client.get(resource.path(key.namespace, name)))
                if there["metadata"].get("labels", {}).get(names.LABEL_MANAGED_BY) != names.MANAGED_BY:
                    kind = action.manifest["kind"]
                    advice = "rename it, or name the InferenceService otherwise"
                    sentence = f"there is a {kind} {name} that Slipway did not make; {advice}"
                    raise Conflict(409, sentence, reason=Reason.NAME_CONFLICT)
        await self._writer.apply(resource, key.namespace, name, action.manifest, field_manager=names.FIELD_MANAGER)
        memory.applied[action.key] = action.digest

    async def _set_finalizers(
        self, key: ServiceKey, service: StoredService, *, add: str | None = None, remove: str | None = None
    ) -> None:
        """Replace the list of finalizers, guarded by the version that it was read at: others have theirs in it too."""
        metadata = service.body["metadata"]
        before: list[str] = list(metadata.get("finalizers") or ())
        after = [one for one in before if one != remove] + ([add] if add is not None and add not in before else [])
        if after == before:
            return
        reply = await self._writer.json_patch(
            resources.INFERENCE_SERVICES,
            key.namespace,
            key.name,
            [
                {"op": "test", "path": "/metadata/uid", "value": service.uid},
                {"op": "test", "path": "/metadata/resourceVersion", "value": metadata["resourceVersion"]},
                {"op": "add", "path": "/metadata/finalizers", "value": after},
            ],
        )
        body = msgspec.json.decode(reply)
        if body["metadata"].get("deletionTimestamp") and not after:
            self._services.remove(key, service.uid)  # that was the last one: the object is gone
        else:
            self._services.put(body)

    async def _create(self, key: ServiceKey, service: StoredService, action: CreatePod, memory: Memory) -> bool:
        """POST the pod. One of ours that is there already is what we wanted: an earlier reply was lost."""
        try:
            await self._writer.create(resources.PODS, key.namespace, action.manifest, owner=key)
        except AlreadyExists:
            try:
                raw = await self._client.get(resources.PODS.path(key.namespace, action.name))
            except NotFound as exc:
                raise StaleView(f"pod {action.name} was there and is gone") from exc
            owners = msgspec.json.decode(raw, type=Pod).metadata.owner_references
            if not any(owner.controller and owner.uid == service.uid for owner in owners):
                memory.taken_names |= {action.name}
                return False
        return True

    async def _create_revision(self, key: ServiceKey, service: StoredService, action: CreateRevision) -> None:
        """POST the revision. One of ours that is there already is what we wanted: its name is made of its content."""
        try:
            await self._writer.create(resources.CONTROLLER_REVISIONS, key.namespace, action.manifest, owner=key)
        except AlreadyExists:
            try:
                raw = await self._client.get(resources.CONTROLLER_REVISIONS.path(key.namespace, action.name))
            except NotFound as exc:
                raise StaleView(f"revision {action.name} was there and is gone") from exc
            owners = msgspec.json.decode(raw, type=Object).metadata.owner_references
            if not any(owner.controller and owner.uid == service.uid for owner in owners):
                # Of a deleted service of this name: the garbage collector removes it in a moment.
                sentence = f"the ControllerRevision {action.name} belongs to another owner; waiting until it is removed"
                raise Conflict(409, sentence, reason=Reason.NAME_CONFLICT) from None

    async def _mark_draining(self, key: ServiceKey, action: DrainPod) -> None:
        """Take the pod out of the route. With its uid in the body, a pod that is gone is never created anew."""
        body: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": action.name,
                "namespace": key.namespace,
                "uid": action.uid,
                "labels": {names.LABEL_STATE: names.STATE_DRAINING},
                "annotations": {
                    names.ANNOTATION_DRAIN_STARTED: rfc3339(action.started),
                    names.ANNOTATION_DRAIN_REASON: action.reason[:REASONS_SHOWN],
                },
            },
        }
        try:
            await self._writer.apply(
                resources.PODS, key.namespace, action.name, body, field_manager=names.FIELD_MANAGER_META
            )
        except (NotFound, Conflict):
            # Gone, or another pod under this name by now: either way nothing is left to drain.
            log.info("nothing left to drain", service=str(key), pod=action.name)

    async def _ask_to_drain(self, key: ServiceKey, action: DrainPod) -> None:
        address = self._address_of(key, action.uid)
        if address is None:
            return
        try:
            await self._replicas.drain(address, timeout_seconds=action.timeout_seconds, reason=action.reason)
        except ReplicaError as exc:
            log.info("replica did not take the drain; the plan repeats it", service=str(key), error=str(exc))

    def _stopped(self, action: Action, exc: StatusError, done: list[Action], left: Sequence[Action]) -> Execution:
        what = f"{type(action).__name__} {_object_of(action)}".rstrip()
        self._count(action, "refused")
        failure = Failure(action=what, reason=exc.reason or str(exc.status), message=exc.message, at=self._now())
        return Execution(tuple(done), tuple(left), failure)

    def _tell(self, key: ServiceKey, action: Action) -> None:
        self._count(action, "done")
        # The decision behind it is told once, as an event; this is for whoever follows single steps.
        log.debug(type(action).__name__, service=str(key), object=_object_of(action), reason=action.reason)

    def _count(self, action: Action, outcome: str) -> None:
        self._metrics.actions.labels(type(action).__name__, outcome).inc()


def _object_of(action: Action) -> str:
    """The name of what the action is about."""
    match action:
        case CreatePod() | DrainPod() | DeletePod() | CreateRevision() | DeleteRevision():
            return action.name
        case ApplyChild():
            return action.key
        case _:
            return ""
