"""CRDs of ours that are deleted together while objects exist: every finalizer is released, and the kinds can come back.

review/operator-users.md, rejected suspicions: two CRDs that were deleted at once hung in one of three tries.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster.access import Access
from slipway_api import names
from tests.operator.test_on_apiserver import CHECKOUT, SERVICE, Operator, Stage, a_stage, installed

__all__ = ["installed"]
pytestmark = pytest.mark.apiserver

SECONDS = 30.0  # until objects and kinds are gone
TRIES = 3
ADAPTER = """
apiVersion: slipway.dev/v1alpha1
kind: LoRAAdapter
metadata: {name: sql}
spec:
  baseRef: {name: chat}
  source: {uri: "file:///opt/slipway/models/adapters/sailor"}
"""
POOL = """
apiVersion: slipway.dev/v1alpha1
kind: WarmPool
metadata: {name: pool}
spec: {size: 1}
"""
ROOM = SERVICE.replace("replicas: 1", "replicas: 1\n  runtime: {lora: {maxAdapters: 2}}")
PLURALS = ("inferenceservices", "loraadapters", "warmpools")


@pytest.fixture
def stage(installed: tuple[Access, Path], tmp_path: Path) -> Iterator[Stage]:
    with a_stage(installed, tmp_path) as stage:
        yield stage
    installed[0].serve_kinds(CHECKOUT / "crds")


@pytest.mark.capability("OP-17")
@pytest.mark.parametrize("deleted", [PLURALS[:2], PLURALS], ids=["two", "all"])
def test_kinds_that_are_deleted_together_end_within_seconds_and_can_come_back(stage: Stage, deleted) -> None:
    for number in range(TRIES):
        stage.access.serve_kinds(CHECKOUT / "crds")
        operator = stage.start_operator()
        operators = [operator]
        for manifest in (ROOM, ADAPTER, POOL):
            stage.apply(manifest)
        stage.eventually(lambda: len(stage.pods()) == 2, "a replica and a pod of the pool")
        stage.eventually(lambda: adapter_has_finalizer(stage), "the claim of the adapter")

        crds = [f"{plural}.{names.GROUP}" for plural in deleted]
        stage.access.kubectl("delete", "crd", *crds, "--wait=false")
        stage.eventually(
            lambda: restart(stage, operators) and not left(stage, crds),
            f"the end of the kinds in try {number}",
            seconds=SECONDS,
        )
        gone = time.monotonic()
        stage.eventually(lambda: operator.process.poll() is not None, "the end of the process, to be restarted")
        print(f"try {number}: the process ended after {time.monotonic() - gone:.1f} s more")
        for one in operators:
            one.end()
        # This API server has no garbage collector.
        stage.access.kubectl(
            "delete", "pods,controllerrevisions,svc,pdb,netpol", "--all", "-n", stage.namespace, "--force"
        )


def restart(stage: Stage, operators: list[Operator]) -> bool:
    """As the kubelet: a process that has ended starts again."""
    if operators[-1].process.poll() is not None:
        operators.append(stage.start_operator())
    return True


def adapter_has_finalizer(stage: Stage) -> bool:
    path = f"/apis/{names.API_VERSION}/namespaces/{stage.namespace}/loraadapters/sql"
    return bool(stage.access.api("GET", path)["metadata"].get("finalizers"))


def left(stage: Stage, crds: list[str]) -> list[str]:
    """Which of the CRDs are still there."""
    found = json.loads(stage.access.kubectl("get", "crd", "-o", "json"))["items"]
    return [one["metadata"]["name"] for one in found if one["metadata"]["name"] in crds]
