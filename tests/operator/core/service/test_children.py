"""Kubernetes Service, disruption budget and network policy of a service's replicas."""

import pytest

from slipway_operator.core.installation import Network
from slipway_operator.core.service.children import children, disruption_budget, kube_service, network_policy
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


@pytest.mark.capability("PL-2", "RD-12")
def test_the_budget_changes_whenever_other_replicas_drain():
    """ADR 171, seen in `make chaos`: Kubernetes does not count again when a pod leaves a budget's selection."""

    def budget(*draining):
        (child,) = (
            one for one in children(a_service(), desired=2, applied={}, draining=draining) if "Budget" in one.key
        )
        return child.digest

    digests = [budget(), budget("chat-0"), budget("chat-1"), budget("chat-0", "chat-1")]
    assert len(set(digests)) == 4
    assert budget("chat-1", "chat-0") == budget("chat-0", "chat-1")


NETWORK = Network(release_namespace="slipway-system", client_namespaces=("batch",), metrics_namespaces=("monitoring",))
CONTROL = {
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "slipway-system"}},
    "podSelector": {
        "matchExpressions": [
            {"key": "app.kubernetes.io/component", "operator": "In", "values": ["operator", "gateway"]}
        ]
    },
}


def namespace(name):
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


@pytest.mark.capability("SE-2")
def test_the_admin_port_admits_operator_gateway_and_scrapers_alone():
    """Security finding: no network policy stood before the replicas."""
    manifest = network_policy(a_service(), NETWORK)

    assert manifest["metadata"]["name"] == "chat-replicas"
    assert manifest["metadata"]["ownerReferences"][0]["uid"] == UID
    assert manifest["spec"]["podSelector"] == {"matchLabels": {"slipway.dev/service": "chat"}}
    assert manifest["spec"]["policyTypes"] == ["Ingress"]
    assert manifest["spec"]["ingress"][1] == {
        "ports": [{"port": 8001, "protocol": "TCP"}],
        "from": [CONTROL, namespace("monitoring")],
    }


def test_the_serving_port_is_open_or_admits_the_gateway_and_the_installations_clients():
    open_to_all = network_policy(a_service(), NETWORK)
    closed = network_policy(a_service(routing={"directAccess": "GatewayOnly"}), NETWORK)

    assert open_to_all["spec"]["ingress"][0] == {"ports": [{"port": 8000, "protocol": "TCP"}]}
    assert closed["spec"]["ingress"][0]["from"] == [CONTROL, namespace("batch")]


def test_an_installation_without_policies_gets_none():
    with_policy = children(a_service(), desired=1, applied={}, network=NETWORK)

    assert [child.key for child in with_policy] == [
        "NetworkPolicy/chat-replicas",
        "PodDisruptionBudget/chat",
        "Service/chat",
    ]
    assert [child.key for child in children(a_service(), desired=1, applied={})] == [
        "PodDisruptionBudget/chat",
        "Service/chat",
    ]
