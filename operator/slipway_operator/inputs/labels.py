"""Compares the labels of our objects with what their controller, name and annotations say, because people edit labels.

| controlled by    | the object          | labels that it should have                                             |
|------------------|---------------------|------------------------------------------------------------------------|
| InferenceService | a replica           | service, revision, slot, attempt, state; pool if it was claimed        |
| InferenceService | a pod that pulls    | pre-pull                                                               |
| InferenceService | ControllerRevision  | service, revision                                                      |
| WarmPool         | a pod that waits    | pool, state=warm                                                       |

All have managed-by and app.kubernetes.io/name. What is found here is only reported: the core plans `RestoreLabels`.
"""

import re
from collections.abc import Mapping
from typing import Final

from slipway_api import names
from slipway_api.moments import read_moment
from slipway_api.pod_labels import PodState, read_identity
from slipway_kube.objects import Object, OwnerReference, Pod
from slipway_kube.resources import INFERENCE_SERVICES, WARM_POOLS
from slipway_operator.core.labels import EditedLabel

_OURS: Final = (
    *(names.LABEL_SERVICE, names.LABEL_REVISION, names.LABEL_SLOT, names.LABEL_ATTEMPT, names.LABEL_STATE),
    *(names.LABEL_POOL, names.LABEL_PRE_PULL),
)
_OF_A_POOL: Final = re.compile(r"(.+)-warm-\d+")


def controller_of(one: Object) -> OwnerReference | None:
    """The object of ours that controls it; None: it is not ours, whatever its labels say."""
    for owner in one.metadata.owner_references:
        if owner.controller and owner.api_version.startswith(f"{names.GROUP}/"):
            return owner
    return None


def service_name(one: Object) -> str:
    """The InferenceService that controls it; "": none does."""
    owner = controller_of(one)
    return owner.name if owner is not None and owner.kind == INFERENCE_SERVICES.kind else ""


def pulls(pod: Pod) -> bool:
    """Whether it is a pod that brings image and model to a node, and not a replica."""
    return names.ANNOTATION_PRE_PULL_DIGEST in pod.metadata.annotations


def pool_name(pod: Pod) -> str:
    """The WarmPool that made the pod; "": none did. A claimed pod keeps the name that its pool gave it."""
    owner = controller_of(pod)
    if owner is not None and owner.kind == WARM_POOLS.kind:
        return owner.name
    if names.ANNOTATION_CLAIMED_AT not in pod.metadata.annotations:
        return ""
    found = _OF_A_POOL.fullmatch(pod.name)
    return found[1] if found is not None else pod.labels.get(names.LABEL_POOL, "")


def intended_state(pod: Pod) -> PodState:
    """The state that the operator gave the pod: a drain is recorded in annotations too, a claim in the owner."""
    owner = controller_of(pod)
    if owner is not None and owner.kind == WARM_POOLS.kind:
        return PodState.WARM
    drains = read_moment(pod.metadata.annotations.get(names.ANNOTATION_DRAIN_STARTED)) is not None
    return PodState.DRAINING if drains else PodState.SERVING


def edited_labels(pod: Pod) -> tuple[EditedLabel, ...]:
    """The labels of a pod of ours that are not as they should be."""
    owner = controller_of(pod)
    if owner is None:
        return ()
    if owner.kind == WARM_POOLS.kind:
        own = {names.LABEL_POOL: owner.name, names.LABEL_STATE: PodState.WARM.value}
    elif pulls(pod):
        own = {names.LABEL_PRE_PULL: owner.name}
    else:
        own = _labels_of_replica(pod, owner.name)
    return _differences(pod.labels, owner.name, own)


def edited_labels_of_revision(revision: Object, hash: str) -> tuple[EditedLabel, ...]:
    """The labels of a ControllerRevision of ours that are not as they should be."""
    service = service_name(revision)
    if not service:
        return ()
    return _differences(revision.labels, service, {names.LABEL_SERVICE: service, names.LABEL_REVISION: hash})


def _labels_of_replica(pod: Pod, service: str) -> dict[str, str]:
    identity = read_identity(pod.name, pod.labels, pod.metadata.annotations)
    own = {
        names.LABEL_SERVICE: service,
        names.LABEL_SLOT: str(identity.slot),
        names.LABEL_ATTEMPT: str(identity.attempt),
        names.LABEL_STATE: intended_state(pod).value,
    }
    # Of an unknown revision the label stays as it is: the replica is replaced.
    revision = identity.revision or pod.labels.get(names.LABEL_REVISION, "")
    optional = {names.LABEL_REVISION: revision, names.LABEL_POOL: pool_name(pod)}
    return own | {label: value for label, value in optional.items() if value}


def _differences(found: Mapping[str, str], owner: str, own: dict[str, str]) -> tuple[EditedLabel, ...]:
    right = {names.LABEL_MANAGED_BY: names.MANAGED_BY, names.LABEL_APP_NAME: owner} | own
    wrong = [EditedLabel(label, value, found.get(label)) for label, value in right.items() if found.get(label) != value]
    foreign = [EditedLabel(label, None, found[label]) for label in _OURS if label in found and label not in right]
    return (*wrong, *foreign)
