"""Flux and Helm wait by kstatus: the library itself, from its Go module, reads what the operator writes."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.build import ensure
from slipway_api.conditions import PENDING
from slipway_operator.core.service.plan import plan
from tests.builders import T0, a_pod, a_service, edited, minutes, promised, seen

pytestmark = pytest.mark.apiserver  # the library is in the local cluster's binary

CHECKS = Path(__file__).resolve().parents[2] / "gitops" / "argocd" / "slipway.dev"
AS_CREATED: dict[str, Any] = {"status": {"conditions": [dict(PENDING)]}}  # what the API server fills in
# What kstatus may say where Argo CD says so. It knows no suspension, and calls any Ready=False in progress.
AGREEING = {
    "Healthy": {"Current"},
    "Progressing": {"InProgress", "Terminating"},
    "Degraded": {"Failed", "InProgress"},
    "Suspended": {"Current", "InProgress", "Failed"},
}


def kstatus(*objects: dict[str, Any]) -> list[str]:
    """What kstatus makes of each object."""
    said = subprocess.run(
        [ensure() / "controlplane", "kstatus"],
        input="\n".join(json.dumps(one, default=str) for one in objects),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return [line.partition("\t")[0] for line in said.stdout.splitlines()]


def as_stored(service: Any, status: Any) -> dict[str, Any]:
    """The object as the API server would return it."""
    body = service.model_copy(update={"status": status}).to_json()
    return body | {"apiVersion": "slipway.dev/v1alpha1", "kind": "InferenceService"}


@pytest.mark.capability("OP-7")
def test_argo_cd_and_kstatus_agree_on_every_fixture():
    cases = [
        (folder / case["inputPath"], case["healthStatus"]["status"])
        for folder in sorted(CHECKS.iterdir())
        for case in yaml.safe_load((folder / "health_test.yaml").read_text())["tests"]
    ]

    said = kstatus(*(AS_CREATED | yaml.safe_load(path.read_text()) for path, _ in cases))

    assert len(said) == len(cases)
    disagreeing = [
        (path.parent.parent.name, path.name, argo, flux)
        for (path, argo), flux in zip(cases, said, strict=True)
        if flux not in AGREEING[argo]
    ]
    assert disagreeing == []


@pytest.mark.capability("OP-7")
def test_an_object_that_the_operator_has_not_seen_is_in_progress():
    body = {"apiVersion": "slipway.dev/v1alpha1", "metadata": {"name": "new", "namespace": "demo", "generation": 1}}
    new = [AS_CREATED | body | {"kind": kind.name} for kind in sorted(CHECKS.iterdir())]

    assert kstatus(*new) == ["InProgress"] * 3
    # Without that default kstatus calls it Current: it knows nothing else of a kind it has never seen.
    assert kstatus(*({**one, "status": {}} for one in new)) == ["Current"] * 3


@pytest.mark.capability("OP-7")
def test_flux_waits_while_a_service_starts_and_goes_on_when_it_serves():
    service = promised(a_service(replicas=1), 1)
    starting = plan(seen(service, a_pod(service=service).loading()), T0).status
    serving = plan(seen(service, a_pod(service=service).ready()), T0).status
    broken = plan(seen(service, a_pod(service=service).cannot_pull()), T0 + minutes(1)).status
    old = edited(service.model_copy(update={"status": serving}), replicas=2)

    said = kstatus(
        as_stored(service, starting), as_stored(service, serving), as_stored(service, broken), as_stored(old, serving)
    )

    assert said == ["InProgress", "Current", "Failed", "InProgress"]
