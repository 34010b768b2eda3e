"""Executes the actions of a plan, lane by lane, as writes to the API server and calls to replicas.

The first refused action stops its lane of `core.lanes`, and no other; it is tried again after a pause of its own.
Repeating a plan, or being killed in it, does no harm: pods get names that one attempt uses, deleted by uid, and
everything else is applied to an end state. Calls to replicas run in the background: a silent admin port must not hold a
worker.
"""

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec
import structlog

from slipway_api.conditions import Reason
from slipway_kube import resources
from slipway_kube.backoff import exponential
from slipway_kube.client import Client
from slipway_kube.errors import AlreadyExists, Conflict, Invalid, KubeError, NotFound, StatusError, Unreachable
from slipway_kube.objects import Object, Pod
from slipway_kube.resources import Resource
from slipway_kube.writer import Writer
from slipway_operator.controller.children import Children
from slipway_operator.controller.claimer import Claimer
from slipway_operator.controller.isolation import BackgroundCalls
from slipway_operator.controller.kinds import Key, Kind, Memory, Refusal, StoredObject
from slipway_operator.controller.pod_state import PodStates
from slipway_operator.controller.store import ObjectStore
from slipway_operator.core.actions import (
    NO_ANSWER,
    Action,
    AddFinalizer,
    AnnotatePod,
    ApplyChild,
    AskSmokeTests,
    ClaimPod,
    CreatePod,
    CreateRevision,
    DeleteChild,
    DeletePod,
    DeleteRevision,
    DrainPod,
    Failure,
    GiveModelBack,
    LoadModel,
    RemoveFinalizer,
    ReturnPod,
    UndrainPod,
    describe,
    object_of,
)
from slipway_operator.core.lanes import in_order, lane_of, waits_for
from slipway_operator.metrics import OperatorMetrics
from slipway_operator.replica_client import Address, ReplicaClient, ReplicaRefused, address_of
from slipway_operator.smoke_client import SmokeTests

log = structlog.get_logger()

ACTIONS_PER_PASS = 25  # then the other keys get their turn: a thousand pods are created in forty passes
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 60.0  # of a lane, after its action was refused
NAME_CONFLICT_PAUSE_SECONDS = 5.0  # the longest: no watch reports that a foreign object is gone


class StaleView(Exception):  # noqa: N818  not an error: look again
    """An object changed after the plan had read it: read it again and plan again."""


class Result(Enum):
    """The result of an action that was not refused."""

    DONE = "done"
    NOT_NEEDED = "not needed"
    """The object is gone: nothing was carried out, and nothing is reported."""
    NAME_TAKEN = "name taken"
    """An object of another owner has the name: the next plan chooses another."""


@dataclass(slots=True)
class Execution:
    """The result of executing the actions of a plan."""

    done: list[Action] = field(default_factory=list)
    """Carried out: their events may be posted."""
    corrections: list[str] = field(default_factory=list)
    """Sentences about children that other clients had edited or deleted, and that were restored."""
    left: list[Action] = field(default_factory=list)
    """Not tried, or refused."""
    refused: list[Failure] = field(default_factory=list)
    is_unfinished: bool = False
    """Whether actions are left that the next pass may execute immediately."""
    error: Exception | None = None
    """Ended all lanes (no answer, not the leader), or one lane whose object has to be read again (StaleView)."""


Perform = Callable[[Key, StoredObject, Any], Awaitable[Result | None]]
"""Executes one action of a type that is registered with the executor; None means DONE."""


