"""The API server checks each block where it is written, and no rule between blocks of two objects."""

import json
from typing import Any

import pytest

from e2e.cluster.access import Access, CommandError
from slipway_api.inference_service import InferenceService
from slipway_api.service_template import BLOCKS
from slipway_api.spec_rules import MERGED_RULES, find_broken_rules
from tests.api.manifests import a_manifest, assert_refused

pytestmark = [pytest.mark.apiserver, pytest.mark.capability("OP-15")]

CANARY = {"strategy": "Canary", "canary": {"steps": [{"setWeight": 100}]}}
SMOKE = {"smoke": [{"prompt": "1+1=", "mustMatch": "2"}]}
ON_CPU = {"gpu": {"count": 0}, "limits": {"memory": "1Gi"}}
# Each row: the spec, and the index of the rule that it breaks; None: it breaks none.
SPECS: list[tuple[dict[str, Any], int | None]] = [
    ({"resources": {"gpu": {"count": 2}}}, 0),
    ({"resources": {"gpu": {"count": 2}}, "runtime": {"tensorParallelSize": 2}}, None),
    ({"resources": {"gpu": {"count": 0}}, "runtime": {"tensorParallelSize": 2}}, None),
    ({"resources": ON_CPU, "runtime": {"kvCache": {"bytes": "1Gi"}}}, 1),
    ({"resources": ON_CPU, "runtime": {"kvCache": {"bytes": "1023Mi"}}}, None),
    ({"resources": {"limits": {"memory": "1Gi"}}, "runtime": {"kvCache": {"bytes": "1Gi"}}}, None),
    ({"resources": ON_CPU, "runtime": {"kvCache": {"hostBytes": "2Gi"}}}, 2),
    ({"resources": ON_CPU, "runtime": {"kvCache": {"hostBytes": "1G"}}}, None),
    ({"autoscaling": {"maxReplicas": 3}, "replicas": 2}, 3),
    ({"autoscaling": {"maxReplicas": 3, "mode": "Advisory"}, "replicas": 2}, None),
    ({"budget": {"maxGPUs": 1}, "resources": {"gpu": {"count": 2}}, "runtime": {"tensorParallelSize": 2}}, 4),
    ({"budget": {"maxGPUs": 1}, "resources": {}, "autoscaling": {"maxReplicas": 9}}, None),
    ({"budget": {"maxGPUs": 2}, "resources": {}, "replicas": 3}, 5),
    ({"budget": {"maxGPUs": 3}, "resources": {}, "replicas": 3}, None),
    ({"rollout": {"strategy": "BlueGreen"}, "replicas": 2}, 6),
    ({"rollout": {"strategy": "BlueGreen", "rollingUpdate": {"maxSurge": 2}}, "replicas": 2}, None),
    ({"rollout": CANARY, "runtime": {"quantization": "int8"}}, 7),
    ({"rollout": {**CANARY, "gates": SMOKE}, "runtime": {"quantization": "int8"}}, None),
    ({"rollout": {"gates": SMOKE}, "runtime": {"task": "embed"}}, 8),
    ({"rollout": {}, "runtime": {"task": "embed"}}, None),
]


def is_taken(api: Access, manifest: dict[str, Any]) -> tuple[bool, str]:
    try:
        api.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(manifest))
    except CommandError as refused:
        return False, refused.stderr
    return True, ""


def test_every_rule_between_blocks_has_a_spec_that_breaks_it():
    assert {rule for _, rule in SPECS if rule is not None} == set(range(len(MERGED_RULES)))


@pytest.mark.parametrize(("spec", "rule"), SPECS, ids=[f"{i}-{rule}" for i, (_, rule) in enumerate(SPECS)])
def test_the_operator_and_the_api_server_judge_alike_and_a_block_left_to_a_template_is_not_judged(api, spec, rule):
    taken, answer = is_taken(api, a_manifest("judged", **spec))
    parsed = InferenceService.parse({"metadata": {"name": "judged"}, "spec": {"model": {"uri": "hf://a/b@c"}, **spec}})
    broken = [MERGED_RULES.index(one) for one in find_broken_rules(parsed.spec, BLOCKS)]

    assert broken == ([] if rule is None else [rule])
    assert taken == (rule is None), answer
    if rule is not None:
        assert MERGED_RULES[rule].rule.message in answer
    left_out = {name: value for name, value in spec.items() if name not in BLOCKS}
    assert is_taken(api, a_manifest("judged", baseRefs=[{"name": "gold"}], **left_out)) == (True, "")


def a_template(**spec: Any) -> dict[str, Any]:
    return {"apiVersion": "slipway.dev/v1alpha1", "kind": "ServiceTemplate", "metadata": {"name": "gold"}, "spec": spec}


FAULTY: list[tuple[str, dict[str, Any], str]] = [
    ("a drain that ends too early", {"drain": {"timeoutSeconds": 1}}, "must be below timeoutSeconds"),
    ("a canary without steps", {"rollout": {"strategy": "Canary"}}, "strategy Canary needs canary with its steps"),
    ("no limit of replicas", {"autoscaling": {}}, "spec.autoscaling.maxReplicas: Required value"),
    ("a GPU among the requests", {"resources": {"requests": {"nvidia.com/gpu": "1"}}}, "resources.gpu"),
    ("an empty budget", {"budget": {}}, "a budget needs maxGPUs"),
]


@pytest.mark.parametrize(("what", "spec", "sentence"), FAULTY, ids=[one[0] for one in FAULTY])
def test_a_template_is_checked_when_it_is_written(api, what, spec, sentence):
    taken, answer = is_taken(api, a_template(**spec))

    assert not taken
    assert sentence in answer


@pytest.mark.parametrize("field", ["model", "runtime", "routing", "replicas", "suspend", "baseRefs", "warmPool"])
def test_a_template_has_no_field_that_belongs_to_the_service(api, field):
    manifest = json.dumps(a_template(**{field: {}}))

    with pytest.raises(CommandError) as refused:
        api.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=manifest)

    assert f'unknown field "spec.{field}"' in refused.value.stderr


def test_with_an_empty_list_of_references_every_rule_is_checked(api):
    spec = {"baseRefs": [], "runtime": {"tensorParallelSize": 2}}

    assert_refused(api, a_manifest("empty", **spec), "resources.gpu.count must be 0 (CPU) or equal")
