"""A service of three lines and its template, on a real API server: the operator runs with the chart's rights."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.access import Access
from slipway_api.service_template import BLOCKS
from tests.operator.test_on_apiserver import Stage, a_stage, installed  # noqa: F401  a fixture

pytestmark = [pytest.mark.apiserver, pytest.mark.capability("OP-15")]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "three-lines.yaml"
TEMPLATE = "cpu-standard"


@pytest.fixture
def stage(installed: tuple[Access, Path], tmp_path: Path) -> Iterator[Stage]:  # noqa: F811
    with a_stage(installed, tmp_path) as stage:
        try:
            yield stage
        finally:
            stage.access.kubectl("delete", "svctpl", TEMPLATE, "--ignore-not-found")


def cpu_of(pod: dict[str, Any]) -> str:
    return str(pod["spec"]["containers"][0]["resources"]["requests"]["cpu"])


def test_the_example_inherits_follows_a_change_and_survives_the_deletion_of_its_template(stage: Stage) -> None:
    stage.apply(EXAMPLE.read_text().replace("name: three", "name: chat"))
    stage.start_operator()
    [pod] = stage.eventually(stage.pods, "a pod")
    assert cpu_of(pod) == "100m"
    stage.eventually(lambda: stage.service()["status"].get("templates"), "a record of what is inherited")

    service = stage.service()
    assert set(service["spec"]).isdisjoint(BLOCKS), "nothing is written into the spec"
    (used,) = service["status"]["templates"]
    assert (used["name"], used["generation"]) == (TEMPLATE, 1)
    assert used["blocks"] == ["resources", "autoscaling", "rollout", "drain", "slo"]
    assert service["status"]["inherited"]["drain"]["timeoutSeconds"] == 60
    first = service["status"]["updateRevision"]

    change = json.dumps({"spec": {"resources": {"requests": {"cpu": "200m"}}}})
    stage.access.kubectl("patch", "svctpl", TEMPLATE, "--type=merge", "-p", change)
    stage.eventually(lambda: stage.service()["status"]["updateRevision"] != first, "a new revision")
    stage.eventually(lambda: stage.service()["status"]["templates"][0]["generation"] == 2, "the new generation")
    stage.eventually(lambda: "200m" in {cpu_of(one) for one in stage.pods()}, "a replica of the new revision")

    pods = {one["metadata"]["uid"] for one in stage.pods() if cpu_of(one) == "200m"}
    stage.access.kubectl("delete", "svctpl", TEMPLATE)
    stalled = stage.eventually(lambda: stage.condition("Stalled"), "a condition")
    assert stalled["reason"] == "TemplateNotFound"
    assert f"there is no ServiceTemplate {TEMPLATE}" in stalled["message"]
    assert pods <= {one["metadata"]["uid"] for one in stage.pods()}
    assert stage.service()["status"]["inherited"]["resources"]["requests"]["cpu"] == "200m"
