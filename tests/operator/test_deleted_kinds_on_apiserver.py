"""CRDs of ours that are deleted together while objects exist: every finalizer is released, and the kinds can come back.

review/operator-users.md, rejected suspicions: two CRDs that were deleted at once hung in one of three tries.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster.access import Access
from slipway_api import names
from tests.operator.test_on_apiserver import CHECKOUT, SERVICE, Operator, Stage, a_stage, install

pytestmark = pytest.mark.apiserver

TRIES = 2
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
# No kubelet runs the replicas, so their drain lasts until its timeout.
ROOM = SERVICE.replace("replicas: 1", "replicas: 1\n  runtime: {lora: {maxAdapters: 2}}").replace(
    "timeoutSeconds: 20", "timeoutSeconds: 2"
)
PLURALS = ("inferenceservices", "loraadapters", "warmpools")


@pytest.fixture
def stage(own_apiserver: Access, tmp_path: Path) -> Iterator[Stage]:
    with a_stage(install(own_apiserver, tmp_path), tmp_path) as stage:
        yield stage


@pytest.mark.capability("OP-17")
@pytest.mark.parametrize("deleted", [PLURALS[:2], PLURALS], ids=["two", "all"])
def test_kinds_that_are_deleted_together_end_within_seconds_and_the_process_starts_again(stage: Stage, deleted) -> None:
    for _ in range(TRIES):
        stage.access.serve_kinds(CHECKOUT / "crds")
        delete_while_in_use(stage, [f"{plural}.{names.GROUP}" for plural in deleted])
        # This API server has no garbage collector.
        for kind in ("pods", "controllerrevisions", "services", "poddisruptionbudgets", "networkpolicies"):
            stage.access.kubectl("delete", kind, "--all", "-n", stage.namespace, "--force")


def delete_while_in_use(stage: Stage, crds: list[str]) -> None:
    """Delete the CRDs of a service, its adapter and a pool; as in a cluster, a process that ends is started again."""
    operators = [stage.start_operator()]
    for manifest in (ROOM, ADAPTER, POOL):
        stage.apply(manifest)
    stage.eventually(lambda: len(stage.pods()) == 2, "a replica and a pod of the pool")
    stage.eventually(lambda: adapter_has_finalizer(stage), "the claim of the adapter")

    stage.access.kubectl("delete", "crd", *crds, "--wait=false")
    stage.eventually(lambda: restart(stage, operators) and not left(stage, crds), "the end of the kinds")
    stage.eventually(lambda: operators[0].process.poll() is not None, "the end of the process, to be started again")
    for one in operators:
        one.end()


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
