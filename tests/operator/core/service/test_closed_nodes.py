"""A replacement is never placed on the node that the old replica has to leave."""

import pytest

from slipway_operator.core.service.replicas.pod import _away_from

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


@pytest.mark.capability("OP-16")
@pytest.mark.parametrize("terms", [[], [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}, {}]])
def test_every_alternative_of_the_users_affinity_excludes_cordoned_nodes(terms):
    """review/control-plane.md 10: 53 pods in an hour, because each replacement tolerated the cordoned node."""
    affinity = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}} if terms else {}
    closed = _away_from(affinity, ["a", "b"])["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert len(closed) == 1, "an empty term matches no node, and opens none"
    for term in closed:
        assert [(one["operator"], one["values"]) for one in term["matchFields"]] == [("NotIn", ["a"]), ("NotIn", ["b"])]
