"""The benchmark of the operator starts from a fleet that the operator's own plans find at rest."""

import pytest

from bench import settled_fleet
from bench.settled_fleet import NAMESPACE, PODS_OF_A_SERVICE, Fleet
from slipway_api import names
from slipway_kube.resources import (
    CONFIG_MAPS,
    CONTROLLER_REVISIONS,
    INFERENCE_SERVICES,
    LORA_ADAPTERS,
    NETWORK_POLICIES,
    PODS,
    WARM_POOLS,
)
from slipway_operator.masters import GatewayKeys, Masters
from tests.operator.discovery import DiscoverableApiServer


@pytest.fixture
def fleet(tmp_path):
    (tmp_path / "current").write_text("a-key")
    return Fleet(DiscoverableApiServer(), Masters(tmp_path), GatewayKeys(tmp_path))


def test_a_service_of_the_benchmark_has_its_pods_its_revision_and_its_status(fleet):
    settled_fleet.settle_service(fleet, "chat-0")

    (service,) = fleet.server.objects(INFERENCE_SERVICES, NAMESPACE)
    assert service["status"]["readyReplicas"] == PODS_OF_A_SERVICE
    assert len(fleet.server.objects(PODS, NAMESPACE)) == PODS_OF_A_SERVICE
    assert len(fleet.server.objects(CONTROLLER_REVISIONS, NAMESPACE)) == 1
    assert len(fleet.server.objects(NETWORK_POLICIES, NAMESPACE)) == 1


def test_adapters_of_the_benchmark_are_loaded_and_routed_on_all_replicas(fleet):
    settled_fleet.settle_adapters(fleet, "chat-0", ["sailor", "baker"])

    adapters = fleet.server.objects(LORA_ADAPTERS, NAMESPACE)
    assert [one["status"]["loaded"] for one in adapters] == [f"{PODS_OF_A_SERVICE}/{PODS_OF_A_SERVICE}"] * 2
    (service,) = fleet.server.objects(INFERENCE_SERVICES, NAMESPACE)
    assert service["status"]["adapters"] == {"desired": 2, "ready": 2}
    assert len(fleet.server.objects(CONFIG_MAPS, NAMESPACE)) == 1
    for pod in fleet.server.objects(PODS, NAMESPACE):
        assert pod["metadata"]["annotations"][names.ANNOTATION_ADAPTERS] == "baker,sailor"
        assert set(fleet.replica_at(pod["status"]["podIP"]).adapters.adapters) == {"baker", "sailor"}


def test_pools_of_the_benchmark_have_pods_that_can_be_claimed(fleet):
    settled_fleet.settle_pool(fleet, "pool-0")

    (pool,) = fleet.server.objects(WARM_POOLS, NAMESPACE)
    assert pool["status"]["ready"] == settled_fleet.PODS_OF_A_POOL
    for pod in fleet.server.objects(PODS, NAMESPACE):
        assert fleet.replica_at(pod["status"]["podIP"]).signals.starting == "NoModel"
