"""Which labels each kind of object of ours should have, by its owner, name and annotations."""

import msgspec
import pytest

from slipway_api import names
from slipway_kube.objects import Pod
from slipway_operator.core.labels import EditedLabel
from slipway_operator.inputs.labels import edited_labels
from slipway_operator.inputs.observer import PoolKey, pool_of, service_of

pytestmark = pytest.mark.capability("OP-16")

MANAGED = {names.LABEL_MANAGED_BY: "slipway"}


def a_pod(name, kind, owner, labels, **annotations):
    reference = {"apiVersion": names.API_VERSION, "kind": kind, "name": owner, "uid": "u", "controller": True}
    metadata = {"name": name, "namespace": "team", "labels": labels, "ownerReferences": [reference]}
    ours = {f"{names.GROUP}/{key.replace('_', '-')}": value for key, value in annotations.items()}
    return msgspec.convert({"metadata": metadata | {"annotations": ours}}, Pod)


def test_a_pod_that_pulls_keeps_its_label_and_is_never_a_replica():
    """review/control-plane.md 5"""
    right = MANAGED | {names.LABEL_APP_NAME: "chat", names.LABEL_PRE_PULL: "chat"}
    pulls = {"pre_pull_digest": "d"}
    assert edited_labels(a_pod("chat-pull-x", "InferenceService", "chat", right, **pulls)) == ()
    labels = MANAGED | {names.LABEL_APP_NAME: "chat", names.LABEL_SERVICE: "chat"}
    pod = a_pod("chat-pull-x", "InferenceService", "chat", labels, **pulls)
    assert service_of(pod) is None
    assert edited_labels(pod) == (
        EditedLabel(names.LABEL_PRE_PULL, "chat", None),
        EditedLabel(names.LABEL_SERVICE, None, "chat"),
    )


def test_a_claimed_pod_belongs_to_its_service_and_names_its_pool():
    """review/control-plane.md 5"""
    annotations = {"claimed_at": "2026-01-01T00:00:00Z", "replica": "bcdfg24567-3-1"}
    pod = a_pod("big-pool-warm-7", "InferenceService", "chat", {}, **annotations)
    assert {one.label: one.right for one in edited_labels(pod)} == MANAGED | {
        names.LABEL_APP_NAME: "chat",
        names.LABEL_SERVICE: "chat",
        names.LABEL_SLOT: "3",
        names.LABEL_ATTEMPT: "1",
        names.LABEL_STATE: "serving",
        names.LABEL_REVISION: "bcdfg24567",
        names.LABEL_POOL: "big-pool",
    }
    assert pool_of(pod) == PoolKey("team", "big-pool")


def test_a_pod_that_nothing_of_ours_controls_has_no_labels_to_restore():
    """review/control-plane.md 5"""
    pod = a_pod("x", "ReplicaSet", "x", MANAGED | {names.LABEL_SERVICE: "chat"})
    foreign = msgspec.convert(
        msgspec.to_builtins(pod) | {"metadata": msgspec.to_builtins(pod)["metadata"] | {"ownerReferences": []}}, Pod
    )
    assert edited_labels(foreign) == ()
    assert service_of(foreign) == ("team", "chat"), "its name is avoided"
