"""Reads the labels of pods, which people edit: the one reader of the state, and of the labels that routing needs.

A pod's controller, name and annotations say what it is; its labels only show that to selectors. Gateway, operator and
adapters use these functions, so all count the same pods as ready as the selectors of the Service and of the
PodDisruptionBudget do. An unknown or missing state is not serving.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from slipway_api import names

ROUTING_LABELS: Final = frozenset(
    {names.LABEL_MANAGED_BY, names.LABEL_SERVICE, names.LABEL_REVISION, names.LABEL_STATE}
)
"""Labels by which gateway, Service and PodDisruptionBudget find a replica."""

_IN_NAME: Final = re.compile(r"-([a-z0-9]{5})-(\d+)-(\d+)$")
_IN_ANNOTATION: Final = re.compile(r"([a-z0-9]+)-(\d+)-(\d+)")


class PodState(StrEnum):
    """The label `slipway.dev/state` of a pod."""

    SERVING = names.STATE_SERVING
    DRAINING = names.STATE_DRAINING
    WARM = names.STATE_WARM
    UNKNOWN = ""
    """Missing, or a value that Slipway does not write: the pod gets no requests."""


def read_state(labels: Mapping[str, str]) -> PodState:
    """The state that a pod's labels show."""
    try:
        return PodState(labels.get(names.LABEL_STATE, ""))
    except ValueError:
        return PodState.UNKNOWN


class ReplicaIdentity(NamedTuple):
    """Which replica of its service a pod is."""

    revision: str
    """The whole hash; empty: unknown."""
    slot: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.revision}-{self.slot}-{self.attempt}"


def read_identity(name: str, labels: Mapping[str, str], annotations: Mapping[str, str]) -> ReplicaIdentity:
    """The identity of a replica: its annotation, unless the pod's name contradicts it; then its name; then its labels.

    A pod that was claimed from a WarmPool keeps its name, so only annotation and labels show which replica it is.
    """
    in_name = _IN_NAME.search(name)
    in_annotation = _IN_ANNOTATION.fullmatch(annotations.get(names.ANNOTATION_REPLICA, ""))
    if in_annotation is not None:
        hash, slot, attempt = in_annotation.groups()
        if in_name is None or (hash[: len(in_name[1])], slot, attempt) == in_name.groups():
            return ReplicaIdentity(hash, int(slot), int(attempt))
    label = labels.get(names.LABEL_REVISION, "")
    if in_name is not None:
        short, slot, attempt = in_name.groups()
        return ReplicaIdentity(label if label.startswith(short) else "", int(slot), int(attempt))
    return ReplicaIdentity(label, _number(labels.get(names.LABEL_SLOT)), _number(labels.get(names.LABEL_ATTEMPT)))


def takes_requests(name: str, labels: Mapping[str, str], annotations: Mapping[str, str], *, service: str) -> bool:
    """Whether the labels of a pod, which `service` controls, send requests to it: none of ROUTING_LABELS is edited."""
    return (
        labels.get(names.LABEL_MANAGED_BY) == names.MANAGED_BY
        and labels.get(names.LABEL_SERVICE) == service
        and read_state(labels) is PodState.SERVING
        and names.ANNOTATION_DRAIN_STARTED not in annotations
        and labels.get(names.LABEL_REVISION, "") == read_identity(name, labels, annotations).revision
    )


def _number(text: str | None) -> int:
    """A label as a number; 0 if it was edited to something else."""
    return int(text) if text is not None and text.isdecimal() else 0
