"""Pods that pull, under any order of successes, evictions, deletions and nodes that come and go."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway_api import names
from slipway_operator.core.actions import CreatePod, DeletePod
from slipway_operator.core.installation import NodeCache
from slipway_operator.core.pulls import PullNode, PullPod, PullsSeen
from slipway_operator.core.service.model.pulls import plan_pulls
from tests.builders import DEFAULTS, T0, a_service, promised, revision_of, seen

NODES = [f"node-{number}" for number in range(6)]
EVENTS = st.sampled_from(["succeed", "evict", "vanish", "node goes", "node comes", "node is silent", "model changes"])


class World:
    """The pods and nodes that a plan acts on; each pass executes what was decided."""

    def __init__(self, limit: int) -> None:
        self.now, self.limit, self.model = T0, limit, "hf://org/model"
        self.nodes = {name: PullNode(name=name, allocatable={"nvidia.com/gpu": "8"}) for name in NODES[:3]}
        self.pods: dict[str, PullPod] = {}
        self.made = 0

    def reconcile(self) -> int:
        """One pass; returns how many writes it made."""
        cache, pre_pull = {"cache": {"policy": "Node"}}, {"maxConcurrent": self.limit}
        service = promised(a_service(uri=self.model, model=cache, prePull=pre_pull), 1)
        pulls = PullsSeen(nodes=tuple(self.nodes.values()), pods=tuple(self.pods.values()))
        defaults = replace(DEFAULTS, node_cache=NodeCache(path="/models"))
        observed = replace(seen(service), defaults=defaults, pulls=pulls)
        actions = plan_pulls(observed, revision_of(service), self.now, may_create=True).steps.actions
        for action in actions:
            if isinstance(action, DeletePod):
                assert self.pods.pop(action.name).uid == action.uid
            if isinstance(action, CreatePod):
                self.create(action, service.metadata.uid)
        return len(actions)

    def create(self, action: CreatePod, owner: str) -> None:
        assert action.name not in self.pods, "the API server would answer 409"
        self.made += 1
        annotations = action.manifest["metadata"]["annotations"]
        self.pods[action.name] = PullPod(
            name=action.name,
            uid=f"uid-{self.made}",
            owner_uid=owner,
            digest=annotations[names.ANNOTATION_PRE_PULL_DIGEST],
            node=annotations[names.ANNOTATION_PRE_PULL_NODE],
            created_at=self.now,
        )

    def happens(self, event: str, number: int) -> None:
        self.now += timedelta(seconds=40)
        name = sorted(self.pods)[number % len(self.pods)] if self.pods else ""
        node = NODES[number % len(NODES)]
        match event:
            case "succeed" if name and self.pods[name].phase != "Failed":
                self.pods[name] = replace(self.pods[name], phase="Succeeded")
            case "evict" if name and self.pods[name].phase != "Succeeded":
                self.pods[name] = replace(self.pods[name], phase="Failed", phase_reason="Evicted")
            case "vanish" if name:
                del self.pods[name]
            case "node goes":
                self.nodes.pop(node, None)
            case "node comes":
                self.nodes[node] = PullNode(name=node, allocatable={"nvidia.com/gpu": "8"})
            case "node is silent" if node in self.nodes:
                self.nodes[node] = replace(self.nodes[node], is_usable=False)
            case "model changes":
                self.model = f"hf://org/model-{number}"

    def pulling(self) -> int:
        return sum(one.phase == "Pending" for one in self.pods.values())


@pytest.mark.capability("ST-6")
@given(st.integers(1, 4), st.lists(st.tuples(EVENTS, st.integers(0, 20)), max_size=25))
def test_never_two_pods_for_a_node_never_more_at_once_and_in_the_end_every_usable_node_has_it(limit, events):
    world = World(limit)
    for event, number in events:
        world.reconcile()
        assert world.pulling() <= limit
        digests = [(one.node, one.digest) for one in world.pods.values()]
        assert len(digests) == len(set(digests))
        world.happens(event, number)

    for _ in range(40):
        world.reconcile()
        world.now += timedelta(seconds=61)
        for name, pod in world.pods.items():
            world.pods[name] = replace(pod, phase="Succeeded") if pod.phase == "Pending" else pod

    usable = {name for name, node in world.nodes.items() if node.is_usable}
    done = {pod.node for pod in world.pods.values() if pod.phase == "Succeeded"}
    assert usable <= done
    assert done <= set(world.nodes)
    assert world.reconcile() == 0, "at rest nothing is written"
