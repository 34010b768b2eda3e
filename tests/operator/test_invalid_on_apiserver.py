"""A service that was stored before the schema had the rule it breaks, on a real API server that has the rule now."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from e2e.cluster.access import Access, CommandError
from slipway_api import names
from tests.operator.test_on_apiserver import SERVICE, Stage, a_stage, installed  # noqa: F401  a fixture

pytestmark = pytest.mark.apiserver

CRD = "crd/inferenceservices.slipway.dev"
RULE = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/runtime/properties/startupTimeoutSeconds"
OLD = SERVICE.replace("spec:", "spec:\n  runtime: {startupTimeoutSeconds: 5}").replace(
    "{name: chat}", f"{{name: chat, finalizers: [{names.FINALIZER}]}}"
)


@contextmanager
def before_the_rule(access: Access) -> Iterator[None]:
    def least(seconds: int) -> None:
        change = [{"op": "replace", "path": f"{RULE}/minimum", "value": seconds}]
        access.kubectl("patch", CRD, "--type=json", "-p", json.dumps(change))

    least(1)
    try:
        yield
    finally:
        least(10)


def takes(stage: Stage, manifest: str, *flags: str) -> bool:
    try:
        stage.access.kubectl("apply", "-n", stage.namespace, "-f", "-", *flags, stdin=manifest)
    except CommandError:
        return False
    return True


@pytest.mark.capability("OP-1")
def test_a_service_older_than_a_rule_is_told_which_one_and_can_be_deleted(
    installed: tuple[Access, Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    with a_stage(installed, tmp_path) as stage:
        with before_the_rule(stage.access):
            stage.eventually(lambda: takes(stage, OLD), "an API server without the rule")
        another = OLD.replace("chat", "another")
        stage.eventually(lambda: not takes(stage, another, "--dry-run=server"), "an API server with the rule")
        operator = stage.start_operator()
        stalled = stage.eventually(lambda: stage.condition("Stalled"), "a condition")

        assert stalled["reason"] == "InvalidSpec"
        assert "spec.runtime.startupTimeoutSeconds" in stalled["message"]
        assert stage.condition("Ready")["status"] == "False"
        assert stage.pods() == []

        stage.access.kubectl("delete", "infsvc", "chat", "-n", stage.namespace, "--timeout=20s")

        assert not [line for line in operator.lines() if line.get("level") in ("error", "critical")]
