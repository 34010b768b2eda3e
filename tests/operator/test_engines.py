"""The operator watches Engines: a change reaches the services that name it; without the kind others lack nothing."""

import pytest

from slipway_api.crd import engine_manifest
from slipway_kube.resources import ENGINES
from tests.operator.simulated_cluster import SimulatedCluster, simulated_cluster
from tests.operator.virtual_time import run_in_virtual_time

pytestmark = pytest.mark.capability("OP-11")
VLLM = engine_manifest("vllm")["spec"]
RUNTIME = {"engine": "vllm"}


def put_engine(cluster: SimulatedCluster, **changes: object) -> None:
    cluster.server.put(ENGINES, {"metadata": {"name": "vllm"}, "spec": VLLM | changes})


def images(cluster: SimulatedCluster, service: str) -> set[str]:
    return {pod["spec"]["containers"][0]["image"] for pod in cluster.live(service)}


def test_a_service_serves_once_its_engine_is_there(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.start_operator()
            cluster.apply("chat", replicas=2, runtime=RUNTIME)
            await cluster.until(lambda: cluster.condition("chat", "Stalled").get("reason") == "EngineNotFound")
            assert "there is no Engine vllm (there is slipway)" in cluster.condition("chat", "Stalled")["message"]
            assert cluster.live("chat") == []

            put_engine(cluster)
            await cluster.until(lambda: len(cluster.serving("chat")) == 2, "two replicas")
            (pod, _) = cluster.live("chat")
            assert [one["name"] for one in pod["spec"]["containers"]] == ["server", "slipway-agent"]
            assert pod["spec"]["containers"][1]["image"] == "slipway/agent:test"
            await cluster.until(lambda: cluster.condition("chat", "Stalled") == {}, "no complaint")
            await cluster.quiet(5)
            assert await cluster.quiet(900) == [], "through two resyncs"

    run_in_virtual_time(story())


def test_a_changed_engine_replaces_the_replicas_and_a_deleted_one_does_not(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            put_engine(cluster)
            cluster.start_operator()
            cluster.apply("chat", replicas=1, runtime=RUNTIME)
            cluster.apply("other", replicas=1)
            await cluster.until(lambda: len(cluster.serving("chat")) == len(cluster.serving("other")) == 1)
            others = [pod["metadata"]["uid"] for pod in cluster.live("other")]

            put_engine(cluster, image="vllm:newer")
            await cluster.until(lambda: images(cluster, "chat") == {"vllm:newer"} and len(cluster.serving("chat")) == 1)
            assert [pod["metadata"]["uid"] for pod in cluster.live("other")] == others
            uids = [pod["metadata"]["uid"] for pod in cluster.live("chat")]

            cluster.server.delete(ENGINES, "", "vllm")
            await cluster.until(lambda: cluster.condition("chat", "Stalled").get("reason") == "EngineNotFound")
            assert cluster.condition("chat", "Ready")["status"] == "True"
            await cluster.quiet(60)
            assert [pod["metadata"]["uid"] for pod in cluster.live("chat")] == uids

            put_engine(cluster, image="vllm:newer")
            await cluster.until(lambda: cluster.condition("chat", "Stalled") == {})
            assert [pod["metadata"]["uid"] for pod in cluster.live("chat")] == uids

    run_in_virtual_time(story())


def test_a_new_leader_without_the_engine_replaces_nothing(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            put_engine(cluster)
            first = cluster.start_operator()
            cluster.apply("chat", replicas=1, runtime=RUNTIME)
            await cluster.until(lambda: len(cluster.serving("chat")) == 1)
            uids = [pod["metadata"]["uid"] for pod in cluster.live("chat")]

            first.kill()
            cluster.server.delete(ENGINES, "", "vllm")
            second = cluster.start_operator()
            await cluster.until(lambda: second.is_leader, "the lead")
            await cluster.until(lambda: cluster.condition("chat", "Stalled").get("reason") == "EngineNotFound")
            await cluster.quiet(60)
            assert [pod["metadata"]["uid"] for pod in cluster.live("chat")] == uids

    run_in_virtual_time(story())


@pytest.mark.parametrize(("status", "word"), [(404, "install the CRD"), (403, "the RBAC")])
def test_where_engines_cannot_be_listed_only_services_that_name_one_are_told(tmp_path, status, word):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            put_engine(cluster)
            cluster.server.fail(path="/engines$", status=status, times=10**9)
            operator = cluster.start_operator()
            cluster.apply("chat", replicas=1)
            cluster.apply("other", replicas=1, runtime=RUNTIME)
            await cluster.until(lambda: len(cluster.serving("chat")) == 1, "our own runtime serves")
            await cluster.until(lambda: cluster.condition("other", "Stalled").get("reason") == "EngineNotFound")
            assert word in cluster.condition("other", "Stalled")["message"]
            assert operator.manager.ready() == (True, "leading")

            cluster.server.faults.clear()
            await cluster.until(lambda: len(cluster.serving("other")) == 1, "the other one serves too")

    run_in_virtual_time(story())
