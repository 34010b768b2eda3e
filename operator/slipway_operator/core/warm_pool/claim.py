"""Decides which pods of a WarmPool become replicas of a service, instead of new pods.

A claim is one JSON patch: owner, labels and annotations change hands, guarded by tests of uid, owner and state. Then
the runtime is asked to load the model, or, where it has loaded it, to answer under the service's name. The pod keeps
its name and its admin token; its labels make it a replica like any other. Both steps can be repeated: a patch that was
applied already is recognised by the pod's owner and slot, and a process that has the model answers that it has. A lost
race excludes that pod from the next pass.

| the pool has                 | policy Prefer                     | policy Require                    |
|------------------------------|-----------------------------------|-----------------------------------|
| a booted pod that fits       | claim it                          | claim it                          |
| only others, or none         | start cold, event WarmPoolMiss    | wait for one, and status says so  |
| there is no such pool        | start cold, event WarmPoolMiss    | Stalled with reason PoolNotFound  |
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from slipway_api import names
from slipway_api.conditions import ConditionType, EventReason, find_condition
from slipway_api.inference_service import DirectAccess, InferenceService, WarmPoolPolicy
from slipway_api.inference_status import InferenceServiceStatus
from slipway_api.runtime_api import LoadModelRequest, ReadyReason
from slipway_operator.core.actions import ClaimPod, CreatePod, Event, LoadModel, Steps
from slipway_operator.core.health import Member
from slipway_operator.core.observed import Observed
from slipway_operator.core.service.replicas.access import PortAccess, gateway_digests, serving_digests
from slipway_operator.core.service.replicas.assign import Creation
from slipway_operator.core.service.replicas.pod import build_pod, model_spec
from slipway_operator.core.service.rollout.revision import Revision, owner_reference
from slipway_operator.core.warm_pool.shape import differing_parts, has_model, shape_of_service
from slipway_operator.core.warm_pool.supply import CLAIMABLE, WarmPod, no_pool

ASK_AGAIN: Final = timedelta(seconds=2)


class Claims:
    """The pods that one pass may still claim."""

    def __init__(self, observed: Observed, now: datetime) -> None:
        self._observed, self._now = observed, now
        supply = observed.warm
        free = supply.pods if supply is not None and supply.pool_uid else ()
        usable = [pod for pod in free if pod.can_be_claimed(now) and pod.uid not in observed.lost_claims]
        self._free: dict[str, WarmPod] = {pod.uid: pod for pod in sorted(usable, key=_warmest_first)}

    def start_replica(
        self, service: InferenceService, revision: Revision, creation: Creation, create: CreatePod
    ) -> Steps:
        """Claim a pod for this slot, or create one, or wait; `create` is a cold start."""
        wanted = service.spec.warm_pool
        if wanted is None:
            return Steps(actions=(create,))
        pod = self.take(service, revision)
        if pod is not None:
            return self._claim(service, revision, creation, pod)
        if wanted.policy is WarmPoolPolicy.REQUIRE:
            return Steps(again_at=self._now + timedelta(seconds=15))  # a silent pod may answer again without an event
        missed = create.manifest["metadata"]
        annotations = missed["annotations"] | {names.ANNOTATION_POOL_MISSED: wanted.name}
        marked = create.manifest | {"metadata": missed | {"annotations": annotations}}
        why = f"{describe_shortage(self._observed, service, revision, self._now)}; {create.name} is started cold"
        miss = Event(reason=EventReason.WARM_POOL_MISS, action="Claim", message=why, pod=create.name)
        return Steps(actions=(replace(create, manifest=marked, events=(*create.events, miss)),))

    def take(self, service: InferenceService, revision: Revision) -> WarmPod | None:
        """A pod that fits; nobody else gets it in this pass."""
        shape = shape_of_service(service, revision)
        pod = next((one for one in self._free.values() if not differing_parts(one.shape, shape)), None)
        return self._free.pop(pod.uid) if pod is not None else None

    def _claim(self, service: InferenceService, revision: Revision, creation: Creation, pod: WarmPod) -> Steps:
        supply = self._observed.warm
        assert supply is not None
        required, known = serving_digests(self._observed, service), gateway_digests(self._observed, service)
        # The admin token of the pod is derived from its own name and nonce, which stay.
        access = PortAccess(nonce="", admin_digests=(), serving_digests=required, gateway_digests=known)
        pod_of_service = build_pod(
            service,
            revision,
            slot=creation.slot,
            attempt=creation.attempt,
            access=access,
            user=self._observed.defaults.pod_user,
            placement=self._observed.defaults.placement,
        )
        metadata = pod_of_service["metadata"]
        annotations = {
            key: text for key, text in metadata["annotations"].items() if key != names.ANNOTATION_ADMIN_NONCE
        }
        reason = f"claimed {pod.name} of WarmPool {supply.pool} as the replica of slot {creation.slot}"
        event = Event(reason=EventReason.WARM_POD_CLAIMED, action="Claim", message=reason, pod=pod.name)
        action = ClaimPod(
            name=pod.name,
            uid=pod.uid,
            pool_uid=supply.pool_uid,
            owner=owner_reference(service),
            labels=metadata["labels"],
            annotations=annotations | {names.ANNOTATION_CLAIMED_AT: self._now.isoformat()},
            request=load_request(service, revision, required or known),
            reason=reason,
            events=(event,),
        )
        return Steps(actions=(action,), again_at=self._now + ASK_AGAIN)


def _warmest_first(pod: WarmPod) -> tuple[bool, str]:
    return not has_model(pod.shape), pod.name


def load_claimed(observed: Observed, members: Iterable[Member], revisions: Sequence[Revision], now: datetime) -> Steps:
    """Ask claimed pods for their model again, as long as they say that they have none: the first request was lost."""
    by_hash = {revision.hash: revision for revision in revisions}
    steps = Steps()
    for member in members:
        replica, revision = member.replica, by_hash.get(member.replica.revision)
        if replica.claimed_at is None or not member.is_live or replica.started or revision is None:
            continue
        if replica.sample is not None and replica.sample.starting not in (*CLAIMABLE, ReadyReason.BOOTING):
            continue
        service = revision.apply_to(observed.service)
        # As the pod's annotation says, by which the gateway chooses the token: the key may have been rotated since.
        request = load_request(service, revision, replica.serving_digests)
        reason = f"{replica.name} was claimed and has no model yet"
        action = LoadModel(name=replica.name, uid=replica.uid, request=request, reason=reason)
        steps += Steps(actions=(action,), again_at=now + ASK_AGAIN)
    return steps


def load_request(service: InferenceService, revision: Revision, digests: Sequence[str]) -> LoadModelRequest:
    """The body of POST /model: all that a pod's command line would have said."""
    return LoadModelRequest(
        **dict(model_spec(service, revision)),
        serving_token_sha256=tuple(digests) if service.direct_access is DirectAccess.GATEWAY_ONLY else (),
        gateway_token_sha256=tuple(digests) if service.direct_access is DirectAccess.OPEN else (),
        drain_timeout_seconds=service.spec.drain.timeout_seconds,
    )


