"""The law of the backoff: a slot whose replica failed waits before it gets another one.

Three things end the wait. The service's number of replicas or its spec changes: that is a new start. The operator
decided to move the replica before the caches showed its failure. Or the rollout gave up the slot, because enough
replicas of the new revision existed: then the slot is filled again without a pause, but only after the new revision has
lost one of them. So a replica that fails over and over is never created in a loop.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta

from slipway_api.inference_status import InferenceServiceStatus
from slipway_operator.core.service.replicas.assign import FIRST_BACKOFF
from tests.operator.core.simulated_pod import SimulatedPod

Slot = tuple[str, int]  # revision and number


class BackoffLaw:
    """Which slots wait after a failure, and since when."""

    def __init__(self) -> None:
        self._failed_at: dict[Slot, datetime] = {}
        self._given_up: dict[Slot, frozenset[str]] = {}  # uids of the other revisions' replicas at that time

    def fail(self, slot: Slot, now: datetime) -> None:
        """The slot's replica has failed."""
        self._failed_at[slot] = now
        self._given_up.pop(slot, None)

    def start_anew(self) -> None:
        """Another number of replicas is wanted, or another spec."""
        self._failed_at.clear()
        self._given_up.clear()

    def move(self, slot: Slot) -> None:
        """The slot's replica is moved off its node, and the operator cannot have seen the failure."""
        self._failed_at.pop(slot, None)

    def end_pass(self, status: InferenceServiceStatus, pods: Mapping[str, SimulatedPod]) -> None:
        """Note the failed slots that this pass gave up: no attempt is recorded, and their last pod is deleted."""
        recorded = {(one.revision, one.slot) for one in status.attempts}
        kept = {_slot_of(pod) for pod in pods.values() if pod.replica.deleted_at is None}
        for slot in self._failed_at.keys() - recorded - kept - self._given_up.keys():
            if slot[0] != status.update_revision:
                self._given_up[slot] = _live_of_others(slot[0], pods)

    def create(self, slot: Slot, now: datetime, pods: Mapping[str, SimulatedPod]) -> None:
        """The slot gets a replica: fails if it should have waited."""
        others, failed_at = self._given_up.pop(slot, None), self._failed_at.pop(slot, None)
        if failed_at is None or now - failed_at >= FIRST_BACKOFF - timedelta(seconds=1):
            return
        assert others is not None, f"no backoff after the failure of {slot}"
        assert others - _live_of_others(slot[0], pods), f"{slot} was given up, and no other replica was lost since"


def _slot_of(pod: SimulatedPod) -> Slot:
    return pod.replica.revision, pod.replica.slot


def _live_of_others(revision: str, pods: Mapping[str, SimulatedPod]) -> frozenset[str]:
    return frozenset(pod.replica.uid for pod in pods.values() if pod.is_live and pod.replica.revision != revision)
