"""An operator of several namespaces: one that may not be read, or is being deleted, never stops the others.

review/operator-users.md 1 and 2.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from slipway_api import names
from slipway_kube.resources import (
    CONTROLLER_REVISIONS,
    INFERENCE_SERVICES,
    LORA_ADAPTERS,
    NAMESPACES,
    PODS,
    WARM_POOLS,
)
from tests.operator.simulated_cluster import SimulatedCluster, simulated_cluster
from tests.operator.virtual_time import run_in_virtual_time

pytestmark = pytest.mark.capability("OP-17")

WATCHED = ("a", "b", "c")
RESOURCES = {one.plural: one for one in (PODS, CONTROLLER_REVISIONS, INFERENCE_SERVICES, LORA_ADAPTERS, WARM_POOLS)}
A_SERVICE_READS = {"pods", "controllerrevisions", "inferenceservices"}

refusals = st.sets(st.tuples(st.sampled_from(WATCHED), st.sampled_from(sorted(RESOURCES))), max_size=6) | st.sets(
    st.sampled_from(WATCHED), max_size=3
).map(lambda gone: {(namespace, resource) for namespace in gone for resource in RESOURCES})
"""Single lists that a Role does not allow, or namespaces whose Roles are gone."""


def refuse(cluster: SimulatedCluster, refused: set[tuple[str, str]]) -> None:
    cluster.server.faults.clear()
    for namespace, resource in sorted(refused):
        path = f"/namespaces/{namespace}/{resource}(/|$)"
        cluster.server.fail(path=path, status=403, times=10**9, message=f"cannot list {resource}")


def apply(cluster: SimulatedCluster, namespace: str, replicas: int) -> None:
    old = cluster.server.get(INFERENCE_SERVICES, namespace, "chat")
    body: dict[str, Any] = old or {"metadata": {"name": "chat", "namespace": namespace}, "spec": {}}
    spec = {
        "model": {"uri": "file:///models/tiny"},
        "resources": {"gpu": {"count": 0}},
        "drain": {"timeoutSeconds": 30, "endpointPropagationSeconds": 1},
        "replicas": replicas,
    }
    cluster.server.put(INFERENCE_SERVICES, body | {"spec": body["spec"] | spec})


def ready(cluster: SimulatedCluster, namespace: str) -> int:
    service = cluster.server.get(INFERENCE_SERVICES, namespace, "chat") or {}
    return int(service.get("status", {}).get("readyReplicas") or 0)


def pods(cluster: SimulatedCluster, namespace: str) -> int:
    return len(cluster.server.objects(PODS, namespace))


def readable(refused: set[tuple[str, str]]) -> set[str]:
    return {
        namespace
        for namespace in WATCHED
        if not A_SERVICE_READS & {what for place, what in refused if place == namespace}
    }


def every_resource_is_listed_somewhere(refused: set[tuple[str, str]]) -> bool:
    """Otherwise the operator's own rights are at fault, and it waits."""
    kinds = {"inferenceservices", "loraadapters", "warmpools"}
    blind = {what for what in RESOURCES if all((namespace, what) in refused for namespace in WATCHED)}
    return not blind & {"pods", "controllerrevisions"} and bool(kinds - blind)


