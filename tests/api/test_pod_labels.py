"""What the labels of a pod say, and what they cannot say because people edit them."""

import pytest

from slipway_api import names
from slipway_api.pod_labels import PodState, ReplicaIdentity, read_identity, read_state, takes_requests

pytestmark = pytest.mark.capability("OP-16")

NAME = "chat-bcdfg-1-2"
ANNOTATIONS = {names.ANNOTATION_REPLICA: "bcdfg24567-1-2"}
LABELS = {
    names.LABEL_MANAGED_BY: "slipway",
    names.LABEL_SERVICE: "chat",
    names.LABEL_REVISION: "bcdfg24567",
    names.LABEL_SLOT: "1",
    names.LABEL_ATTEMPT: "2",
    names.LABEL_STATE: "serving",
}


@pytest.mark.parametrize("label", ["debug", "Serving", "", "serving "])
def test_a_state_that_slipway_does_not_write_is_unknown(label):
    """review/control-plane.md 6"""
    assert read_state({names.LABEL_STATE: label}) is read_state({}) is PodState.UNKNOWN
    assert [read_state({names.LABEL_STATE: one.value}) for one in PodState] == list(PodState)


def test_a_replica_takes_requests_only_with_every_label_that_routing_needs():
    """review/control-plane.md 5, 6"""
    assert takes_requests(NAME, LABELS, ANNOTATIONS, service="chat")
    for label in (names.LABEL_MANAGED_BY, names.LABEL_SERVICE, names.LABEL_REVISION, names.LABEL_STATE):
        for value in ("debug", "draining", ""):
            assert not takes_requests(NAME, LABELS | {label: value}, ANNOTATIONS, service="chat"), label
        assert not takes_requests(NAME, {k: v for k, v in LABELS.items() if k != label}, ANNOTATIONS, service="chat")
    assert not takes_requests(NAME, LABELS, ANNOTATIONS, service="code")
    drains = ANNOTATIONS | {names.ANNOTATION_DRAIN_STARTED: "2026-01-01T00:00:00Z"}
    assert not takes_requests(NAME, LABELS, drains, service="chat"), "a drain is recorded in an annotation, too"


def test_which_replica_a_pod_is_stands_in_its_annotation_and_its_name():
    """review/control-plane.md 5"""
    ours = ReplicaIdentity("bcdfg24567", 1, 2)
    assert read_identity(NAME, {}, ANNOTATIONS) == ours
    assert read_identity(NAME, {names.LABEL_REVISION: "other", names.LABEL_SLOT: "9"}, ANNOTATIONS) == ours
    assert read_identity("pool-warm-3", {}, ANNOTATIONS) == ours, "a claimed pod keeps the name that its pool gave it"
    assert read_identity(NAME, LABELS, {}) == ours, "a pod of an earlier version has no annotation"
    assert read_identity(NAME, {}, {}) == ReplicaIdentity("", 1, 2), "its revision is unknown"
    assert read_identity(NAME, LABELS, {names.ANNOTATION_REPLICA: "zzzzz24567-1-2"}) == ours, "the name contradicts it"
    assert str(ours) == ANNOTATIONS[names.ANNOTATION_REPLICA]
