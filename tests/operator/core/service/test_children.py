"""The Kubernetes Service and the disruption budget."""

import pytest

from slipway_operator.core.service.children import children, disruption_budget, kube_service
from tests.builders import UID, a_service


@pytest.mark.capability("OP-2")
def test_service_leads_to_replicas_that_serve():
    manifest = kube_service(a_service())

    assert manifest["spec"]["selector"] == {"slipway.dev/service": "chat", "slipway.dev/state": "serving"}
    assert manifest["spec"]["ports"] == [{"name": "http", "port": 80, "targetPort": 8000, "protocol": "TCP"}]
    assert manifest["metadata"]["ownerReferences"][0]["uid"] == UID


@pytest.mark.parametrize(("desired", "expected"), [(0, 0), (1, 1), (2, 1), (5, 4)])
def test_budget_lets_one_replica_go_but_never_the_only_one(desired, expected):
    spec = disruption_budget(a_service(), desired)["spec"]

    assert spec["minAvailable"] == expected
    assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_what_is_applied_already_is_left_out():
    first = children(a_service(), desired=2, applied={})
    applied = {child.key: child.digest for child in first}

    assert [child.key for child in first] == ["PodDisruptionBudget/chat", "Service/chat"]
    assert children(a_service(), desired=2, applied=applied) == ()
    assert [child.key for child in children(a_service(), desired=3, applied=applied)] == ["PodDisruptionBudget/chat"]
