"""The kind in Python: what is left out is resolved in one place, what is unknown is survived."""

from decimal import Decimal

import pytest

from slipway_api.inference_service import InferenceService


def a_manifest(**spec):
    return {
        "apiVersion": "slipway.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "chat", "namespace": "team", "uid": "u", "generation": 3},
        "spec": {"model": {"uri": "hf://org/model"}} | spec,
    }


def parse(**spec) -> InferenceService:
    return InferenceService.parse(a_manifest(**spec))


def test_the_served_name_defaults_to_the_name_of_the_resource():
    assert parse().served_name == "chat"
    assert parse(model={"uri": "hf://org/model", "servedName": "llama"}).served_name == "llama"


@pytest.mark.parametrize(
    ("spec", "replicas"),
    [
        ({}, 1),
        ({"replicas": 3}, 3),
        ({"replicas": 0}, 0),
        ({"autoscaling": {"maxReplicas": 4}}, None),
        ({"autoscaling": {"mode": "External", "maxReplicas": 4}, "replicas": 2}, 2),
        ({"autoscaling": {"mode": "Advisory", "maxReplicas": 4}, "replicas": 2}, 2),
        ({"autoscaling": {"mode": "Advisory", "maxReplicas": 4}}, None),
        ({"autoscaling": {"mode": "Paused", "maxReplicas": 4}}, None),
    ],
)
def test_the_number_of_replicas_is_fixed_unless_the_autoscaler_decides(spec, replicas):
    assert parse(**spec).fixed_replicas == replicas


def test_an_older_operator_survives_a_newer_resource():
    manifest = a_manifest(warmPool={"name": "a"}, drain={"timeoutSeconds": 60, "handover": True})
    manifest["status"] = {"replicas": 2, "failedRevision": "x"}

    service = InferenceService.parse(manifest)

    assert service.spec.drain.timeout_seconds == 60
    assert service.status.replicas == 2


def test_decimals_print_as_the_user_typed_them():
    service = parse(autoscaling={"maxReplicas": 2, "metrics": [{"type": "KVCacheUtilization", "target": "0.70"}]})
    (metric,) = service.spec.autoscaling.metrics

    assert metric.target == Decimal("0.7")
    assert str(metric.target) == "0.70"
    assert service.spec.to_json()["autoscaling"]["metrics"] == [{"type": "KVCacheUtilization", "target": "0.70"}]


def test_the_pool_size_is_read_as_bytes():
    service = parse(runtime={"kvCache": {"bytes": "64Mi"}})

    assert service.spec.runtime.kv_cache.fixed_bytes == 64 * 1024**2
    assert parse().spec.runtime.kv_cache.fixed_bytes is None


def test_what_is_absent_stays_absent():
    spec = parse().spec.to_json()

    assert "replicas" not in spec
    assert "autoscaling" not in spec


def test_a_resource_that_waits_for_its_drain_says_so():
    manifest = a_manifest()
    manifest["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"

    assert InferenceService.parse(manifest).is_being_deleted
    assert not parse().is_being_deleted


def test_the_key_names_namespace_and_name():
    assert parse().key == ("team", "chat")
