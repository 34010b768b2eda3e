"""The rules of a LoRAAdapter, as the real API server enforces them."""

import json
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.access import Access

pytestmark = pytest.mark.apiserver

ROOT = Path(__file__).resolve().parents[2]


def manifest(name: str = "sailor", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "slipway.dev/v1alpha1",
        "kind": "LoRAAdapter",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"baseRef": {"name": "chat"}, "source": {"uri": "s3://bucket/sailor"}} | spec,
    }


def create(apiserver: Access, body: dict[str, Any], *options: str) -> dict[str, Any]:
    created: dict[str, Any] = json.loads(
        apiserver.kubectl("create", "-o", "json", "-f", "-", *options, stdin=json.dumps(body))
    )
    return created


@pytest.fixture
def served(apiserver: Access) -> Access:
    apiserver.serve_kinds(ROOT / "crds")
    return apiserver


@pytest.mark.capability("OP-3")
def test_defaults_are_filled_in_and_what_depends_on_another_field_stays_absent(served: Access):
    spec = create(served, manifest(), "--dry-run=server")["spec"]

    assert spec["placement"] == {"mode": "All", "pin": False, "priority": 0}
    assert spec["unload"] == {"drainSeconds": 30}
    assert "adapterName" not in spec
    assert "weight" not in spec.get("alias", {})


REFUSED = [
    ({"source": {"uri": "ftp://host/x"}}, "uri must be"),
    ({"source": {"uri": "file:///x/../y"}}, "uri must be"),
    ({"source": {"uri": "file:///x", "digest": "sha256:1"}}, "digest must be"),
    ({"placement": {"mode": "Replicas"}}, "needs replicas"),
    ({"placement": {"mode": "OnDemand", "replicas": 2}}, "OnDemand takes no replicas"),
    ({"placement": {"mode": "OnDemand", "priority": 1001}}, "less than or equal to 1000"),
    ({"placement": {"mode": "Some"}}, "Unsupported value"),
    ({"alias": {"weight": 10}}, "alias.weight needs alias.name"),
    ({"alias": {"name": "a b", "weight": 10}}, "alias.name must be"),
    ({"adapterName": "a/b"}, "adapterName must be"),
    ({"adapterName": "a.next-b"}, "adapterName must be"),
    ({"baseRef": {"name": ""}}, "baseRef.name"),
]


@pytest.mark.capability("OP-3")
def test_what_makes_no_sense_is_refused_with_a_sentence(served: Access):
    answers = []
    for change, expected in REFUSED:
        try:
            create(served, manifest(**change), "--dry-run=server")
            answers.append((change, "accepted"))
        except Exception as exc:  # noqa: BLE001  whatever kubectl's failure is
            if expected not in str(exc):
                answers.append((change, str(exc)))

    assert answers == []


@pytest.mark.capability("OP-3")
def test_base_and_name_cannot_be_changed_and_the_columns_are_there(served: Access):
    create(served, manifest("fixed"))
    try:
        for patch in ({"baseRef": {"name": "other"}}, {"adapterName": "other"}):
            with pytest.raises(Exception, match="immutable"):
                served.kubectl(
                    "patch", "lora", "fixed", "-n", "default", "--type=merge", "-p", json.dumps({"spec": patch})
                )
        served.kubectl(
            "patch", "lora", "fixed", "-n", "default", "--type=merge",
            "-p", json.dumps({"spec": {"source": {"uri": "file:///other"}}}),
        )  # fmt: skip
        header = served.kubectl("get", "lora", "-n", "default").splitlines()[0].split()
        assert header == ["NAME", "BASE", "ADAPTER", "READY", "LOADED", "STATUS", "AGE"]
    finally:
        served.kubectl("delete", "lora", "fixed", "-n", "default")
