"""Executes the actions of a plan in the simulated cluster, and checks the laws of each one."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from slipway_api import internal_tls, names
from slipway_operator.core.actions import (
    ABSENT,
    AddFinalizer,
    AnnotatePod,
    ApplyChild,
    AskSmokeTests,
    CreatePod,
    CreateRevision,
    DeleteChild,
    DeletePod,
    DeleteRevision,
    DrainPod,
    RemoveFinalizer,
    RestoreLabels,
    SmokeResult,
    UndrainPod,
)
from slipway_operator.core.observed import (
    Observed,
    Replica,
    StoredRevision,
)
from slipway_operator.core.service.plan import plan
from tests.builders import UID
from tests.operator.core import laws
from tests.operator.core.simulated_pod import SimulatedPod

if TYPE_CHECKING:
    from tests.operator.core.simulated_cluster import SimulatedCluster

TICK = timedelta(seconds=1)
_FACTS = {
    names.ANNOTATION_NODE_LEAVING_SINCE: "leaving_since",
    names.ANNOTATION_NODE_DRAIN_FORCED: "drain_forced",
    names.ANNOTATION_SAFE_TO_EVICT: "safe_to_evict",
    names.ANNOTATION_DO_NOT_DISRUPT: "do_not_disrupt",
}


def execute(world: "SimulatedCluster", action: Any, observed: Observed) -> None:
    world.log.append(f"{world.clock} {type(action).__name__} {getattr(action, 'name', '')} {action.reason}")
    world.writes += is_write(action)
    assert world.service is not None
    match action:
        case AddFinalizer(finalizer=finalizer):
            _set_finalizers(world, (*world.service.metadata.finalizers, finalizer))
        case RemoveFinalizer():
            gone_or_going = all(pod.replica.deleted_at for pod in world.pods.values())
            assert gone_or_going, "the service went before its replicas"
            world.service = None
        case CreatePod():
            _create_pod(world, action, observed)
        case DrainPod():
            _drain_pod(world, action)
        case UndrainPod():
            _undrain_pod(world, action)
        case DeletePod():
            _delete_pod(world, action, observed)
        case AnnotatePod():
            _annotate_pod(world, action)
        case RestoreLabels():
            _restore_labels(world, action)
        case ApplyChild():
            world.applied[action.key] = action.digest
            world.children[action.key] = action.manifest
        case DeleteChild():
            world.applied[action.key] = ABSENT
            world.children.pop(action.key, None)
        case AskSmokeTests():
            _ask_smoke_tests(world, action)
        case CreateRevision():
            _store_revision(world, action)
        case DeleteRevision():
            (hash,) = {one.hash for one in world.revisions.values() if one.uid == action.uid}
            assert hash not in {pod.replica.revision for pod in world.pods.values()}, "its pods still exist"
            del world.revisions[action.name]


def is_write(action: Any) -> bool:
    """Whether it is a write to the API server, and not only a call to a replica."""
    return not isinstance(action, AskSmokeTests) and not (isinstance(action, DrainPod) and action.marked)


def _ask_smoke_tests(world: "SimulatedCluster", action: AskSmokeTests) -> None:
    pod = world.pods.get(action.name)
    if pod is None or pod.replica.uid != action.uid:
        return
    revision = pod.replica.revision
    if revision in world.silent_to_smoke:
        result = SmokeResult(at=world.now, errors=action.errors + 1, error="HTTP 500")
    else:
        is_wrong = revision in world.fails_smoke
        result = SmokeResult(at=world.now, is_passed=not is_wrong, wrong=1 if is_wrong else 0)
    world.smoke_results[action.uid] = result
    world.due = world.now


def _store_revision(world: "SimulatedCluster", action: CreateRevision) -> None:
    assert action.name not in world.revisions, "a revision is written once"
    world.revisions[action.name] = StoredRevision(
        name=action.name,
        uid=f"uid-of-{action.name}",
        owner_uid=UID,
        hash=action.manifest["metadata"]["labels"][names.LABEL_REVISION],
        number=action.manifest["revision"],
        data=action.manifest["data"],
    )


def _set_finalizers(world: "SimulatedCluster", finalizers: tuple[str, ...]) -> None:
    assert world.service is not None
    metadata = world.service.metadata.model_copy(update={"finalizers": finalizers})
    world.service = world.service.model_copy(update={"metadata": metadata})


def _create_pod(world: "SimulatedCluster", action: CreatePod, observed: Observed) -> None:
    if not world.admits_pod(world):
        return
    labels = action.manifest["metadata"]["labels"]
    slot, attempt = int(labels[names.LABEL_SLOT]), int(labels[names.LABEL_ATTEMPT])
    status = observed.service.status
    assert names.FINALIZER in observed.service.metadata.finalizers or isinstance(
        next(iter(plan(observed, world.now).actions)), AddFinalizer
    ), "no child before the finalizer"
    if attempt > 0:
        carried = [
            one.attempt for one in status.attempts if (one.revision, one.slot) == (labels[names.LABEL_REVISION], slot)
        ]
        assert attempt in carried, f"attempt {attempt} of slot {slot} is not in status"
    assert any(one.hash == labels[names.LABEL_REVISION] and one.image for one in status.revisions)
    assert any(one.hash == labels[names.LABEL_REVISION] for one in world.revisions.values()), "it is not stored"
    if action.name in world.pods:
        pod = world.pods[action.name]
        if pod.replica.owner_uid != UID:
            world.taken |= {action.name}
        return  # 409: ours already
    world.backoffs.create((labels[names.LABEL_REVISION], slot), world.now, world.pods)
    world.next_uid += 1
    world.created += 1
    world.manifests[action.name] = action.manifest
    world.pods[action.name] = SimulatedPod(
        Replica(
            name=action.name,
            uid=f"pod-{world.next_uid}",
            owner_uid=UID,
            revision=labels[names.LABEL_REVISION],
            slot=slot,
            attempt=attempt,
            created_at=world.now,
            speaks_tls=any(one["name"] == internal_tls.VOLUME for one in action.manifest["spec"]["volumes"]),
            safe_to_evict=action.manifest["metadata"]["annotations"].get(names.ANNOTATION_SAFE_TO_EVICT, ""),
            do_not_disrupt=action.manifest["metadata"]["annotations"].get(names.ANNOTATION_DO_NOT_DISRUPT, ""),
        ),
        loads_for=world.load_seconds,
    )
    world.cache.expect(action.name, world.now, lambda replica: replica is not None)
    laws.check_total(world)


def _annotate_pod(world: "SimulatedCluster", action: AnnotatePod) -> None:
    pod = world.pods.get(action.name)
    if pod is None or pod.replica.uid != action.uid:
        return
    assert action.annotations, "nothing to write"
    for name, value in action.annotations.items():
        is_moment = name in (names.ANNOTATION_NODE_LEAVING_SINCE, names.ANNOTATION_NODE_DRAIN_FORCED)
        fact: Any = datetime.fromisoformat(value) if is_moment and value else None if is_moment else value or ""
        pod.replica = replace(pod.replica, **{_FACTS[name]: fact})


def _restore_labels(world: "SimulatedCluster", action: RestoreLabels) -> None:
    pod = world.pods.get(action.name)
    if pod is None or pod.replica.uid != action.uid:
        return
    pod.replica = replace(pod.replica, edited_labels=(), is_routed=True)
    world.cache.expect(action.name, world.now, lambda replica: replica is None or replica.is_routed)


def _drain_pod(world: "SimulatedCluster", action: DrainPod) -> None:
    pod = world.pods.get(action.name)
    if pod is None or pod.replica.uid != action.uid:
        return  # gone, unseen by the caches
    if not action.marked:
        pod.replica = replace(
            pod.replica,
            state=names.STATE_DRAINING,
            drain_started=action.started.replace(microsecond=0),
            drain_reason=action.reason,
            edited_labels=(),
            is_routed=True,
        )
        world.cache.expect(
            action.name, world.now, lambda replica: replica is None or replica.state == names.STATE_DRAINING
        )
    if pod.answers and pod.drain_arrives_at is None:
        pod.drain_arrives_at = world.now + timedelta(seconds=pod.late_by)
    if pod.drain_arrives_at == world.now:
        pod.drains = True


def _undrain_pod(world: "SimulatedCluster", action: UndrainPod) -> None:
    pod = world.pods.get(action.name)
    if pod is None or pod.replica.uid != action.uid or pod.replica.deleted_at or not pod.answers or pod.is_ending:
        return  # the call fails, and the label stays
    pod.drains, pod.drain_arrives_at = False, None
    if world.lose_labels:
        return
    serving = {"state": names.STATE_SERVING, "edited_labels": (), "is_routed": True}
    pod.replica = replace(pod.replica, drain_started=None, drain_reason="", **serving)
    world.cache.expect(action.name, world.now, lambda replica: replica is None or replica.state == names.STATE_SERVING)


def _delete_pod(world: "SimulatedCluster", action: DeletePod, observed: Observed) -> None:
    pod = world.pods.get(action.name)
    if pod is None or pod.replica.uid != action.uid or pod.replica.deleted_at:
        return
    assert world.service is not None
    drain = world.planned_service.spec.drain
    if pod.replica.ready and any(one.ready for one in observed.replicas if one.uid == action.uid):
        assert pod.replica.drain_started, f"{action.name} was deleted without a drain"
    if pod.replica.drain_started and pod.replica.phase == "Running" and pod.answers and pod.running:
        age = (world.now - pod.replica.drain_started).total_seconds()
        node = world.nodes.get(pod.replica.node)
        is_taken_away = node is not None and node.notice is not None
        assert is_taken_away or age >= drain.timeout_seconds, (
            f"{action.name} was deleted with {pod.running} streams after {age}s"
        )
    world.end(action.name, grace=action.grace_seconds, takes=2)
    world.cache.expect(action.name, world.now, lambda replica: replica is None or replica.deleted_at is not None)
