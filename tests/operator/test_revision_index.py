"""ControllerRevisions by service, and the count of nodes that are not ready."""

import msgspec
import pytest

from slipway_api.types import ServiceKey
from slipway_kube.informer import Change
from slipway_kube.objects import Node
from slipway_operator.core.observed import is_disruption
from slipway_operator.core.service.rollout.revision import load_revisions
from slipway_operator.inputs.disruption import NodeCounts
from slipway_operator.inputs.revisions import ControllerRevision, RevisionIndex
from tests.builders import UID, a_service, stored

KEY = ServiceKey("demo", "chat")


def a_revision(hash="aaaaa11111", number=1, **metadata):
    owner = {
        "apiVersion": "slipway.dev/v1alpha1",
        "kind": "InferenceService",
        "name": "chat",
        "uid": UID,
        "controller": True,
    }
    body = {
        "metadata": {
            "name": f"chat-{hash}",
            "namespace": "demo",
            "uid": f"uid-{hash}",
            "labels": {"slipway.dev/service": "chat", "slipway.dev/revision": hash},
            "ownerReferences": [owner],
            **metadata,
        },
        "revision": number,
        "data": dict(stored(a_service()).data),
    }
    return msgspec.convert(body, ControllerRevision)


@pytest.mark.capability("OP-13")
def test_a_revision_is_found_by_its_service_until_it_is_deleted():
    index = RevisionIndex()
    first, second = a_revision("bbbbb11111", 1), a_revision("aaaaa11111", 2)
    assert index.saw(Change.ADDED, None, second) == {KEY}
    index.saw(Change.ADDED, None, first)
    assert [one.hash for one in index.of(KEY)] == ["bbbbb11111", "aaaaa11111"]
    assert load_revisions(a_service(), index.of(KEY)).readable[0].spec == a_service().spec
    going = a_revision("bbbbb11111", 1, deletionTimestamp="2026-05-01T12:00:00Z")
    index.saw(Change.MODIFIED, first, going)
    index.saw(Change.DELETED, second, None)
    assert index.of(KEY) == ()


@pytest.mark.parametrize(
    ("not_ready", "nodes", "expected"),
    [
        (0, 0, False),
        (0, 4, False),
        (1, 1, True),
        (1, 2, False),
        (2, 2, True),
        (2, 3, False),
        (3, 5, True),
        (54, 100, False),
    ],
)
def test_what_counts_as_a_disruption(not_ready, nodes, expected):
    """Finding 5: the limits of Kubernetes' node-lifecycle-controller."""
    assert is_disruption(not_ready, nodes) is expected


def test_counts_the_nodes_that_are_not_ready():
    def node(name, status):
        return msgspec.convert(
            {"metadata": {"name": name}, "status": {"conditions": [{"type": "Ready", "status": status}]}}, Node
        )

    counts = NodeCounts()
    counts.saw(None, node("a", "True"))
    counts.saw(None, node("b", "True"))
    assert not counts.disrupted
    counts.saw(node("a", "True"), node("a", "Unknown"))
    assert not counts.disrupted
    counts.saw(node("b", "True"), None)
    assert counts.disrupted, "the only one left"
    counts.saw(node("a", "Unknown"), node("a", "True"))
    assert not counts.disrupted
