"""The model on nodes: whether the cache is permitted, which nodes have the model, condition ModelCached. Pure.

| spec                            | nodes that should have it         | a node has it when                    |
|---------------------------------|-----------------------------------|---------------------------------------|
| prePull                         | those that replicas may run on    | its pod that pulls has succeeded      |
| prePull, cache.policy Shared    | the claim, counted as one         | that one pod has succeeded            |
| cache.policy alone              | those of the present replicas     | a replica was ready there             |
| neither                         | nothing is said                   |                                       |

Without replicas and without prePull, status keeps what it said last.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from slipway_api.conditions import ConditionStatus, ConditionType, EventReason, Reason, find_condition
from slipway_api.inference_service import InferenceServiceSpec
from slipway_api.inference_status import ModelCacheStatus
from slipway_api.model_source import CachePolicy
from slipway_api.words import count
from slipway_operator.core.actions import Event, Failure, Steps
from slipway_operator.core.health import Member
from slipway_operator.core.installation import Defaults
from slipway_operator.core.observed import Observed
from slipway_operator.core.pulls import PullPod
from slipway_operator.core.service.model.pulls import Pulls, is_pull, plan_pulls
from slipway_operator.core.service.rollout.revision import Revision

NAMES_SHOWN: Final = 3
GIB: Final = 1 << 30
_INSTEAD: Final = "use policy Shared, or an oci:// model, which nodes keep in any namespace"


@dataclass(frozen=True, slots=True)
class CacheDecision:
    """What follows for the model's cache: status, condition, actions and events."""

    status: ModelCacheStatus | None = None
    condition: tuple[ConditionStatus, Reason, str] | None = None
    steps: Steps = field(default_factory=Steps)
    events: tuple[Event, ...] = ()


def find_refusal(spec: InferenceServiceSpec, defaults: Defaults) -> str:
    """Why model.cache.policy Node is not possible here; empty: it is, or it is not asked for."""
    if spec.model.cache.policy is not CachePolicy.NODE or defaults.node_cache is not None:
        return ""
    return f"model.cache.policy Node: the chart names no folder of the nodes (modelCache.nodePath); {_INSTEAD}"


def describe_forbidden(failure: Failure) -> str:
    """Why the API server does not permit the node's folder; empty: the refusal is about something else."""
    if failure.reason != "Forbidden" or "PodSecurity" not in failure.message or "hostPath" not in failure.message:
        return ""
    return f"model.cache.policy Node: PodSecurity forbids the node's folder in this namespace; {_INSTEAD}"


def decide_cache(
    observed: Observed, members: Sequence[Member], revision: Revision, now: datetime, *, may_create: bool
) -> CacheDecision:
    """Everything about the cache of the revision that replicas are rolled to."""
    service = revision.apply_to(observed.service)
    if find_refusal(service.spec, observed.defaults):
        return CacheDecision()
    pulls = plan_pulls(observed, revision, now, may_create=may_create)
    status: ModelCacheStatus | None
    condition: tuple[ConditionStatus, Reason, str] | None
    if service.spec.pre_pull is not None:
        status, condition = _of_pulls(pulls, observed)
    elif service.spec.model.cache.policy is not CachePolicy.NONE:
        status, condition = _of_replicas(observed, members, is_shared=_is_shared(service.spec))
    else:
        return CacheDecision(steps=pulls.steps)
    return CacheDecision(status, condition, pulls.steps, _events(observed, condition))


def _is_shared(spec: InferenceServiceSpec) -> bool:
    return spec.model.cache.policy is CachePolicy.SHARED