def describe_shortage(observed: Observed, service: InferenceService, revision: Revision, now: datetime) -> str:
    """Why no pod of the pool can be claimed: `WarmPool pool-a has no pod for it: 1 of 3 pods differ in image`."""
    wanted, supply = service.spec.warm_pool, observed.warm
    assert wanted is not None
    if supply is None or not supply.pool_uid:
        return f"{no_pool(wanted.name, service.metadata.namespace)} (create it, or correct spec.warmPool.name)"
    shape = shape_of_service(service, revision)
    differing = [parts for pod in supply.pods if (parts := differing_parts(pod.shape, shape))]
    if differing and len(differing) == len(supply.pods):
        return f"the pods of WarmPool {wanted.name} differ in {', '.join(differing[0])}"
    return f"no pod of WarmPool {wanted.name} can be claimed"


def describe_wait(observed: Observed, revision: Revision, creations: Sequence[Creation], now: datetime) -> str:
    """Why replicas are not started, where the policy is Require; empty: none waits."""
    service = revision.apply_to(observed.service)
    wanted = service.spec.warm_pool
    if wanted is None or wanted.policy is not WarmPoolPolicy.REQUIRE or not creations:
        return ""
    claims = Claims(observed, now)
    if all(claims.take(service, revision) for _ in creations):
        return ""
    shortage = describe_shortage(observed, service, revision, now)
    return f"replicas wait, because {shortage}, and spec.warmPool.policy is Require"


def wait_events(before: InferenceServiceStatus, after: InferenceServiceStatus, wait: str) -> tuple[Event, ...]:
    """The event of a replica that begins to wait for a pod of the pool. A cause of Stalled has its own event."""
    told = find_condition(before.conditions, ConditionType.RECONCILING)
    # Stalled takes the place of Reconciling.
    is_stalled = any(find_condition(status.conditions, ConditionType.STALLED) for status in (before, after))
    if not wait or is_stalled or (told is not None and wait in told.message):
        return ()
    return (Event(reason=EventReason.WARM_POOL_MISS, action="Claim", message=wait),)
