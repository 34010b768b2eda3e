"""The benchmark of the operator starts from services that the operator's own plan finds at rest."""

from bench import operator_scale
from slipway_kube.resources import CONTROLLER_REVISIONS, INFERENCE_SERVICES, NETWORK_POLICIES, PODS
from slipway_operator.masters import GatewayKeys, Masters
from tests.operator.discovery import DiscoverableApiServer


def test_a_service_of_the_benchmark_has_its_pods_its_revision_and_its_status(tmp_path):
    (tmp_path / "current").write_text("a-key")
    server = DiscoverableApiServer()

    operator_scale.settle(server, 0, Masters(tmp_path), GatewayKeys(tmp_path))

    (service,) = server.objects(INFERENCE_SERVICES, operator_scale.NAMESPACE)
    assert service["status"]["readyReplicas"] == operator_scale.PODS_OF_A_SERVICE
    assert len(server.objects(PODS, operator_scale.NAMESPACE)) == operator_scale.PODS_OF_A_SERVICE
    assert len(server.objects(CONTROLLER_REVISIONS, operator_scale.NAMESPACE)) == 1
    assert len(server.objects(NETWORK_POLICIES, operator_scale.NAMESPACE)) == 1
