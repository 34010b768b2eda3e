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
from tests.operator.serving_cluster import ready, serving_cluster
from tests.operator.simulated_cluster import NAMESPACE, SimulatedCluster, simulated_cluster
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
        async with serving_cluster(tmp_path, replicas=1, quiet=5) as cluster:
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
        async with serving_cluster(tmp_path, replicas=1, quiet=5) as cluster:
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
        async with serving_cluster(tmp_path, replicas=1) as cluster:
            before = picture(cluster)
            cluster.processes[-1].kill()
            for resource, name in CHILDREN:
                delete(cluster, resource, name)
            cluster.start_operator()
            await cluster.until(lambda: picture(cluster) == before, "all children")

    run_in_virtual_time(story())


def test_writes_of_ours_cause_no_reads_of_children(tmp_path):
    async def story() -> None:
        async with serving_cluster(tmp_path, replicas=2, quiet=20) as cluster:
            began = len(cluster.server.requests)
            cluster.apply("chat", replicas=3)  # changes the disruption budget
            await ready(cluster, replicas=3)
            await cluster.quiet(10)
            paths = {resource.path(NAMESPACE, name) for resource, name in CHILDREN}
            calls = [one for one in cluster.server.requests[began:] if one.path in paths]
            assert [call.method for call in calls] == ["PATCH"]
            assert notes(cluster) == []

    run_in_virtual_time(story())


def test_without_the_right_to_watch_children_the_refusal_is_named_and_the_resync_restores(tmp_path):
    """An operator of this version with the rights of an earlier chart."""

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.server.fail(method="GET", path=r"/services$", status=403, times=100_000)
            cluster.apply("chat", replicas=1)
            operator = cluster.start_operator()
            await ready(cluster, replicas=1)
            await cluster.quiet(20)
            before = picture(cluster)
            assert "services" in operator.manager.ready()[1]

            delete(cluster, SERVICES, "chat")
            await cluster.until(lambda: picture(cluster) == before, "the Service, at the resync")
            assert cluster.condition("chat", "Ready")["status"] == "True"

    run_in_virtual_time(story())


def test_a_foreign_network_policy_in_the_way_is_reported_and_stops_nothing_else(tmp_path):
    """Issue 26, OP-16."""

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            theirs = cluster.server.put(
                NETWORK_POLICIES,
                {"metadata": {"name": "chat-replicas", "namespace": NAMESPACE}, "spec": {"podSelector": {}}},
            )
            cluster.apply("chat", replicas=1)
            cluster.start_operator()
            await ready(cluster, replicas=1)
            await cluster.quiet(20)

            assert cluster.server.get(NETWORK_POLICIES, NAMESPACE, "chat-replicas") == theirs
            assert set(picture(cluster)) == {one.kind for one, _ in CHILDREN}, "the Service and the budget are there"
            stalled = cluster.condition("chat", "Stalled")
            assert stalled["reason"] == "NameConflict"
            assert "NetworkPolicy chat-replicas" in stalled["message"]

            delete(cluster, NETWORK_POLICIES, "chat-replicas")
            await within_seconds(cluster, lambda: not cluster.condition("chat", "Stalled"), "the end of the conflict")
            policy = cluster.server.get(NETWORK_POLICIES, NAMESPACE, "chat-replicas")
            assert policy is not None
            assert policy["metadata"]["labels"][names.LABEL_SERVICE] == "chat"

    run_in_virtual_time(story())


@pytest.mark.parametrize(
    "kind", ["pods", "services", "poddisruptionbudgets", "controllerrevisions", "inferenceservices"]
)
def test_a_lost_right_to_write_is_reported_stops_nothing_else_and_is_forgotten_when_it_is_back(tmp_path, kind):
    """Issue 26, OP-16: RBAC for one kind is removed while a new revision rolls out."""

    async def story() -> None:
        async with serving_cluster(tmp_path, replicas=2) as cluster:
            cluster.apply("other", replicas=1)
            await ready(cluster, "other", replicas=1)
            await cluster.quiet(20)

            message = f'{kind} is forbidden: User "slipway-operator" cannot write'
            faults = [
                cluster.server.fail(
                    method=method, path=f"/team/{kind}", status=403, reason="Forbidden", message=message, times=100_000
                )
                for method in ("POST", "PATCH", "DELETE")
            ]
            cluster.apply("chat", replicas=3, runtime={"maxModelLen": 512})
            cluster.apply("other", replicas=1, runtime={"maxModelLen": 512})
            await cluster.quiet(120)
            assert len(cluster.serving("chat")) >= 2, "a lost right takes no replica away"
            assert len(cluster.serving("other")) >= 1
            if kind in ("pods", "controllerrevisions"):
                assert cluster.condition("chat", "Stalled").get("reason") == "Refused"

            for fault in faults:
                fault.times = 0
            await ready(cluster, replicas=3)
            await ready(cluster, "other", replicas=1)
            await cluster.until(lambda: not cluster.condition("chat", "Stalled"), "the end of the refusal")
            await cluster.until(lambda: len(cluster.pods("chat")) == 3, "the end of the rollout")

    run_in_virtual_time(story())
