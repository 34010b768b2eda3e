"""A team closes a service to all callers but the gateway."""

import json

import pytest

from e2e.cluster.access import ApiError
from e2e.manifests import as_yaml, static
from e2e.slipway import Slipway, wait_for
from slipway_api import names

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CLOSED = {"directAccess": "GatewayOnly"}


def status_past_the_gateway(slipway: Slipway, pod: str) -> int:
    """Status of the serving port's answer to a caller without a token."""
    path = f"/api/v1/namespaces/default/pods/{pod}:{names.SERVING_PORT}/proxy/v1/models"
    try:
        slipway.access.api("GET", path)
    except ApiError as refusal:
        return refusal.code
    return 200


def answers(slipway: Slipway, model: str) -> bool:
    said = slipway.openai().completions.create(model=model, prompt="Once upon a time", max_tokens=4)
    return bool(said.choices[0].text)


@pytest.mark.capability("SE-2")
def test_a_closed_service_answers_through_the_gateway_alone(clean: Slipway) -> None:
    clean.apply(as_yaml(static("closed", 1, routing=CLOSED)))
    service = clean.wait_ready("closed", replicas=1)
    (pod,) = clean.pods("closed")

    assert wait_for("the gateway has the endpoint", lambda: answers(clean, "closed"))
    assert status_past_the_gateway(clean, pod.metadata.name) == 401
    assert [address["name"] for address in service["status"]["addresses"]] == ["gateway"]
    policy = json.loads(clean.access.kubectl("get", "networkpolicy", "closed-replicas", "-n", "default", "-o", "json"))
    assert all("from" in rule for rule in policy["spec"]["ingress"])


@pytest.mark.full
@pytest.mark.capability("SE-2")
def test_closing_a_service_replaces_its_replicas_without_an_outage(clean: Slipway) -> None:
    clean.apply(as_yaml(static("closing", 1)))
    clean.wait_ready("closing", replicas=1)
    (before,) = clean.pods("closing")
    assert status_past_the_gateway(clean, before.metadata.name) == 200

    load = clean.load("closing", concurrency=2, seconds=600, max_tokens=8)
    clean.apply(as_yaml(static("closing", 1, routing=CLOSED)))

    def successor() -> str | None:
        pods = [pod.metadata.name for pod in clean.pods("closing")]
        return pods[0] if len(pods) == 1 and pods != [before.metadata.name] else None

    after = wait_for("the closed replica alone", successor, timeout=180)
    clean.wait_ready("closing", replicas=1)
    report = load.stop()

    assert status_past_the_gateway(clean, after) == 401
    assert report.failed == 0