def _of_pulls(pulls: Pulls, observed: Observed) -> tuple[ModelCacheStatus, tuple[ConditionStatus, Reason, str]]:
    done = [one for one in pulls.current if one.phase == "Succeeded"]
    before = observed.service.status.model_cache
    size = next((size for one in done if (size := _size(one))), 0) or (before.bytes if before else 0)
    total = len(pulls.wanted)
    status = ModelCacheStatus(nodes_ready=len(done), nodes_total=total, bytes=size)
    have = count(total, "node has", "nodes have")
    said = f"{len(done)} of {have} image and model" + (f" ({size / GIB:.2f} GiB)" if size else "")
    if pulls.wanted == ("",):
        said = "the claim has the model" if done else "the claim does not have the model yet"
    if not total:
        return status, (ConditionStatus.FALSE, Reason.CACHING, "no node can run a replica: nothing is pulled")
    if len(done) == total:
        return status, (ConditionStatus.TRUE, Reason.CACHED, said)
    failed = [f"a pod that pulls is refused: {one.message}" for one in observed.failures if is_pull(one.action)]
    failed += [sentence for one in pulls.current if (sentence := _failure(one))]
    if failed:
        return status, (ConditionStatus.FALSE, Reason.CACHING_FAILED, f"{said}; {'; '.join(failed[:NAMES_SHOWN])}")
    waiting = [one for one in pulls.current if one.phase != "Succeeded"]
    where = ", ".join(one.node for one in waiting[:NAMES_SHOWN] if one.node)
    return status, (ConditionStatus.FALSE, Reason.CACHING, f"{said}; pulling: {where}" if where else said)


def _of_replicas(
    observed: Observed, members: Sequence[Member], *, is_shared: bool
) -> tuple[ModelCacheStatus | None, tuple[ConditionStatus, Reason, str] | None]:
    before = observed.service.status
    told = find_condition(before.conditions, ConditionType.MODEL_CACHED)
    nodes = {one.replica.node for one in members if one.is_live and one.replica.node}
    if not nodes:
        was = (told.status, Reason(told.reason), told.message) if told is not None else None
        return before.model_cache, was
    ready = {one.replica.node for one in members if one.is_live and (one.is_ready or one.replica.started)}
    if is_shared:
        status = ModelCacheStatus(nodes_ready=min(1, len(ready)), nodes_total=1)
        said = "the claim has the model" if ready else "the claim does not have the model yet"
    else:
        status = ModelCacheStatus(nodes_ready=len(ready), nodes_total=len(nodes))
        have = count(len(nodes), "node with replicas has", "nodes with replicas have")
        said = f"{len(ready)} of {have} the model"
    if status.nodes_ready == status.nodes_total:
        return status, (ConditionStatus.TRUE, Reason.CACHED, said)
    return status, (ConditionStatus.FALSE, Reason.CACHING, said)


def _events(observed: Observed, condition: tuple[ConditionStatus, Reason, str] | None) -> tuple[Event, ...]:
    told = find_condition(observed.service.status.conditions, ConditionType.MODEL_CACHED)
    if condition is None or (told is not None and told.reason == condition[1]):
        return ()
    reasons = {Reason.CACHED: EventReason.MODEL_CACHED, Reason.CACHING_FAILED: EventReason.MODEL_DOWNLOAD_FAILED}
    reason = reasons.get(condition[1])
    return (Event(reason=reason, action="Pull", message=condition[2]),) if reason is not None else ()


def _size(pull: PullPod) -> int:
    """Bytes of the model, as the pod said when it was done."""
    try:
        return int(json.loads(pull.result)["bytes"])
    except (ValueError, KeyError, TypeError):
        return 0


def _failure(pull: PullPod) -> str:
    """Why the pod has not done it yet: the same sentence while the kubelet waits and while it tries again."""
    where = f"node {pull.node}" if pull.node else "the claim"
    if pull.phase == "Succeeded":
        return ""
    if pull.waiting_reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName"):
        return f"{where} cannot pull an image; see kubectl describe pod {pull.name}"
    if pull.waiting_reason == "CreateContainerConfigError":
        return f"{where} lacks a part of the pod's environment: {pull.waiting_message}"
    if pull.exit_code:
        return f"{where} could not get the model: {pull.result or f'exit code {pull.exit_code}'}"
    return f"{where} has no room for a pod that pulls: {pull.unschedulable}" if pull.unschedulable else ""