@settings(max_examples=5)
@given(at_start=refusals, later=refusals)
def test_services_of_readable_namespaces_are_served_by_leader_and_successor(tmp_path_factory, at_start, later):
    async def story() -> None:
        async with simulated_cluster(tmp_path_factory.mktemp("keys")) as cluster:
            refuse(cluster, at_start)
            for namespace in WATCHED:
                apply(cluster, namespace, 1)
            leader = cluster.start_operator(watch_namespaces=WATCHED)
            standby = cluster.start_operator(watch_namespaces=WATCHED)
            await cluster.quiet(60)
            works = every_resource_is_listed_somewhere(at_start)
            for process in (leader, standby):
                is_ready, sentence = process.manager.ready()
                assert is_ready is works, sentence
                assert all(f"namespace {namespace}" in sentence for namespace, _resource in at_start), sentence
            for namespace in WATCHED:
                assert ready(cluster, namespace) == int(works and namespace in readable(at_start))
                assert pods(cluster, namespace) == int(works and namespace in readable(at_start)), "none without sight"
            assert refused_lists(leader) == at_start

            await cluster.quiet(900)
            for process in (leader, standby):
                assert process.manager.alive() == (True, "ok"), "a server that refuses is not silent"
                assert not process.lost

            if not works:
                refuse(cluster, set())
                await cluster.quiet(60)
            before = {namespace: pods(cluster, namespace) for namespace in WATCHED}
            first, second = (leader, standby) if leader.is_leader else (standby, leader)
            assert first.is_leader
            refuse(cluster, later)
            cluster.server.drop_watches()
            await cluster.quiet(60)
            first.kill()
            await cluster.until(lambda: second.is_leader, "the successor")
            for namespace in WATCHED:
                apply(cluster, namespace, 2)
            await cluster.quiet(60)
            for namespace in WATCHED:
                if namespace in readable(later):
                    assert ready(cluster, namespace) == 2
                else:
                    assert pods(cluster, namespace) == before[namespace], "an unreadable namespace is left as it is"
            assert second.manager.ready()[0]

            refuse(cluster, set())
            await cluster.quiet(120)
            assert [ready(cluster, namespace) for namespace in WATCHED] == [2, 2, 2]
            assert second.manager.ready() == (True, "leading")
            assert refused_lists(second) == set()

    run_in_virtual_time(story())


def refused_lists(process: Any) -> set[tuple[str, str]]:
    return {
        (sample.labels["namespace"], sample.labels["resource"])
        for family in text_string_to_metric_families(process.metrics.exposition().decode())
        for sample in family.samples
        if sample.name == "slipway_operator_list_refused"
    }


@pytest.mark.parametrize("sees_pods", [True, False], ids=["while it watches", "after a restart"])
def test_a_namespace_with_a_service_goes_although_its_role_went_first(tmp_path, sees_pods):
    """The namespace controller deletes RoleBindings, services and pods in any order."""

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            apply(cluster, "a", 1)
            apply(cluster, "b", 1)
            operator = cluster.start_operator(watch_namespaces=WATCHED)
            await cluster.until(lambda: ready(cluster, "b") == 1, "the service")

            cluster.server.put(NAMESPACES, {"metadata": {"name": "b", "finalizers": ["kubernetes"]}})
            cluster.server.delete(NAMESPACES, "", "b")
            # All that the ClusterRole does not grant is gone with the Role.
            kept = "(inferenceservices|loraadapters|warmpools)(/[^/]*)?$"
            cluster.server.fail(path=f"/namespaces/b/(?!{kept})", status=403, times=10**9)
            if not sees_pods:
                operator.kill()
            cluster.server.delete(INFERENCE_SERVICES, "b", "chat")
            for pod in cluster.server.objects(PODS, "b"):
                cluster.server.delete(PODS, "b", pod["metadata"]["name"])
            if not sees_pods:
                operator = cluster.start_operator(watch_namespaces=WATCHED)
            gone = lambda: cluster.server.get(INFERENCE_SERVICES, "b", "chat") is None  # noqa: E731
            await cluster.until(gone, "the end of the service")
            apply(cluster, "a", 2)
            await cluster.until(lambda: ready(cluster, "a") == 2, "the other namespace")
            assert operator.manager.ready()[0]

    run_in_virtual_time(story())


def test_a_service_that_is_deleted_in_a_living_namespace_that_may_not_be_read_keeps_its_finalizer(tmp_path):
    """Its replicas may still answer requests: they drain as soon as the Role is back."""

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            apply(cluster, "b", 1)
            cluster.server.put(NAMESPACES, {"metadata": {"name": "b"}})
            cluster.start_operator(watch_namespaces=WATCHED)
            await cluster.until(lambda: ready(cluster, "b") == 1, "the service")
            refuse(cluster, {("b", "pods")})
            cluster.server.drop_watches()
            await cluster.quiet(60)
            cluster.server.delete(INFERENCE_SERVICES, "b", "chat")
            await cluster.quiet(120)
            found = cluster.server.get(INFERENCE_SERVICES, "b", "chat")
            assert found is not None
            assert names.FINALIZER in found["metadata"]["finalizers"]
            refuse(cluster, set())
            gone = lambda: cluster.server.get(INFERENCE_SERVICES, "b", "chat") is None  # noqa: E731
            await cluster.until(gone, "the end of the service")

    run_in_virtual_time(story())
