"""What a service sees of nodes and of its pods that pull, as watch events change them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from slipway_api import names
from slipway_kube.informer import Change
from slipway_kube.objects import Node, Pod
from slipway_operator.controller.kinds import Key, StoredObject
from slipway_operator.inputs.caches import Inputs
from slipway_operator.inputs.pulls import Pulls
from tests.builders import a_service

KEY = Key("InferenceService", "demo", "chat")


class World:
    """The callbacks that caches would call, and the keys that were woken."""

    def __init__(self) -> None:
        self.woken: list[Key] = []
        self.callbacks: dict[str, Callable[..., None]] = {}
        caches = SimpleNamespace(
            on_pod_change=lambda callback: self.callbacks.update(pod=callback),
            on_node_change=lambda callback: self.callbacks.update(node=callback),
            on_object_change=lambda _kind, callback: self.callbacks.update(service=callback),
        )
        inputs = SimpleNamespace(caches=caches, wake=lambda key, _urgency: self.woken.append(key))
        self.pulls = Pulls(cast(Inputs, inputs))

    def asks(self, **spec: Any) -> None:
        self.callbacks["service"](KEY, None, StoredObject("uid", 1, {"spec": spec}))

    def pod(self, change: Change, old: Pod | None, new: Pod | None) -> None:
        self.callbacks["pod"](change, old, new, set())

    def node(self, old: Node | None, new: Node | None) -> None:
        self.callbacks["node"](old, new)


def a_node(name: str = "a", ready: str = "True", **spec: Any) -> Node:
    raw = {
        "metadata": {"name": name, "labels": {"zone": "1"}},
        "spec": spec,
        "status": {
            "conditions": [{"type": "Ready", "status": ready}],
            "allocatable": {"cpu": "8", "nvidia.com/gpu": "4"},
        },
    }
    return msgspec.convert(raw, Node)


def a_pull_pod(**status: Any) -> Pod:
    raw = {
        "metadata": {
            "name": "chat-pull-x",
            "namespace": "demo",
            "uid": "uid-x",
            "labels": {names.LABEL_PRE_PULL: "chat"},
            "annotations": {names.ANNOTATION_PRE_PULL_DIGEST: "d", names.ANNOTATION_PRE_PULL_NODE: "a"},
            "ownerReferences": [
                {
                    "apiVersion": names.API_VERSION,
                    "kind": "InferenceService",
                    "name": "chat",
                    "uid": "uid-of-chat",
                    "controller": True,
                }
            ],
        },
        "status": status,
    }
    return msgspec.convert(raw, Pod)


@pytest.mark.capability("ST-6")
def test_a_pod_that_pulls_wakes_its_service_and_tells_how_its_last_run_ended():
    world = World()
    failed = {"terminated": {"exitCode": 1, "message": "ModelNotFound: no\nsuch model"}}
    server = {"name": "server", "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": failed}

    world.pod(Change.ADDED, None, a_pull_pod(phase="Running", containerStatuses=[server]))

    assert world.woken == [KEY]
    seen = world.pulls.of(a_service(prePull={}))
    assert seen is not None
    (pod,) = seen.pods
    assert (pod.owner_uid, pod.digest, pod.node, pod.phase) == ("uid-of-chat", "d", "a", "Running")
    assert (pod.exit_code, pod.result) == (1, "ModelNotFound: no such model")


def test_pods_are_seen_until_they_are_gone_also_by_a_service_that_pulls_no_more():
    world = World()
    pod = a_pull_pod(phase="Succeeded")
    world.pod(Change.ADDED, None, pod)

    assert world.pulls.of(a_service()) is not None
    world.pod(Change.DELETED, pod, None)
    assert world.pulls.of(a_service()) is None


def test_nodes_are_seen_with_what_the_choice_of_nodes_reads():
    world = World()
    world.node(None, a_node("a", taints=[{"key": "team", "value": "x", "effect": "NoSchedule"}]))
    world.node(None, a_node("b", unschedulable=True))

    seen = world.pulls.of(a_service(prePull={}))
    assert seen is not None
    a, b = seen.nodes
    assert a.allocatable["nvidia.com/gpu"] == "4"
    assert a.labels == {"zone": "1"}
    assert a.taints == (("team", "x", "NoSchedule"),)
    assert b.is_leaving


def test_a_new_node_wakes_those_that_pull_and_a_heartbeat_wakes_nobody():
    world = World()
    world.asks(prePull={})
    first = a_node()

    world.node(None, first)
    assert world.woken == [KEY]
    world.node(first, a_node())
    assert world.woken == [KEY], "nothing that matters has changed"
    world.node(first, a_node(ready="Unknown"))
    assert len(world.woken) == 2
    world.asks()
    world.node(first, None)
    assert len(world.woken) == 2, "the service pulls no more"
