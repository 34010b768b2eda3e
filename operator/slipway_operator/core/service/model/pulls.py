"""Decides which pods pull image and model to nodes before a replica is placed there (`spec.prePull`). Pure.

One pod for each node, or one that fills a shared claim: the pod of a replica with another command, so the kubelet
pulls the same images and the runtime fills the same cache. It asks for no GPU. What a node has is told by its pod,
which stays when it has succeeded; where it is gone, another one finds everything there and transfers nothing.

| the node's pod                         | decided                                                      |
|----------------------------------------|--------------------------------------------------------------|
| none, the node is usable               | create one, up to `maxConcurrent` that are not done          |
| it pulls something else, or is failed  | delete it; the next pass creates another one                 |
| it has succeeded                       | nothing: the node has image and model                        |
| it is not wanted any more              | delete it                                                    |
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from slipway_api import names
from slipway_api.inference_service import InferenceService
from slipway_api.model_source import CachePolicy
from slipway_operator.core.actions import CreatePod, DeletePod, Steps
from slipway_operator.core.installation import Defaults
from slipway_operator.core.observed import Observed
from slipway_operator.core.pulls import PullNode, PullPod
from slipway_operator.core.service.model import model_access
from slipway_operator.core.service.model.pull_nodes import nodes_for, pull_tolerations
from slipway_operator.core.service.replicas.access import PortAccess
from slipway_operator.core.service.replicas.placement import fill_placement
from slipway_operator.core.service.replicas.pod import NO_GPU, build_pod
from slipway_operator.core.service.rollout.revision import Revision, owner_reference

CLAIM: Final = PullNode(name="")  # in place of a node: a claim that all nodes share
FAILED_POD_STAYS: Final = timedelta(seconds=60)  # evicted, or refused by its node: no busy loop
GRACE_SECONDS: Final = 5
_PULL_POD: Final = re.compile("-pull-[0-9a-f]{10}$")
_RESOURCES: Final = {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"cpu": "2", "memory": "1Gi"}}
_NOT_NEEDED: Final = ("priorityClassName", "topologySpreadConstraints", "affinity", "nodeSelector")


@dataclass(frozen=True, slots=True)
class Pulls:
    """The places that should have the model, the pods of those that are on it, and what follows."""

    wanted: tuple[str, ...] = ()
    current: tuple[PullPod, ...] = ()
    steps: Steps = field(default_factory=Steps)


def plan_pulls(observed: Observed, revision: Revision, now: datetime, *, may_create: bool) -> Pulls:
    """The pods of this pass for the revision that replicas are rolled to."""
    seen, service = observed.pulls, revision.apply_to(observed.service)
    if seen is None:
        return Pulls()
    ours = [one for one in seen.pods if one.owner_uid == service.metadata.uid]
    wish = service.spec.pre_pull
    if wish is None:
        return Pulls(steps=_delete(ours, "spec.prePull is gone"))
    is_shared = service.spec.model.cache.policy is CachePolicy.SHARED
    places = (CLAIM,) if is_shared else nodes_for(service.spec, seen.nodes, observed.defaults.placement)
    wanted = {place.name: place for place in places}
    digest = pull_digest(service, revision, observed.defaults)

    current: dict[str, PullPod] = {}
    steps = Steps()
    for one in sorted(ours, key=lambda pull: pull.name):
        if one.digest != digest or one.node not in wanted or one.node in current:
            steps += _delete([one], "what it pulls is not wanted there any more")
        elif one.phase == "Failed":
            current[one.node] = one
            if now - one.created_at < FAILED_POD_STAYS:
                steps += Steps(again_at=one.created_at + FAILED_POD_STAYS)
            else:
                steps += _delete([one], f"it failed: {one.phase_reason or one.result}")
        else:
            current[one.node] = one
    # What ends with a lost node, or finds no room, must not keep the other nodes waiting.
    pulling = sum(_is_pulling(one) for one in current.values())
    missing = [place for name, place in wanted.items() if name not in current and place.is_usable]
    if may_create and not service.spec.suspend:
        for place in missing[: max(0, wish.max_concurrent - pulling)]:
            steps += Steps(actions=(_create(service, revision, place.name, digest, observed.defaults),))
    return Pulls(tuple(wanted), tuple(current.values()), steps)


def is_pull(action: str) -> bool:
    """Whether this is about a pod that pulls, such as `CreatePod chat-pull-0f3a…`; replicas' names end otherwise."""
    return _PULL_POD.search(action) is not None


