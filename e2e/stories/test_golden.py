"""Golden prompts on the real cluster: an equal revision gets the traffic, one that answers otherwise gets none."""

import pytest
import yaml

from e2e.manifests import as_yaml
from e2e.slipway import EXAMPLES, USER_NAMESPACE, Slipway, wait_for
from slipway_api import names

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

NAME = "golden"


def manifests(**runtime: object) -> str:
    """examples/golden.yaml, with further fields of `spec.runtime`."""
    documents = list(yaml.safe_load_all((EXAMPLES / "golden.yaml").read_text()))
    service = next(one for one in documents if one["kind"] == "InferenceService")
    service["spec"]["runtime"] |= runtime
    service["spec"]["drain"] = {"timeoutSeconds": 10, "endpointPropagationSeconds": 1}
    return "---\n".join(as_yaml(one) for one in documents)


@pytest.mark.capability("QZ-2", "EV-4")
def test_a_revision_that_answers_the_golden_prompts_otherwise_gets_no_traffic(clean: Slipway) -> None:
    clean.apply(manifests())
    first = clean.wait_ready(NAME, replicas=1)["status"]["currentRevision"]

    clean.apply(manifests(maxNumSeqs=24))  # the same answers

    def is_replaced() -> str:
        current = str(clean.service(NAME)["status"]["currentRevision"])
        return current if current != first else ""

    second = wait_for("the equal revision to take over", is_replaced, timeout=90)
    clean.wait_events(NAME, "RolloutCompleted")
    passed = clean.notes(NAME, "GatesPassed")
    assert any("configmap://golden-prompts/prompts.jsonl: 0.0% of 3 answers differ" in note for note in passed), passed

    clean.apply(manifests(maxNumSeqs=24, maxOutputTokens=1))  # other answers: they end after one token
    wait_for("the rollback", lambda: clean.service(NAME)["status"].get("failedRevision"), timeout=90)
    (note,) = clean.notes(NAME, "RolloutRolledBack")
    assert "configmap://golden-prompts/prompts.jsonl: 100.0% of 3 answers differ from the stable revision's" in note
    assert "Once upon a time" not in note
    answered = clean.openai().completions.with_raw_response.create(model=NAME, prompt="The ship", max_tokens=4)
    assert answered.headers[names.HEADER_REVISION] == second
    clean.access.kubectl("delete", "configmap", "golden-prompts", "-n", USER_NAMESPACE)
