"""A stored service that cannot be read: its owner is told, its replicas serve on, and it can still be deleted."""

import pytest

from slipway_api import names
from slipway_kube.resources import EVENTS
from tests.operator.operator_process import OperatorProcess
from tests.operator.serving_cluster import ready
from tests.operator.simulated_cluster import NAMESPACE, SimulatedCluster, simulated_cluster
from tests.operator.virtual_time import run_in_virtual_time

WRONG = {"timeoutSeconds": 0}  # as an API server stores it that does not know this rule yet


async def invalid(cluster: SimulatedCluster) -> None:
    await cluster.until(lambda: cluster.condition("chat", "Stalled").get("reason") == "InvalidSpec", "the reason")


def warnings(cluster: SimulatedCluster) -> list[dict]:
    return [event for event in cluster.server.objects(EVENTS, NAMESPACE) if event["reason"] == "InvalidSpec"]


def passes(operator: OperatorProcess) -> float:
    [family] = operator.metrics.reconcile_seconds.collect()
    return next(sample.value for sample in family.samples if sample.name.endswith("_count"))


@pytest.mark.capability("OP-1", "OP-6")
def test_a_spec_that_cannot_be_read_is_told_once_and_its_replicas_serve_on(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=2)
            operator = cluster.start_operator()
            await ready(cluster, replicas=2)
            before = cluster.serving("chat")
            cluster.apply("chat", replicas=5, drain=WRONG)
            await invalid(cluster)

            for kind, status in (("Stalled", "True"), ("Ready", "False")):
                condition = cluster.condition("chat", kind)
                assert (condition["status"], condition["reason"]) == (status, "InvalidSpec")
                assert "spec.drain.timeoutSeconds" in condition["message"]
            assert cluster.status("chat")["observedGeneration"] == cluster.service("chat")["metadata"]["generation"]
            assert cluster.status("chat")["readyReplicas"] == 2
            assert cluster.condition("chat", "RouteReady")["status"] == "True"

            before_that = passes(operator)
            assert await cluster.quiet(200) == []
            assert passes(operator) - before_that < 10, "nothing wakes it but changes"
            assert cluster.serving("chat") == before
            assert len(warnings(cluster)) == 1
            assert warnings(cluster)[0]["type"] == "Warning"
            assert not warnings(cluster)[0].get("series")

    run_in_virtual_time(story())


@pytest.mark.capability("OP-1")
def test_a_corrected_spec_goes_on_where_it_was(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=2)
            cluster.start_operator()
            await ready(cluster, replicas=2)
            before = cluster.serving("chat")
            cluster.apply("chat", drain=WRONG)
            await invalid(cluster)
            cluster.apply("chat", drain={"timeoutSeconds": 30, "endpointPropagationSeconds": 1})
            await ready(cluster, replicas=2)
            await cluster.until(lambda: cluster.condition("chat", "Ready")["status"] == "True", "Ready")

            assert cluster.condition("chat", "Stalled") == {}
            assert cluster.serving("chat") == before

    run_in_virtual_time(story())


def test_a_service_that_was_never_valid_gets_no_pod_and_no_finalizer(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=-1)
            cluster.start_operator()
            await invalid(cluster)
            await cluster.quiet(60)

            assert cluster.pods() == []
            assert not cluster.service("chat")["metadata"].get("finalizers")
            assert "spec.replicas" in cluster.condition("chat", "Ready")["message"]

            cluster.delete("chat")
            await cluster.until(lambda: cluster.service("chat") is None, "the end of the service")

    run_in_virtual_time(story())


def test_deleting_a_service_that_cannot_be_read_drains_its_replicas_and_leaves_nothing(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=2)
            cluster.start_operator()
            await ready(cluster, replicas=2)
            for name in cluster.serving("chat"):
                cluster.runtimes[name].running = 1
            cluster.apply("chat", drain=WRONG, model={})
            await invalid(cluster)
            cluster.delete("chat")
            await cluster.until(lambda: all(one.draining for one in cluster.runtimes.values()), "both drains")

            assert cluster.service("chat")["metadata"]["finalizers"] == [names.FINALIZER]

            for runtime in cluster.runtimes.values():
                runtime.running = 0
            await cluster.until(lambda: cluster.service("chat") is None, "the end of the service")
            await cluster.quiet(5)

            assert cluster.pods() == []

    run_in_virtual_time(story())
