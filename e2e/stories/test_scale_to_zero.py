"""A service that nobody uses has no replica; the first request gets one, and its answer."""

import time

import pytest

from e2e.slipway import EXAMPLES, Slipway, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.mark.capability("AS-9", "RG-7")
def test_an_idle_service_goes_to_zero_and_the_first_request_is_held_and_answered(clean: Slipway) -> None:
    clean.apply(EXAMPLES / "idle-to-zero.yaml")
    (name,) = clean.services()
    clean.wait_ready(name, replicas=1)
    messages = [{"role": "user", "content": "Hello"}]
    assert clean.openai().chat.completions.create(model=name, messages=messages, max_tokens=8).choices

    wait_for("no pod is left", lambda: not clean.pods(name), timeout=150)
    clean.wait_condition(name, "Ready", "True", "ScaledToZero")
    assert clean.service(name)["status"]["desiredReplicas"] == 0
    assert name in {model.id for model in clean.openai().models.list()}, "it is still there for clients"

    begun = time.monotonic()
    answer = clean.openai().chat.completions.create(model=name, messages=messages, max_tokens=8)
    waited = time.monotonic() - begun

    assert answer.choices[0].finish_reason in ("stop", "length")
    assert len(clean.pods(name)) == 1
    events = {event.reason: event.note for event in clean.wait_events(name, "ScaledToZero", "Activated")}
    assert "no request at the gateways" in events["ScaledToZero"]
    assert events["Activated"].startswith("0→1: 1 request waits at the gateways")
    print(f"the first request after zero was answered in {waited:.1f} s")
