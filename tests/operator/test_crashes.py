"""kill -9 at every write of a service's whole life, and every reply lost once: the same end, and no extra pod.

The life: apply with one replica, scale to two, change the model, delete. A run without faults counts the writes; each
other run is the same life with one fault. A killed operator is followed by a new one, which has to wait for the Lease.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipway_api import names
from slipway_kube.resources import CONTROLLER_REVISIONS, DISRUPTION_BUDGETS, SERVICES
from tests.operator.town import NAMESPACE, Process, Town, a_town
from tests.operator.virtual_time import run_in_virtual_time

SURGE = 1


def picture(town: Town) -> dict[str, Any]:
    """The state of the world, without times and versions."""
    status = town.status("chat")
    return {
        "pods": sorted(
            (pod["metadata"]["name"], pod["metadata"]["labels"][names.LABEL_STATE]) for pod in town.pods("chat")
        ),
        "finalizers": town.service("chat")["metadata"]["finalizers"],
        "services": [one["spec"] for one in town.server.objects(SERVICES, NAMESPACE)],
        "revisions": [
            (one["metadata"]["name"], one["revision"], one["data"])
            for one in town.server.objects(CONTROLLER_REVISIONS, NAMESPACE)
        ],
        "budgets": [one["spec"] for one in town.server.objects(DISRUPTION_BUDGETS, NAMESPACE)],
        "status": {key: status.get(key) for key in ("replicas", "readyReplicas", "desiredReplicas", "currentRevision")},
    }


def is_settled(town: Town, replicas: int) -> bool:
    status, service = town.status("chat"), town.service("chat")
    remembered = {f"chat-{one['hash']}" for one in status.get("revisions", ())}
    return (
        {one["metadata"]["name"] for one in town.server.objects(CONTROLLER_REVISIONS, NAMESPACE)} == remembered
        and len(town.serving("chat")) == replicas == len(town.pods("chat"))
        and status.get("readyReplicas") == replicas == status.get("replicas")
        and status.get("currentRevision") == status.get("updateRevision")
        and status.get("observedGeneration") == service["metadata"]["generation"]
    )


def live_through(tmp_path: Path, prepare: Callable[[Town], Process]) -> tuple[list[dict[str, Any]], Process]:
    """The whole life. Returns a picture after each part, and the first operator."""

    async def story() -> tuple[list[dict[str, Any]], Process]:
        async with a_town(tmp_path) as town:
            first = prepare(town)

            async def part(replicas: int, most_pods: int) -> dict[str, Any]:
                town.most_live_pods = 0
                await until(lambda: is_settled(town, replicas), f"{replicas} settled replicas")
                await until_quiet()
                assert town.most_live_pods <= most_pods, "a pod too many"
                return picture(town)

            async def until(condition: Callable[[], bool], what: str) -> None:
                def holds() -> bool:
                    if town.processes[-1].is_dead:
                        town.start_operator()
                    return condition()

                await town.until(holds, what)

            async def until_quiet() -> None:
                while await town.quiet(5):
                    await until(lambda: True, "a living operator")

            pictures = []
            town.apply("chat", replicas=1)
            pictures.append(await part(1, most_pods=1))
            town.apply("chat", replicas=2)
            pictures.append(await part(2, most_pods=2))
            town.apply("chat", model={"uri": "file:///models/other"}, rollout={"revisionHistoryLimit": 0})
            pictures.append(await part(2, most_pods=2 + SURGE))
            assert len(pictures[-1]["revisions"]) == 1, "the old one is beyond revisionHistoryLimit"
            town.delete("chat")
            await until(lambda: town.service("chat") is None and not town.pods(), "the end of the service")
            await town.quiet(5)
            assert town.server.objects(SERVICES, NAMESPACE) == []
            assert town.server.objects(CONTROLLER_REVISIONS, NAMESPACE) == []
            return pictures, first

    return run_in_virtual_time(story())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return live_through(tmp_path_factory.mktemp("masters"), lambda town: town.start_operator())


def test_the_writes_include_those_of_the_revision_store(undisturbed):
    _, operator = undisturbed
    verbs = {write.partition(" ")[0] for write in operator.writes if "/controllerrevisions" in write}
    assert verbs == {"POST", "DELETE"}


@pytest.mark.capability("OP-7", "OP-13")
def test_killed_after_any_write_the_next_operator_comes_to_the_same_end(tmp_path, undisturbed):
    pictures, operator = undisturbed
    assert len(operator.writes) > 15

    for count in range(len(operator.writes) + 1):
        after_crash, _ = live_through(tmp_path, lambda town, n=count: town.start_operator(dies_after_writes=n))

        assert after_crash == pictures, f"killed after {count} writes, the last one {operator.writes[count - 1]}"


@pytest.mark.capability("OP-7")
def test_with_any_reply_lost_the_operator_comes_to_the_same_end(tmp_path, undisturbed):
    pictures, operator = undisturbed

    for position, write in enumerate(operator.writes):
        method, _, path = write.partition(" ")
        earlier = sum(1 for one in operator.writes[:position] if one == write)

        def prepare(town: Town, method: str = method, path: str = path, earlier: int = earlier) -> Process:
            town.server.fail(method=method, path=f"^{path}$", lose_reply=True, skip=earlier)
            return town.start_operator()

        after_loss, _ = live_through(tmp_path, prepare)

        assert after_loss == pictures, f"the reply to {write} was lost"