class Executor:
    """Executes plans."""

    def __init__(
        self,
        client: Client,
        writer: Writer,
        children: Children,
        replicas: ReplicaClient,
        calls: BackgroundCalls[Key],
        smoke_tests: SmokeTests,
        kinds: Mapping[str, Kind],
        stores: Mapping[str, ObjectStore],
        pod_of: Callable[[str, str], Pod | None],
        metrics: OperatorMetrics,
        *,
        adopt: Callable[[Resource, bytes], None] = lambda _resource, _raw: None,
        performers: Mapping[type, Perform] = MappingProxyType({}),
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        monotonic: Callable[[], float],
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """`pod_of` finds a cached pod by namespace and name; `performers` execute further types of actions.

        `adopt` takes in an object of ours that a create met, and that no cache shows.
        """
        self._adopt = adopt
        self._performers = performers
        self._client = client
        self._writer = writer
        self._children = children
        self._replicas = replicas
        self._calls = calls
        self._smoke_tests = smoke_tests
        self._kinds = kinds
        self._stores = stores
        self._pod_of = pod_of
        self._metrics = metrics
        self._claims = Claimer(client, writer, replicas, calls, pod_of)
        self._states = PodStates(writer, pod_of)
        self._now = now
        self._monotonic = monotonic
        self._uniform = uniform

    async def execute(self, key: Key, stored: StoredObject, actions: Sequence[Action], memory: Memory) -> Execution:
        """Execute the actions in the order of their lanes; remember in `memory` which lanes were stopped, and why."""
        execution, stopped, tried = Execution(), set[str](), 0
        unanswered = {lane for lane, one in memory.refusals.items() if one.failure.reason == NO_ANSWER}
        for action in in_order(actions, last=unanswered):
            lane = lane_of(action)
            if lane in stopped or waits_for(action) & stopped or self._is_held(stored, action, memory):
                stopped.add(lane)
                execution.left.append(action)
                continue
            if tried == ACTIONS_PER_PASS or isinstance(execution.error, KubeError):
                execution.is_unfinished = execution.error is None
                stopped.add(lane)
                execution.left.append(action)
                continue
            tried += 1
            try:
                result = await self._do(key, stored, action, memory, execution)
            except StaleView as exc:
                execution.error = execution.error or exc
            except Unreachable as exc:
                execution.error = exc
                self._remember(key, stored, action, memory, NO_ANSWER, str(exc))
            except StatusError as exc:
                if await self._is_stale(key, stored, action, exc):
                    execution.error = execution.error or StaleView(f"{key} changed before its finalizer could")
                else:
                    reason = exc.reason or str(exc.status)
                    execution.refused.append(self._remember(key, stored, action, memory, reason, exc.message))
            except KubeError as exc:
                execution.error = exc
            else:
                self._count(action, result.value)
                execution.is_unfinished |= result is Result.NAME_TAKEN
                if result is not Result.NAME_TAKEN:
                    memory.refusals.pop(lane, None)
                if result is Result.DONE:
                    execution.done.append(action)
                    # The decision is posted once, as an event; this line logs its single steps.
                    log.debug(type(action).__name__, object=str(key), about=object_of(action), reason=action.reason)
                if result is not Result.NAME_TAKEN:
                    continue
            stopped.add(lane)
            execution.left.append(action)
        planned = {lane_of(action) for action in actions}
        for lane in set(memory.refusals) - planned:
            del memory.refusals[lane]
        return execution

    def _is_held(self, stored: StoredObject, action: Action, memory: Memory) -> bool:
        refusal = memory.refusals.get(lane_of(action))
        return refusal is not None and refusal.holds(_identity(action), stored.generation, self._monotonic())

    def _remember(
        self, key: Key, stored: StoredObject, action: Action, memory: Memory, reason: str, message: str
    ) -> Failure:
        """Remember what stopped the lane, and until when its action rests: 0.5, 1, 2 … 60 s, with jitter.

        A lane whose write got no answer does not rest. It comes last in the next pass, so the others get their turn.
        """
        lane, before = lane_of(action), memory.refusals.get(lane_of(action))
        is_again = before is not None and before.generation == stored.generation
        times = before.times + 1 if before is not None and is_again else 1
        longest = NAME_CONFLICT_PAUSE_SECONDS if reason == Reason.NAME_CONFLICT else LONGEST_PAUSE_SECONDS
        most = exponential(times - 1, first=FIRST_PAUSE_SECONDS, cap=longest)
        pause = 0.0 if reason == NO_ANSWER else self._uniform(most / 2, most)
        failure = Failure(action=describe(action), reason=reason, message=message, at=self._now())
        memory.refusals[lane] = Refusal(failure, _identity(action), stored.generation, times, self._monotonic() + pause)
        self._count(action, "no answer" if reason == NO_ANSWER else "refused")
        if reason != NO_ANSWER:
            self._metrics.reconcile_errors.labels("Refused").inc()
            log.warning(
                "refused",
                object=str(key),
                action=failure.action,
                error=f"{reason}: {message}",
                again_in_seconds=round(pause, 1),
            )
        return failure

    async def _is_stale(self, key: Key, stored: StoredObject, action: Action, exc: StatusError) -> bool:
        """Whether a patch of finalizers failed because the object changed after the plan had read it.

        A failed `test` and an admission plugin that refuses have the same status.
        """
        if not isinstance(action, AddFinalizer | RemoveFinalizer) or not isinstance(exc, NotFound | Conflict | Invalid):
            return False
        try:
            raw = await self._client.get(self._kinds[key.kind].resource.path(key.namespace, key.name))
        except KubeError:
            return True
        metadata = msgspec.json.decode(raw)["metadata"]
        seen = stored.body["metadata"]
        return (metadata["uid"], metadata["resourceVersion"]) != (stored.uid, seen["resourceVersion"])

    async def _do(self, key: Key, stored: StoredObject, action: Action, memory: Memory, execution: Execution) -> Result:
        """Execute one action. Raises StatusError if it is refused."""
        match action:
            case AddFinalizer(finalizer=finalizer):
                await self._set_finalizers(key, stored, add=finalizer)
            case RemoveFinalizer(finalizer=finalizer):
                await self._set_finalizers(key, stored, remove=finalizer)
            case CreatePod():
                return _if_free(await self._create(key, stored, action, memory))
            case DrainPod():
                is_there = action.marked or await self._states.mark_draining(
                    key, action.name, action.uid, started=action.started, reason=action.reason
                )
                if not is_there:
                    return Result.NOT_NEEDED
                self._ask_to_drain(key, stored, action)
            case UndrainPod():
                self._ask_to_serve_again(key, stored, action)
            case DeletePod():
                await self._writer.delete(
                    resources.PODS,
                    key.namespace,
                    action.name,
                    uid=action.uid,
                    grace_seconds=action.grace_seconds,
                    resource_version=action.resource_version,
                    owner=key,
                )
            case AnnotatePod():
                return await self._annotate(key, action)
            case ClaimPod():
                return _if_free(await self._claims.claim(key, stored, action, memory))
            case ReturnPod():
                if not await self._claims.give_back(key, stored, action):
                    raise StaleView(f"{action.name} changed before it could return to its pool")
            case GiveModelBack():
                self._claims.ask_for_model(key, stored, action.name, action.uid)
            case LoadModel():
                self._claims.ask_to_load(key, stored, action.name, action.uid, action.request)
            case ApplyChild():
                applied = await self._children.apply(key, action, memory)
                if applied.correction:
                    execution.corrections.append(applied.correction)
                return Result.DONE if applied.is_written else Result.NOT_NEEDED
            case DeleteChild():
                await self._children.delete(key, action, memory)
            case AskSmokeTests():
                pod = self._pod_of(key.namespace, action.name)
                if pod is not None and pod.uid == action.uid:
                    beside = self._pod_of(key.namespace, action.golden.beside) if action.golden else None
                    self._smoke_tests.start(key, stored.uid, pod, action, memory.smoke_results, beside=beside)
            case CreateRevision():
                await self._create_revision(key, stored, action)
            case DeleteRevision():
                await self._writer.delete(
                    resources.CONTROLLER_REVISIONS, key.namespace, action.name, uid=action.uid, owner=key
                )
            case _:
                return await self._performers[type(action)](key, stored, action) or Result.DONE
        return Result.DONE

    async def _annotate(self, key: Key, action: AnnotatePod) -> Result:
        """Merge annotations into a pod. With its uid in the body, another pod of that name is left alone."""
        body = {"metadata": {"uid": action.uid, "annotations": action.annotations}}
        try:
            await self._writer.merge_patch(resources.PODS, key.namespace, action.name, body)
        except (NotFound, Conflict):
            log.info("nothing left to annotate", object=str(key), pod=action.name)
            return Result.NOT_NEEDED
        return Result.DONE

    async def _set_finalizers(
        self, key: Key, stored: StoredObject, *, add: str | None = None, remove: str | None = None
    ) -> None:
        """Replace the list of finalizers, if the object's version is still the one read: others add finalizers too."""
        metadata = stored.body["metadata"]
        before: list[str] = list(metadata.get("finalizers") or ())
        after = [one for one in before if one != remove] + ([add] if add is not None and add not in before else [])
        if after == before:
            return
        reply = await self._writer.json_patch(
            self._kinds[key.kind].resource,
            key.namespace,
            key.name,
            [
                {"op": "test", "path": "/metadata/uid", "value": stored.uid},
                {"op": "test", "path": "/metadata/resourceVersion", "value": metadata["resourceVersion"]},
                {"op": "add", "path": "/metadata/finalizers", "value": after},
            ],
        )
        body, store = msgspec.json.decode(reply), self._stores[key.kind]
        if body["metadata"].get("deletionTimestamp") and not after:
            store.remove(body)  # that was the last one: the object is deleted
        else:
            store.update(body)

    async def _create(self, key: Key, stored: StoredObject, action: CreatePod, memory: Memory) -> bool:
        """POST the pod. A 409 by a pod of the same owner is success, once the caches have it.

        Either the reply to an earlier POST was lost, or the pod has lost the label by which the caches find it.
        """
        try:
            await self._writer.create(resources.PODS, key.namespace, action.manifest, owner=key)
        except AlreadyExists:
            try:
                raw = await self._client.get(resources.PODS.path(key.namespace, action.name))
            except NotFound as exc:
                raise StaleView(f"pod {action.name} was there and is gone") from exc
            owners = msgspec.json.decode(raw, type=Pod).metadata.owner_references
            if not any(owner.controller and owner.uid == stored.uid for owner in owners):
                memory.taken_names |= {action.name}
                return False
            self._adopt(resources.PODS, raw)
        return True

    async def _create_revision(self, key: Key, stored: StoredObject, action: CreateRevision) -> None:
        """POST the revision. A 409 by one of the same owner is success: its name is a hash of its content."""
        try:
            await self._writer.create(resources.CONTROLLER_REVISIONS, key.namespace, action.manifest, owner=key)
        except AlreadyExists:
            try:
                raw = await self._client.get(resources.CONTROLLER_REVISIONS.path(key.namespace, action.name))
            except NotFound as exc:
                raise StaleView(f"revision {action.name} was there and is gone") from exc
            owners = msgspec.json.decode(raw, type=Object).metadata.owner_references
            if not any(owner.controller and owner.uid == stored.uid for owner in owners):
                # Its owner is a deleted object of the same name: the garbage collector is about to remove it.
                sentence = f"the ControllerRevision {action.name} belongs to another owner; waiting until it is removed"
                raise Conflict(409, sentence, reason=Reason.NAME_CONFLICT) from None
            self._adopt(resources.CONTROLLER_REVISIONS, raw)

    def _ask_to_drain(self, key: Key, stored: StoredObject, action: DrainPod) -> None:
        """POST /drain to the runtime in the background; the label alone already ends routing to the replica.

        To a pod that only carries the label of the object, but is not controlled by it, no token is ever sent.
        """
        pod = self._pod_of(key.namespace, action.name)
        if pod is None or pod.uid != action.uid or not pod.status.pod_ip:
            return
        address = address_of(pod)
        if address.owner_uid != stored.uid:
            return
        drain = partial(
            self._replicas.drain,
            address,
            timeout_seconds=action.timeout_seconds,
            refuse_after_seconds=action.refuse_after_seconds,
            reason=action.reason,
        )
        self._calls.start(key, action.uid, drain)

    def _ask_to_serve_again(self, key: Key, stored: StoredObject, action: UndrainPod) -> None:
        """POST /undrain in the background, and label the pod as serving once the runtime has said that it accepts.

        Calls about one pod are made one after the other, so no drain that was asked for earlier comes in between.
        """
        pod = self._pod_of(key.namespace, action.name)
        if pod is None or pod.uid != action.uid or not pod.status.pod_ip:
            return
        address = address_of(pod)
        if address.owner_uid == stored.uid:
            self._calls.start(key, action.uid, partial(self._undrain, key, action, address))

    async def _undrain(self, key: Key, action: UndrainPod, address: Address) -> None:
        answer = await self._replicas.undrain(address)
        if answer.draining:
            raise ReplicaRefused(200, f"{action.name} still drains after the request to serve again")
        await self._states.mark_serving(key, action.name, action.uid)

    def _count(self, action: Action, outcome: str) -> None:
        self._metrics.actions.labels(type(action).__name__, outcome).inc()


def _if_free(is_free: bool) -> Result:
    return Result.DONE if is_free else Result.NAME_TAKEN


def _identity(action: Action) -> str:
    """The action, with the digest of its manifest if it has one: another manifest is not held back."""
    return f"{describe(action)} {getattr(action, 'digest', '')}".rstrip()
