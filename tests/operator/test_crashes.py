"""kill -9 at every write of eleven scenarios, and every reply lost once: the same end, and never a pod too many.

A run without faults counts the writes of a scenario; each other run is the same scenario with one fault. A killed
operator is followed by a new one, which has to wait for the Lease. Claims of warm pods and adapters have sweeps of
their own (`test_warm_pools`, `test_lora_adapters_at_scale`).
"""

import functools
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slipway_api import names
from slipway_kube.resources import CONTROLLER_REVISIONS, DISRUPTION_BUDGETS, INFERENCE_SERVICES, PODS, SERVICES
from tests.operator.operator_process import OperatorProcess
from tests.operator.simulated_cluster import NAMESPACE, SimulatedCluster, simulated_cluster
from tests.operator.virtual_time import run_in_virtual_time

SURGE = 1
OTHER_MODEL = {"uri": "file:///models/other"}
CANARY = {"strategy": "Canary", "canary": {"steps": [{"setWeight": 50}, {"pauseSeconds": 5}, {"setWeight": 100}]}}
SMOKE = {"gates": {"smoke": [{"prompt": "2+2=", "mustMatch": "4"}]}}


@dataclass
class Life:
    """One run of a scenario: its cluster, and a picture of the world after each of its parts."""

    cluster: SimulatedCluster
    pictures: list[dict[str, Any]] = field(default_factory=list)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Let time pass until it is so; an operator that died is followed by another."""

        def holds() -> bool:
            if self.cluster.processes[-1].is_dead:
                self.cluster.start_operator()
            return condition()

        await self.cluster.until(holds, what)

    async def settle(self, replicas: int, *, most_pods: int) -> None:
        """A part of the scenario has ended when nothing is written any more."""
        self.cluster.most_live_pods = 0
        await self.until(lambda: is_settled(self.cluster, replicas), f"{replicas} settled replicas")
        while await self.cluster.quiet(5):
            await self.until(lambda: is_settled(self.cluster, replicas), f"{replicas} settled replicas")
        assert self.cluster.most_live_pods <= most_pods, "a pod too many"
        self.pictures.append(picture(self.cluster))

    def annotate(self, **annotations: str) -> None:
        """kubectl annotate; the names are those after the slash."""
        service = self.cluster.service("chat")
        assert service is not None
        metadata = service["metadata"]
        ours = {f"{names.GROUP}/{key}": value for key, value in annotations.items()}
        metadata = metadata | {"annotations": metadata.get("annotations", {}) | ours}
        self.cluster.server.put(INFERENCE_SERVICES, service | {"metadata": metadata})


def picture(cluster: SimulatedCluster) -> dict[str, Any]:
    """The state of the world, without times, versions, and which of equal replicas a fault has left."""
    status = cluster.status("chat")
    known = ("replicas", "readyReplicas", "desiredReplicas", "currentRevision", "failedRevision")
    labels = [pod["metadata"]["labels"] for pod in cluster.pods("chat")]
    slots = [(one[names.LABEL_REVISION], one[names.LABEL_SLOT]) for one in labels]
    assert len(set(slots)) == len(slots), f"two pods on one slot: {slots}"
    return {
        "pods": sorted((one[names.LABEL_REVISION], one[names.LABEL_STATE]) for one in labels),
        "finalizers": cluster.service("chat")["metadata"]["finalizers"],
        "services": [one["spec"] for one in cluster.server.objects(SERVICES, NAMESPACE)],
        "revisions": [
            (one["metadata"]["name"], one["revision"], one["data"])
            for one in cluster.server.objects(CONTROLLER_REVISIONS, NAMESPACE)
        ],
        "budgets": [one["spec"] for one in cluster.server.objects(DISRUPTION_BUDGETS, NAMESPACE)],
        "status": {key: status.get(key) for key in known},
    }


def is_settled(cluster: SimulatedCluster, replicas: int) -> bool:
    status, service = cluster.status("chat"), cluster.service("chat")
    remembered = {f"chat-{one['hash']}" for one in status.get("revisions", ())}
    has_ended = status.get("currentRevision") == status.get("updateRevision") or status.get("failedRevision")
    return (
        {one["metadata"]["name"] for one in cluster.server.objects(CONTROLLER_REVISIONS, NAMESPACE)} == remembered
        and len(cluster.serving("chat")) == replicas == len(cluster.pods("chat"))
        and status.get("readyReplicas") == replicas == status.get("replicas")
        and bool(has_ended)
        and status.get("observedGeneration") == service["metadata"]["generation"]
    )


# --- the scenarios ----------------------------------------------------------------------------------------------------


async def created_scaled_changed_and_deleted(life: Life) -> None:
    cluster = life.cluster
    cluster.apply("chat", replicas=1)
    await life.settle(1, most_pods=1)
    cluster.apply("chat", replicas=2)
    await life.settle(2, most_pods=2)
    cluster.apply("chat", model=OTHER_MODEL, rollout={"revisionHistoryLimit": 0})
    await life.settle(2, most_pods=2 + SURGE)
    assert len(life.pictures[-1]["revisions"]) == 1, "the old one is beyond revisionHistoryLimit"
    cluster.delete("chat")
    await life.until(lambda: cluster.service("chat") is None and not cluster.pods(), "the end of the service")
    await cluster.quiet(5)
    assert cluster.server.objects(SERVICES, NAMESPACE) == []
    assert cluster.server.objects(CONTROLLER_REVISIONS, NAMESPACE) == []


async def scaled_in(life: Life) -> None:
    life.cluster.apply("chat", replicas=3)
    await life.settle(3, most_pods=3)
    life.cluster.apply("chat", replicas=1)
    await life.settle(1, most_pods=3)


async def a_canary_that_is_promoted(life: Life) -> None:
    life.cluster.apply("chat", replicas=2, rollout=CANARY)
    await life.settle(2, most_pods=2)
    life.cluster.apply("chat", model=OTHER_MODEL)
    await life.settle(2, most_pods=2 + SURGE)
    assert not life.cluster.status("chat").get("failedRevision")


async def a_canary_that_is_rolled_back(life: Life) -> None:
    life.cluster.apply("chat", replicas=2, rollout=CANARY | SMOKE)
    await life.settle(2, most_pods=2)
    before = life.cluster.status("chat")["currentRevision"]
    life.cluster.apply("chat", model=OTHER_MODEL)
    await life.until(lambda: bool(life.cluster.status("chat").get("failedRevision")), "the rollback")
    await life.settle(2, most_pods=2 + SURGE)
    assert life.cluster.status("chat")["currentRevision"] == before


async def a_canary_that_is_aborted_by_hand(life: Life) -> None:
    held = CANARY | {"canary": {"steps": [{"setWeight": 50}, {"pauseSeconds": 3600}, {"setWeight": 100}]}}
    life.cluster.apply("chat", replicas=2, rollout=held)
    await life.settle(2, most_pods=2)
    before = life.cluster.status("chat")["currentRevision"]
    life.cluster.apply("chat", model=OTHER_MODEL)

    def at_half() -> bool:
        canary = life.cluster.status("chat").get("canary") or {}
        return canary.get("weight") == 50

    await life.until(at_half, "half of the traffic")
    life.annotate(abort=life.cluster.status("chat")["updateRevision"])
    await life.settle(2, most_pods=2 + SURGE)
    assert life.cluster.status("chat")["currentRevision"] == before


async def blue_and_green(life: Life) -> None:
    life.cluster.apply("chat", replicas=2, rollout={"strategy": "BlueGreen", "rollingUpdate": {"maxSurge": 2}})
    await life.settle(2, most_pods=2)
    life.cluster.apply("chat", model=OTHER_MODEL)
    await life.settle(2, most_pods=4)


async def recreated(life: Life) -> None:
    life.cluster.apply("chat", replicas=2, rollout={"strategy": "Recreate"})
    await life.settle(2, most_pods=2)
    life.cluster.apply("chat", model=OTHER_MODEL)
    await life.settle(2, most_pods=2)


async def reverted_while_it_rolls(life: Life) -> None:
    life.cluster.apply("chat", replicas=2)
    await life.settle(2, most_pods=2)
    first = life.cluster.status("chat")["currentRevision"]
    life.cluster.apply("chat", model=OTHER_MODEL)
    await life.until(lambda: life.cluster.status("chat")["updateRevision"] != first, "the new revision")
    life.cluster.apply("chat", model={"uri": "file:///models/tiny"})
    await life.settle(2, most_pods=2 + SURGE)
    assert life.cluster.status("chat")["currentRevision"] == first


async def suspended_and_resumed(life: Life) -> None:
    life.cluster.apply("chat", replicas=2)
    await life.settle(2, most_pods=2)
    life.cluster.apply("chat", suspend=True)
    await life.settle(0, most_pods=2)
    life.cluster.apply("chat", suspend=False)
    await life.settle(2, most_pods=2)


async def restarted(life: Life) -> None:
    life.cluster.apply("chat", replicas=2)
    await life.settle(2, most_pods=2)
    before = {pod["metadata"]["uid"] for pod in life.cluster.pods()}
    life.cluster.apply("chat", restartAt=life.cluster.now().strftime("%Y-%m-%dT%H:%M:%SZ"))
    await life.until(lambda: not before & {pod["metadata"]["uid"] for pod in life.cluster.live()}, "new pods")
    await life.settle(2, most_pods=2 + SURGE)


async def a_replica_is_deleted_by_somebody_else(life: Life) -> None:
    life.cluster.apply("chat", replicas=2)
    await life.settle(2, most_pods=2)
    victim = life.cluster.serving("chat")[0]
    life.cluster.server.delete(PODS, NAMESPACE, victim)
    await life.until(lambda: life.cluster.serving("chat") != [victim], "its end")
    await life.settle(2, most_pods=2)


Scenario = Callable[[Life], Awaitable[None]]
SCENARIOS: tuple[Scenario, ...] = (
    created_scaled_changed_and_deleted,
    scaled_in,
    a_canary_that_is_promoted,
    a_canary_that_is_rolled_back,
    a_canary_that_is_aborted_by_hand,
    blue_and_green,
    recreated,
    reverted_while_it_rolls,
    suspended_and_resumed,
    restarted,
    a_replica_is_deleted_by_somebody_else,
)
every_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)


def live_through(
    scenario: Scenario, directory: Path, prepare: Callable[[SimulatedCluster], OperatorProcess]
) -> tuple[list[dict[str, Any]], OperatorProcess]:
    """The whole scenario. Returns a picture after each part, and the first operator."""

    async def story() -> tuple[list[dict[str, Any]], OperatorProcess]:
        async with simulated_cluster(directory) as cluster:
            first = prepare(cluster)
            life = Life(cluster)
            await scenario(life)
            return life.pictures, first

    return run_in_virtual_time(story())


@functools.cache
def undisturbed(scenario: Scenario) -> tuple[list[dict[str, Any]], list[str]]:
    """The scenario without faults: its pictures, and the writes of its operator."""
    with tempfile.TemporaryDirectory() as directory:
        pictures, operator = live_through(scenario, Path(directory), lambda cluster: cluster.start_operator())
    return pictures, operator.writes


def test_the_writes_include_those_of_the_revision_store():
    _, writes = undisturbed(created_scaled_changed_and_deleted)
    verbs = {write.partition(" ")[0] for write in writes if "/controllerrevisions" in write}
    assert verbs == {"POST", "DELETE"}


@every_scenario
@pytest.mark.capability("OP-7", "OP-13")
def test_killed_after_any_write_the_next_operator_comes_to_the_same_end(tmp_path, scenario):
    pictures, writes = undisturbed(scenario)
    assert len(writes) > 8

    for count in range(len(writes) + 1):
        after_crash, _ = live_through(scenario, tmp_path, lambda it, n=count: it.start_operator(dies_after_writes=n))

        assert after_crash == pictures, f"killed after {count} writes, the last one {writes[count - 1]}"


@every_scenario
@pytest.mark.capability("OP-7")
def test_with_any_reply_lost_the_operator_comes_to_the_same_end(tmp_path, scenario):
    pictures, writes = undisturbed(scenario)

    for position, write in enumerate(writes):
        method, _, path = write.partition(" ")
        earlier = sum(1 for one in writes[:position] if one == write)

        def prepare(
            cluster: SimulatedCluster, method: str = method, path: str = path, earlier: int = earlier
        ) -> OperatorProcess:
            cluster.server.fail(method=method, path=f"^{path}$", lose_reply=True, skip=earlier)
            return cluster.start_operator()

        after_loss, _ = live_through(scenario, tmp_path, prepare)

        assert after_loss == pictures, f"the reply to {write} was lost"
