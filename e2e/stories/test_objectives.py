"""A team sets objectives and a price: they are measured, and an exhausted error budget holds a new revision."""

from typing import Any

import httpx
import pytest

from e2e.manifests import as_yaml, static
from e2e.slipway import USER_NAMESPACE, Slipway, wait_for
from e2e.stories.test_canary import edit, serve
from slipway_api import names

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def stream(slipway: Slipway, name: str, count: int) -> None:
    body = {"model": name, "prompt": "The ship", "max_tokens": 8, "stream": True}
    for _ in range(count):
        answer = httpx.post(f"{slipway.base_url}/completions", json=body, timeout=60)
        assert answer.status_code == 200


def verdict(slipway: Slipway, name: str) -> str:
    """The reason of WithinSLO."""
    return str((slipway.condition(name, "WithinSLO") or {}).get("reason", ""))


@pytest.mark.full
@pytest.mark.capability("OB-6", "CO-1")
def test_objectives_are_measured_and_an_exhausted_budget_holds_a_new_revision(clean: Slipway) -> None:
    spec = static("objectives", 1, slo={"ttftP95Seconds": "60"}, budget={"gpuHourCost": "2.50", "currency": "EUR"})
    old = serve(clean, spec)

    def measured() -> dict[str, Any] | None:
        stream(clean, "objectives", 3)
        slo = clean.service("objectives")["status"].get("slo", {})
        return slo if slo.get("ttftP95Seconds") and verdict(clean, "objectives") == "WithinLimits" else None

    slo = wait_for("the objectives are measured", measured, timeout=150)
    assert float(slo["errorBudgetRemainingPercent"]) == 100
    cost = clean.service("objectives")["status"]["cost"]
    assert (cost["gpus"], cost["perHour"], cost["currency"]) == (1, "2.50", "EUR")

    # The limit becomes one that no answer can keep.
    spec["spec"]["slo"] = {"ttftP95Seconds": "0.001"}
    clean.apply(as_yaml(spec))

    def exhausted() -> bool:
        stream(clean, "objectives", 5)
        return verdict(clean, "objectives") == "ErrorBudgetExhausted"

    wait_for("the budget is exhausted", exhausted, timeout=150)
    new = edit(clean, spec, maxNumSeqs=24)

    def waits() -> bool:
        conditions = clean.service("objectives")["status"]["conditions"]
        return any("paused by the exhausted error budget (TTFTP95" in one["message"] for one in conditions)

    wait_for("the new revision waits, and status says why", waits)
    assert clean.service("objectives")["status"]["currentRevision"] == old

    clean.access.kubectl("annotate", "infsvc", "objectives", "-n", USER_NAMESPACE, f"{names.ANNOTATION_PROMOTE}={new}")
    wait_for(
        "the promoted revision serves",
        lambda: clean.service("objectives")["status"]["currentRevision"] == new,
        timeout=120,
    )
