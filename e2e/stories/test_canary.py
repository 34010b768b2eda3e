"""A new revision takes its share by canary; one that answers wrongly or slowly is rolled back."""

from collections import Counter

import httpx
import pytest

from e2e.canary import edit, manifest, wait_served, weights
from e2e.manifests import as_yaml
from e2e.slipway import USER_NAMESPACE, Json, Slipway, wait_for
from slipway_api import names

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def serve(slipway: Slipway, spec: Json) -> str:
    """Apply it and wait until its revision has served completely; the hash."""
    slipway.apply(as_yaml(spec))
    return wait_served(slipway, spec["metadata"]["name"])


def ask(slipway: Slipway, name: str, pin: str = "") -> httpx.Response:
    headers = {names.HEADER_PIN_REVISION: pin} if pin else {}
    body = {"model": name, "prompt": "The ship", "max_tokens": 4}
    return httpx.post(f"{slipway.base_url}/completions", json=body, headers=headers, timeout=60)


@pytest.mark.capability("EV-1", "EV-3", "RG-1", "PF-13")
def test_a_canary_takes_its_share_and_is_promoted_by_hand(clean: Slipway) -> None:
    spec = manifest("share", {"setWeight": 25}, {"pauseSeconds": 3600}, {"setWeight": 100})
    old = serve(clean, spec)

    new = edit(clean, spec, maxNumSeqs=24)
    wait_for("the canary has its weight", lambda: weights(clean, "share") == {old: 75, new: 25}, timeout=90)

    def answered() -> Counter[str] | None:  # the gateways hear of the weights a moment later
        by = Counter(ask(clean, "share").headers[names.HEADER_REVISION] for _ in range(80))
        return by if by[new] and by[old] else None

    by = wait_for("both revisions answer", answered)
    assert set(by) == {old, new}
    assert 5 <= by[new] <= 38, f"25 % of 80 requests, give or take: {by}"
    for revision in (old, new):
        pinned = {ask(clean, "share", pin=revision).headers[names.HEADER_REVISION] for _ in range(5)}
        assert pinned == {revision}, "a request for one revision is never answered by the other"

    clean.access.kubectl(
        "annotate", "infsvc", "share", "-n", USER_NAMESPACE, f"{names.ANNOTATION_PROMOTE}={new}", "--overwrite"
    )
    wait_for("it serves alone", lambda: clean.service("share")["status"]["currentRevision"] == new, timeout=90)
    clean.wait_events("share", "CanaryStepCompleted", "CanaryPromoted", "RolloutCompleted")


@pytest.mark.capability("EV-4")
def test_a_canary_that_answers_a_smoke_test_wrongly_gets_no_request(clean: Slipway) -> None:
    smoke = {"smoke": [{"prompt": "The ship", "mustMatch": "a text that this model never writes"}]}
    spec = manifest("wrong", {"setWeight": 50}, {"setWeight": 100}, gates=smoke)
    old = serve(clean, spec)

    new = edit(clean, spec, maxNumSeqs=24)
    wait_for("it is rolled back", lambda: clean.service("wrong")["status"].get("failedRevision") == new, timeout=90)

    assert weights(clean, "wrong") == {old: 100, new: 0}
    (note,) = clean.notes("wrong", "CanaryRolledBack")
    assert "smoke test 1 of 1" in note
    wait_for("it is gone", lambda: len(clean.pods("wrong")) == 1)
    assert ask(clean, "wrong").headers[names.HEADER_REVISION] == old


@pytest.mark.full
@pytest.mark.capability("EV-2")
def test_a_slow_canary_is_rolled_back_and_not_tried_again(clean: Slipway) -> None:
    """The canary runs one request at a time; the verdict needs the outcomes that the gateways report."""
    spec = manifest("slow", {"setWeight": 50}, {"analyze": {}}, {"setWeight": 100})
    old = serve(clean, spec)
    load = clean.load("slow", concurrency=8, seconds=240, max_tokens=24, retry_429=True)
    try:
        new = edit(clean, spec, maxNumSeqs=1)
        wait_for("it is rolled back", lambda: clean.service("slow")["status"].get("failedRevision") == new, timeout=200)
    finally:
        load.stop()

    (note,) = clean.notes("slow", "CanaryRolledBack")
    assert "TTFTP95" in note
    assert " against " in note
    wait_for("the canary is gone", lambda: len(clean.pods("slow")) == 1, timeout=90)
    assert weights(clean, "slow")[old] == 100
