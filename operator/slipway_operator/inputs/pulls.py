"""What services with `spec.prePull` see of nodes and of their pods that pull, and wakes them when either changes."""

from collections import defaultdict
from datetime import UTC, datetime
from typing import Any

from slipway_api import names
from slipway_api.inference_service import InferenceService
from slipway_api.types import ServiceKey
from slipway_kube.informer import Change
from slipway_kube.objects import Node, Pod
from slipway_kube.resources import INFERENCE_SERVICES
from slipway_operator.controller.kinds import Key, StoredObject
from slipway_operator.controller.queue import Urgency
from slipway_operator.core.pulls import PullNode, PullPod, PullsSeen
from slipway_operator.inputs.caches import Inputs
from slipway_operator.inputs.labels import edited_labels, pulls, service_name
from slipway_operator.inputs.observer import node_facts


class Pulls:
    """The pods that pull by service, and the nodes."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._pods: defaultdict[ServiceKey, dict[str, PullPod]] = defaultdict(dict)
        self._nodes: dict[str, PullNode] = {}
        self._users: set[Key] = set()  # services with spec.prePull
        inputs.caches.on_pod_change(self._saw_pod)
        inputs.caches.on_node_change(self._saw_node)
        inputs.caches.on_object_change(INFERENCE_SERVICES.kind, self._saw_service)

    def of(self, service: InferenceService) -> PullsSeen | None:
        """The nodes and pods of one service; None: it asks for no pulls, and has no pods of some."""
        pods = self._pods.get(service.key, {})
        if service.spec.pre_pull is None and not pods:
            return None
        return PullsSeen(nodes=tuple(self._nodes.values()), pods=tuple(pods[name] for name in sorted(pods)))

    def _saw_pod(self, change: Change, old: Pod | None, new: Pod | None, _services: Any) -> None:
        for pod in (old, new):
            key = _service_of(pod) if pod is not None else None
            if pod is None or key is None:
                continue
            if pod is new and change is not Change.DELETED:
                self._pods[key][pod.name] = pull_pod(pod)
            else:
                self._pods[key].pop(pod.name, None)
            if not self._pods[key]:
                del self._pods[key]
            self._inputs.wake(Key(INFERENCE_SERVICES.kind, *key), Urgency.NORMAL)

    def _saw_node(self, old: Node | None, new: Node | None) -> None:
        node = new or old
        if node is None:
            return
        before = self._nodes.get(node.name)
        after = pull_node(new) if new is not None else None
        if before == after:
            return
        if after is None:
            self._nodes.pop(node.name, None)
        else:
            self._nodes[node.name] = after
        for key in self._users:
            self._inputs.wake(key, Urgency.BACKGROUND)

    def _saw_service(self, key: Key, _old: StoredObject | None, new: StoredObject | None) -> None:
        spec = new.body.get("spec") if new is not None else None
        if isinstance(spec, dict) and spec.get("prePull") is not None:
            self._users.add(key)
        else:
            self._users.discard(key)


def pull_pod(pod: Pod) -> PullPod:
    """The facts of one pod that pulls."""
    status = next(iter(pod.status.container_statuses), None)
    ended = (status.state.terminated or status.last_state.terminated) if status is not None else None
    waiting = status.state.waiting if status is not None else None
    scheduled = pod.condition("PodScheduled")
    is_unschedulable = scheduled is not None and scheduled.status == "False" and scheduled.reason == "Unschedulable"
    annotations = pod.metadata.annotations
    return PullPod(
        name=pod.name,
        uid=pod.uid,
        edited_labels=edited_labels(pod),
        owner_uid=next((one.uid for one in pod.metadata.owner_references if one.controller), ""),
        digest=annotations.get(names.ANNOTATION_PRE_PULL_DIGEST, ""),
        node=annotations.get(names.ANNOTATION_PRE_PULL_NODE, ""),
        created_at=pod.metadata.creation_timestamp or datetime.min.replace(tzinfo=UTC),
        deleted_at=pod.metadata.deletion_timestamp,
        phase=pod.status.phase or "Pending",
        phase_reason=pod.status.reason,
        unschedulable=scheduled.message if scheduled is not None and is_unschedulable else "",
        waiting_reason=waiting.reason if waiting is not None else "",
        waiting_message=waiting.message if waiting is not None else "",
        result=" ".join(ended.message.split())[:1000] if ended is not None else "",
        exit_code=ended.exit_code if ended is not None else None,
    )


def pull_node(node: Node) -> PullNode:
    """The facts of one node."""
    facts = node_facts(node)
    return PullNode(
        name=node.name,
        is_usable=facts.ready and not facts.cordoned,
        is_leaving=facts.cordoned,
        labels=node.labels,
        taints=tuple((taint.key, taint.value, taint.effect) for taint in node.spec.taints),
        allocatable=node.status.allocatable,
    )


def _service_of(pod: Pod) -> ServiceKey | None:
    name = service_name(pod) if pulls(pod) else ""
    return ServiceKey(pod.namespace, name) if name else None
