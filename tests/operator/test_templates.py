"""The operator watches ServiceTemplates: a change reaches the services that name it, and no other."""

from typing import Any

import pytest

from slipway_kube.resources import SERVICE_TEMPLATES
from slipway_operator.controller.kinds import StoredObject
from slipway_operator.inputs.lora_adapters import base_of
from tests.operator.simulated_cluster import SimulatedCluster, simulated_cluster
from tests.operator.virtual_time import run_in_virtual_time

pytestmark = pytest.mark.capability("OP-15")
REFERENCES = [{"name": "gold"}]


def put_template(cluster: SimulatedCluster, **labels: str) -> None:
    spec = {"template": {"metadata": {"labels": labels}}}
    cluster.server.put(SERVICE_TEMPLATES, {"metadata": {"name": "gold"}, "spec": spec})


def teams(cluster: SimulatedCluster, service: str) -> set[str]:
    return {pod["metadata"]["labels"].get("team", "") for pod in cluster.live(service)}


def uids(cluster: SimulatedCluster, service: str) -> list[str]:
    return [pod["metadata"]["uid"] for pod in cluster.live(service)]


def is_stalled(cluster: SimulatedCluster, service: str) -> bool:
    return bool(cluster.condition(service, "Stalled").get("reason") == "TemplateNotFound")


def test_a_template_reaches_the_services_that_name_it_and_outlives_its_deletion_and_the_leader(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            first = cluster.start_operator()
            cluster.apply("chat", replicas=1, baseRefs=REFERENCES)
            cluster.apply("other", replicas=1)
            await cluster.until(lambda: is_stalled(cluster, "chat") and len(cluster.serving("other")) == 1)
            assert cluster.live("chat") == []
            others = uids(cluster, "other")

            put_template(cluster, team="a")
            await cluster.until(lambda: len(cluster.serving("chat")) == 1, "a replica")
            assert teams(cluster, "chat") == {"a"}
            put_template(cluster, team="b")
            await cluster.until(lambda: teams(cluster, "chat") == {"b"} and len(cluster.serving("chat")) == 1)
            assert uids(cluster, "other") == others
            served = uids(cluster, "chat")

            cluster.server.delete(SERVICE_TEMPLATES, "", "gold")
            await cluster.until(lambda: is_stalled(cluster, "chat"))
            first.kill()
            second = cluster.start_operator()
            await cluster.until(lambda: second.is_leader, "the lead")
            await cluster.quiet(60)
            assert uids(cluster, "chat") == served, "a new leader has the record in status"
            assert cluster.condition("chat", "Ready")["status"] == "True"

            put_template(cluster, team="b")
            await cluster.until(lambda: cluster.condition("chat", "Stalled") == {})
            assert uids(cluster, "chat") == served

    run_in_virtual_time(story())


@pytest.mark.parametrize(("status", "word"), [(404, "install the CRD"), (403, "the RBAC")])
def test_if_templates_cannot_be_listed_only_services_that_name_one_are_stalled(tmp_path, status, word):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            put_template(cluster, team="a")
            cluster.server.fail(path="/servicetemplates$", status=status, times=10**9)
            operator = cluster.start_operator()
            cluster.apply("chat", replicas=1)
            cluster.apply("other", replicas=1, baseRefs=REFERENCES)
            await cluster.until(lambda: len(cluster.serving("chat")) == 1, "a service without templates serves")
            await cluster.until(lambda: is_stalled(cluster, "other"))
            assert word in cluster.condition("other", "Stalled")["message"]
            assert operator.manager.ready() == (True, "leading")

            cluster.server.faults.clear()
            await cluster.until(lambda: len(cluster.serving("other")) == 1, "the other one serves too")

    run_in_virtual_time(story())


def test_readers_beside_the_plan_use_the_inherited_blocks():
    """An adapter waits for the propagation time of its base's drain block, which the template has."""
    body: dict[str, Any] = {
        "metadata": {"name": "chat", "namespace": "demo", "uid": "u"},
        "spec": {"model": {}, "baseRefs": REFERENCES},
        "status": {"inherited": {"drain": {"endpointPropagationSeconds": 11}}},
    }
    assert base_of(StoredObject("u", 1, body)).propagation_seconds == 11
