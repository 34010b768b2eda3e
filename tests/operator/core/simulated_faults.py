"""What may go wrong in a simulated cluster, and what people do to its nodes and pods."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from slipway_api import names
from slipway_api.inference_service import InferenceService
from slipway_operator.core.labels import EditedLabel
from slipway_operator.core.node_taints import LEAVING
from slipway_operator.core.observed import Node, StoredRevision
from tests.operator.core.backoff_law import BackoffLaw
from tests.operator.core.simulated_pod import SimulatedPod
from tests.operator.core.stale_cache import StaleCache


class Faults:
    """The part of the simulated cluster that breaks it."""

    now: datetime
    service: InferenceService | None
    pods: dict[str, SimulatedPod]
    nodes: dict[str, Node]
    children: dict[str, dict[str, Any]]
    faults: int
    was_cordoned: bool
    backoffs: BackoffLaw
    cache: StaleCache
    revisions: dict[str, StoredRevision]
    lost_revisions: dict[str, StoredRevision]
    due: Any

    @property
    def ready(self) -> list[SimulatedPod]:
        raise NotImplementedError

    def end(self, name: str, *, grace: float = 30, takes: float = 2) -> None:
        """The pod is being deleted, by the operator or another."""
        pod = self.pods[name]
        pod.replica = replace(pod.replica, deleted_at=self.now + timedelta(seconds=grace), ready=False)
        pod.ends_at = self.now + timedelta(seconds=takes)

    def fail(self, name: str, reason: str = "Error") -> None:
        self.faults += 1
        pod = self.pods[name]
        if pod.replica.phase == "Failed":
            return  # a pod ends once
        pod.replica = replace(pod.replica, phase="Failed", phase_reason=reason, ready=False, ready_since=None)
        node = self.nodes.get(pod.replica.node)
        # What was lost with its node, or was about to be moved off it, is replaced for that, without a pause.
        if node is None or (node.ready and not node.cordoned):
            self.backoffs.fail((pod.replica.revision, pod.replica.slot), self.now)

    def flap(self, name: str, seconds: float) -> None:
        """Its readiness probe fails for a while, and nothing else."""
        self.pods[name].flaps_until = self.now + timedelta(seconds=seconds)
        self.pods[name].disturbed_until = self.now + timedelta(seconds=seconds)

    def hang(self, name: str) -> None:
        """Its engine stands still; its ports answer."""
        self.faults += 1
        self.pods[name].is_hung = True
        self.pods[name].hung_since = self.now
        self.pods[name].disturbed_until = self.now

    def crash_loop(self, name: str, restarts: int, termination_message: str = "") -> None:
        self.faults += 1
        pod = self.pods[name]
        pod.disturbed_until = self.now
        pod.replica = replace(
            pod.replica,
            ready=False,
            ready_since=None,
            unready_since=self.now,
            started=False,
            waiting_reason="CrashLoopBackOff",
            restarts=restarts,
            running_since=self.now,
            termination_message=termination_message,
        )

    def edit_label(self, name: str) -> None:
        """`kubectl label pod … slipway.dev/state-`: nothing routes to it."""
        pod = self.pods[name]
        edited = EditedLabel(names.LABEL_STATE, pod.replica.state, None)
        pod.replica = replace(pod.replica, edited_labels=(edited,), is_routed=False)

    def lose_node(self, name: str) -> None:
        self.faults += 1
        self.nodes[name] = replace(self.nodes[name], ready=False, not_ready_since=self.now, ready_since=None)
        self._move_what_has_not_failed(name)
        for pod in self.pods.values():
            if pod.replica.node == name:
                pod.answers, pod.hangs = False, True

    def _move_what_has_not_failed(self, node: str) -> None:
        """As the caches show it: a replica may have failed a moment before, and be moved for its node all the same."""
        shown = self.cache.view({name: pod.replica for name, pod in self.pods.items()}, self.now)
        for replica in shown.values():
            if replica.node == node and replica.phase != "Failed":
                self.backoffs.move((replica.revision, replica.slot))

    def recover_node(self, name: str) -> None:
        if self.nodes[name].ready:
            return
        self.nodes[name] = replace(self.nodes[name], ready=True, not_ready_since=None, ready_since=self.now)
        for pod in self.pods.values():
            if pod.replica.node == name:
                pod.answers, pod.hangs = True, False

    def cordon(self, name: str, cordoned: bool = True) -> None:
        self.was_cordoned = True
        node = replace(self.nodes[name], cordoned=cordoned)
        self.nodes[name] = node if cordoned else replace(node, leaving="", notice=None)
        if cordoned:
            self._move_what_has_not_failed(name)

    def announce_end(self, name: str, *, taint: str) -> None:
        """A provider's taint: the node goes when the notice is over, emptied or not."""
        self.was_cordoned = True
        departure = LEAVING[taint]
        self.nodes[name] = replace(self.nodes[name], cordoned=True, leaving=taint, notice=departure.notice)
        self._move_what_has_not_failed(name)

    def take_away(self, name: str) -> None:
        """The machine of this node is gone, with all that ran on it."""
        self.faults += 1
        del self.nodes[name]
        self.pods = {pod: one for pod, one in self.pods.items() if one.replica.node != name}

    def replace_node(self, name: str) -> None:
        """The machine goes, and a new one of another name comes."""
        self.take_away(name)
        self.nodes[f"{name}x"] = Node(name=f"{name}x")

    def delete_record(self, number: int) -> None:
        """`kubectl delete controllerrevision` of one of them."""
        if self.revisions:
            name = sorted(self.revisions)[number % len(self.revisions)]
            self.lost_revisions[name] = self.revisions.pop(name)
            self.due = self.now

    def restore_records(self) -> None:
        """They come back from a backup, as far as nothing has stored them again."""
        self.revisions = self.lost_revisions | self.revisions
        self.lost_revisions = {}
        self.due = self.now

    def evict(self, name: str) -> bool:
        """POST eviction: refused with 429 (False) while the PodDisruptionBudget does not allow it."""
        pod, budget = self.pods[name], self.children.get(f"PodDisruptionBudget/{self._name}")
        is_counted = pod.replica.ready and pod.replica.state == names.STATE_SERVING
        if budget is not None and is_counted and len(self.ready) - 1 < budget["spec"]["minAvailable"]:
            return False
        self.end(name, takes=2 + pod.running)  # its preStop hook drains it
        return True

    @property
    def _name(self) -> str:
        assert self.service is not None
        return self.service.metadata.name

    def ask_for_deletion(self) -> None:
        assert self.service is not None
        metadata = self.service.metadata.model_copy(update={"deletion_timestamp": self.now})
        self.service = self.service.model_copy(update={"metadata": metadata})
