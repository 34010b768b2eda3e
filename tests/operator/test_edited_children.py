"""People delete and edit the Services, budgets and policies of our services: they are back within seconds.

review/control-plane.md 5; fault matrix "foreign children while a node drains": nothing watched children, so a deleted
one was missing until the resync, for up to ten minutes.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from slipway_api import names
from slipway_kube.resources import DISRUPTION_BUDGETS, EVENTS, NETWORK_POLICIES, SERVICES, Resource
from tests.operator.simulated_cluster import NAMESPACE, SimulatedCluster, simulated_cluster
from tests.operator.test_reconciling import ready
from tests.operator.virtual_time import run_in_virtual_time

pytestmark = pytest.mark.capability("OP-16")

SECONDS = 10.0  # within so many
CHILDREN = [(SERVICES, "chat"), (DISRUPTION_BUDGETS, "chat"), (NETWORK_POLICIES, "chat-replicas")]
Object = dict[str, Any]


def delete(cluster: SimulatedCluster, resource: Resource, name: str) -> None:
    cluster.server.delete(resource, NAMESPACE, name)


def change(deed: Callable[[Object], None]) -> Callable[[SimulatedCluster, Resource, str], None]:
    def edit(cluster: SimulatedCluster, resource: Resource, name: str) -> None:
        found = deepcopy(cluster.server.get(resource, NAMESPACE, name))
        assert found is not None
        deed(found)
        del found["metadata"]["resourceVersion"]
        cluster.server.put(resource, found)

    return edit


LABELS, OWNERS, SPEC = "metadata.labels", "metadata.ownerReferences", "spec"
DEEDS = {  # the deed, and the fields that the event names
    "deleted": (delete, ""),
    "label edited": (change(lambda it: it["metadata"]["labels"].update({names.LABEL_SERVICE: "mine"})), LABELS),
    "label of the watch removed": (change(lambda it: it["metadata"]["labels"].pop(names.LABEL_MANAGED_BY)), LABELS),
    "owner removed": (change(lambda it: it["metadata"].pop("ownerReferences")), OWNERS),
    "selector widened": (change(lambda it: widen(it["spec"])), SPEC),
}


def widen(spec: Object) -> None:
    """Add a label to the selector of the pods, whatever its name in this kind."""
    field = next(field for field in ("selector", "podSelector") if field in spec)
    spec[field]["added"] = "x"


def picture(cluster: SimulatedCluster) -> dict[str, Object]:
    """What people see of the children, without their versions."""
    found = {}
    for resource, name in CHILDREN:
        child = cluster.server.get(resource, NAMESPACE, name)
        if child is not None:
            meta = {part: child["metadata"].get(part) for part in ("labels", "annotations", "ownerReferences")}
            found[resource.kind] = {"metadata": meta, "spec": child["spec"]}
    return found


def notes(cluster: SimulatedCluster) -> list[str]:
    events = cluster.server.objects(EVENTS, NAMESPACE)
    return [event["note"] for event in events if event["reason"] == "ChildRestored"]


async def within_seconds(cluster: SimulatedCluster, condition: Callable[[], bool], what: str) -> None:
    began = cluster.time()
    await cluster.until(condition, what)
    assert cluster.time() - began <= SECONDS, f"{what} took {cluster.time() - began:.0f} s"


@pytest.mark.parametrize(("resource", "name"), CHILDREN, ids=[resource.kind for resource, _ in CHILDREN])
def test_a_child_that_somebody_deletes_or_edits_is_restored_within_seconds_with_one_event(tmp_path, resource, name):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=1)
            cluster.start_operator()
            await ready(cluster, replicas=1)
            await cluster.quiet(5)
            before = picture(cluster)
            assert set(before) == {one.kind for one, _ in CHILDREN}

            for deed, (do, fields) in DEEDS.items():
                do(cluster, resource, name)
                assert picture(cluster) != before
                await within_seconds(cluster, lambda: picture(cluster) == before, f"the child, {deed},")

                assert await cluster.quiet(10) == []
                how = f"edited ({fields}), and is restored" if fields else "deleted, and is created again"
                assert f"{resource.kind} {name} had been {how}" in notes(cluster)
                assert cluster.condition("chat", "Ready")["status"] == "True"
            assert len(notes(cluster)) == len({fields for _, fields in DEEDS.values()}), "a repetition is a series"

    run_in_virtual_time(story())


def test_a_foreign_service_in_place_of_a_deleted_one_is_reported_and_ours_is_back_once_it_is_gone(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=1)
            cluster.start_operator()
            await ready(cluster, replicas=1)
            await cluster.quiet(5)
            before = picture(cluster)
            delete(cluster, SERVICES, "chat")
            theirs = cluster.server.put(
                SERVICES,
                {"metadata": {"name": "chat", "namespace": NAMESPACE}, "spec": {"selector": {"app": "theirs"}}},
            )

            def conflict() -> bool:
                return cluster.condition("chat", "Stalled").get("reason") == "NameConflict"

            await within_seconds(cluster, conflict, "the conflict")
            await cluster.quiet(70)
            assert cluster.server.get(SERVICES, NAMESPACE, "chat") == theirs

            delete(cluster, SERVICES, "chat")
            await within_seconds(cluster, lambda: picture(cluster) == before, "our own Service")
            await within_seconds(cluster, lambda: not conflict(), "the end of the conflict")

    run_in_virtual_time(story())


def test_a_child_that_was_deleted_while_nobody_led_is_restored_by_the_next_leader(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=1)
            cluster.start_operator()
            await ready(cluster, replicas=1)
            before = picture(cluster)
            cluster.processes[-1].kill()
            for resource, name in CHILDREN:
                delete(cluster, resource, name)
            cluster.start_operator()
            await cluster.until(lambda: picture(cluster) == before, "all children")

    run_in_virtual_time(story())


def test_writes_of_ours_cause_no_reads_of_children(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=2)
            cluster.start_operator()
            await ready(cluster, replicas=2)
            await cluster.quiet(20)
            began = len(cluster.server.requests)
            cluster.apply("chat", replicas=3)  # changes the disruption budget
            await ready(cluster, replicas=3)
            await cluster.quiet(10)
            paths = {resource.path(NAMESPACE, name) for resource, name in CHILDREN}
            calls = [one for one in cluster.server.requests[began:] if one.path in paths]
            assert [call.method for call in calls] == ["PATCH"]
            assert notes(cluster) == []

    run_in_virtual_time(story())