def _is_pulling(pull: PullPod) -> bool:
    return pull.phase not in ("Succeeded", "Failed") and pull.deleted_at is None and not pull.unschedulable


def _delete(pods: Sequence[PullPod], reason: str) -> Steps:
    return Steps(
        actions=tuple(
            DeletePod(name=one.name, uid=one.uid, grace_seconds=GRACE_SECONDS, reason=reason)
            for one in pods
            if one.deleted_at is None
        )
    )


def _create(service: InferenceService, revision: Revision, node: str, digest: str, defaults: Defaults) -> CreatePod:
    manifest = build_pull_pod(service, revision, node, digest, defaults)
    where = f"node {node}" if node else f"claim {service.spec.model.cache.claim_name}"
    reason = f"image and model are pulled to {where} before a replica needs them"
    return CreatePod(name=manifest["metadata"]["name"], manifest=manifest, reason=reason)


def pull_digest(service: InferenceService, revision: Revision, defaults: Defaults) -> str:
    """What a pod pulls, and how: another digest means that it has to be pulled again."""
    spec = _pod_spec(service, revision, defaults)
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]


def build_pull_pod(
    service: InferenceService, revision: Revision, node: str, digest: str, defaults: Defaults
) -> dict[str, Any]:
    """The pod as it is sent to the API server; `node` empty: the scheduler chooses."""
    spec, overlay = _pod_spec(service, revision, defaults), service.spec.template
    if node:
        term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
        spec["affinity"] = {"nodeAffinity": required}
    elif selector := fill_placement(overlay.spec, defaults.placement).node_selector:
        spec["nodeSelector"] = dict(selector)
    suffix = hashlib.sha256(f"{node}\n{digest}".encode()).hexdigest()[:10]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{service.metadata.name}-pull-{suffix}",
            "namespace": service.metadata.namespace,
            "labels": overlay.metadata.labels
            | {
                names.LABEL_MANAGED_BY: names.MANAGED_BY,
                "app.kubernetes.io/name": service.metadata.name,
                names.LABEL_PRE_PULL: service.metadata.name,
            },
            "annotations": overlay.metadata.annotations
            | {names.ANNOTATION_PRE_PULL_DIGEST: digest, names.ANNOTATION_PRE_PULL_NODE: node},
            "ownerReferences": [owner_reference(service)],
        },
        "spec": spec,
    }


def _pod_spec(service: InferenceService, revision: Revision, defaults: Defaults) -> dict[str, Any]:
    """The spec of a replica's pod without ports, probes and GPU, and with another command."""
    unused = PortAccess(nonce="", admin_digests=())
    pod = build_pod(
        service,
        revision,
        slot=0,
        attempt=0,
        access=unused,
        user=defaults.pod_user,
        placement=defaults.placement,
        node_cache=defaults.node_cache,
    )
    spec: dict[str, Any] = pod["spec"]
    (server,) = spec["containers"]
    # Nothing admits callers here, and the pod has no GPU although its service may have some.
    replaced = (*names.ENV_TOKENS, NO_GPU["name"])
    environment = [one for one in server["env"] if one["name"] not in replaced]
    beside = [{"name": names.ENV_PRE_PULL_TOKENIZER, "value": service.spec.model.tokenizer.uri}]
    if draft := model_access.draft_model_uri(service.spec.runtime):
        beside.append({"name": names.ENV_PRE_PULL_DRAFT_MODEL, "value": draft})
    kept = ("name", "image", "imagePullPolicy", "volumeMounts", "securityContext")
    container = {key: server[key] for key in kept} | {
        "args": ["pull", model_access.address(service.spec.model).replace("$", "$$")],
        "env": [*environment, *beside, NO_GPU],
        "resources": _RESOURCES,
    }
    kept_of_pod = {key: value for key, value in spec.items() if key not in _NOT_NEEDED}
    tolerations = pull_tolerations(service.spec, defaults.placement)
    return kept_of_pod | {
        "containers": [container],
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        **({"tolerations": tolerations} if tolerations else {}),
    }
