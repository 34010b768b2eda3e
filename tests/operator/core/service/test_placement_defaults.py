"""Pull secrets, nodeSelector and tolerations of the installation reach every pod that the operator builds.

review/operator-users.md 13.
"""

from dataclasses import replace

import pytest
from pydantic import ValidationError

from slipway_api.overlay import PodOverlay
from slipway_operator.core.actions import CreatePod
from slipway_operator.core.installation import PlacementDefaults
from slipway_operator.core.pulls import PullNode, PullsSeen
from slipway_operator.core.service.plan import plan
from slipway_operator.core.service.replicas.placement import fill_placement
from slipway_operator.core.warm_pool.plan import plan as plan_pool
from slipway_operator.settings import OperatorSettings, explain, installation_defaults
from tests.builders import DEFAULTS, T0, a_service, promised, seen
from tests.operator.core.warm_pool.pools import a_pool
from tests.operator.core.warm_pool.pools import seen as seen_pool

TAINT = {"key": "example.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
PLACEMENT = PlacementDefaults(
    image_pull_secrets=("registry",), node_selector={"pool": "gpu", "zone": "a"}, tolerations=(TAINT,)
)
WITH = replace(DEFAULTS, placement=PLACEMENT)
TAINTS = (("example.com/gpu", "", "NoSchedule"),)
FITTING = PullNode(
    name="fits", labels=dict(PLACEMENT.node_selector), taints=TAINTS, allocatable={"nvidia.com/gpu": "8"}
)
OTHER = PullNode(name="elsewhere", allocatable={"nvidia.com/gpu": "8"})


def created(actions):
    return [one.manifest["spec"] for one in actions if isinstance(one, CreatePod)]


def pods_of_service(**spec):
    """The replica's pod and the one that pulls, of the first pass."""
    service = promised(a_service(prePull={}, **spec), 1)
    observed = replace(seen(service), defaults=WITH, pulls=PullsSeen(nodes=(FITTING, OTHER)))
    return created(plan(observed, T0).actions)


@pytest.mark.capability("OP-16")
def test_the_defaults_reach_replicas_pods_that_pull_and_warm_pools():
    pods = pods_of_service()
    pool = created(plan_pool(replace(seen_pool(a_pool()), defaults=WITH), T0).actions)

    assert len(pods) == 2, "one replica, and one pod that pulls: on the only node that the defaults admit"
    assert pool
    for pod in (*pods, *pool):
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        assert TAINT in pod["tolerations"]
        assert pod.get("nodeSelector") == PLACEMENT.node_selector or "fits" in str(pod["affinity"])


def test_a_pod_that_fills_a_shared_claim_is_placed_as_replicas_are():
    """No node is chosen for it, so the scheduler needs the selector."""
    claim = {"cache": {"policy": "Shared", "claimName": "models"}}

    assert [pod["nodeSelector"] for pod in pods_of_service(model=claim)] == [PLACEMENT.node_selector] * 2


def test_an_entry_of_the_spec_replaces_the_default_of_the_same_key():
    mine = {"key": "example.com/gpu", "operator": "Equal", "value": "mine", "effect": "NoSchedule"}
    own = PodOverlay.model_validate(
        {
            "imagePullSecrets": [{"name": "registry"}, {"name": "team"}],
            "nodeSelector": {"zone": "b"},
            "tolerations": [mine],
        }
    )
    filled = fill_placement(own, PLACEMENT)

    assert [secret.name for secret in filled.image_pull_secrets] == ["registry", "team"]
    assert filled.node_selector == {"pool": "gpu", "zone": "b"}
    assert filled.tolerations == (mine,)
    assert fill_placement(filled, PLACEMENT) == filled
    assert fill_placement(own, PlacementDefaults()) == own


def test_the_setting_is_read_from_json_and_a_mistake_names_its_variable(monkeypatch):
    monkeypatch.setenv(
        "SLIPWAY_REPLICA_PLACEMENT", '{"image_pull_secrets": ["registry"], "node_selector": {"pool": "gpu"}}'
    )
    assert installation_defaults(OperatorSettings()).placement == PlacementDefaults(
        image_pull_secrets=("registry",), node_selector={"pool": "gpu"}
    )

    for wrong in ("{", '{"nodeSelector": {}}', '{"tolerations": "all"}', "[]"):
        monkeypatch.setenv("SLIPWAY_REPLICA_PLACEMENT", wrong)
        with pytest.raises(ValidationError) as refused:
            OperatorSettings()
        assert "SLIPWAY_REPLICA_PLACEMENT" in explain(refused.value) or "placement" in explain(refused.value)
