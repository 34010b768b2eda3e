"""Mode External with two writers, on a real API server: Flux applies the manifest, an HPA writes through /scale."""

import json

import pytest

from slipway_api import names
from tests.operator.test_on_apiserver import SERVICE, Stage, installed, stage  # noqa: F401  fixtures

pytestmark = pytest.mark.apiserver

EXTERNAL = SERVICE.replace("  replicas: 1\n", "  autoscaling: {mode: External, maxReplicas: 5}\n")


def sync(at: Stage, manifest: str) -> None:
    """One sync of Flux's kustomize-controller: server-side apply that overwrites conflicts."""
    flux = ("--server-side", "--force-conflicts", "--field-manager=kustomize-controller")
    at.access.kubectl("apply", *flags_of(at), *flux, "-f", "-", stdin=manifest)


def flags_of(at: Stage) -> tuple[str, ...]:
    return ("-n", at.namespace)


def scale(at: Stage) -> int:
    """The number that an HPA reads; the API server answers with an error while spec.replicas is absent."""
    answer = at.access.kubectl(*flags_of(at), "get", "infsvc", "chat", "--subresource=scale", "-o", "json")
    number: int = json.loads(answer)["spec"]["replicas"]
    return number


def owners_of_replicas(at: Stage) -> set[str]:
    entries = at.service()["metadata"]["managedFields"]
    return {one["manager"] for one in entries if "f:replicas" in one["fieldsV1"].get("f:spec", {})}


@pytest.mark.capability("AS-10")
def test_a_sync_of_flux_does_not_reset_the_number_of_an_hpa(stage: Stage) -> None:  # noqa: F811  the fixture
    """review/operator-users.md 5"""
    stage.start_operator()
    sync(stage, EXTERNAL)
    stage.eventually(lambda: "replicas" in stage.service()["spec"], "the first number")
    assert scale(stage) == 1
    assert owners_of_replicas(stage) == {names.FIELD_MANAGER_REPLICAS}

    stage.access.kubectl(*flags_of(stage), "scale", "infsvc", "chat", "--replicas=2")
    stage.eventually(lambda: len(stage.pods()) == 2, "two pods")
    sync(stage, EXTERNAL)
    sync(stage, EXTERNAL.replace("maxReplicas: 5", "maxReplicas: 4"))
    generation = stage.service()["metadata"]["generation"]
    stage.eventually(lambda: stage.service()["status"].get("observedGeneration") == generation, "the last sync")

    assert scale(stage) == 2
    assert len(stage.pods()) == 2
    assert names.FIELD_MANAGER_REPLICAS not in owners_of_replicas(stage)


@pytest.mark.capability("AS-10")
def test_a_number_that_leaves_git_is_kept(stage: Stage) -> None:  # noqa: F811  the fixture
    with_number = EXTERNAL.replace("  autoscaling:", "  replicas: 2\n  autoscaling:")
    stage.start_operator()
    sync(stage, with_number)
    stage.eventually(lambda: len(stage.pods()) == 2, "two pods")

    sync(stage, EXTERNAL)
    stage.eventually(lambda: names.FIELD_MANAGER_REPLICAS in owners_of_replicas(stage), "the operator's number")

    assert scale(stage) == 2
    assert len(stage.pods()) == 2
