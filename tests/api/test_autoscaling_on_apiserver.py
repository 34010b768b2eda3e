"""Modes, scale to zero, schedules and the budget: the API server knows what goes together, and says what does not."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.cluster.access import CommandError
from tests.api.manifests import NAMESPACE, a_manifest, apply, assert_refused, stored

pytestmark = pytest.mark.apiserver

ZERO = {"minReplicas": 0, "scaleToZero": {}}


def scaling(**fields: Any) -> dict[str, Any]:
    return {"autoscaling": {"maxReplicas": 4, **fields}}


def a_schedule(**fields: Any) -> dict[str, Any]:
    return scaling(
        schedules=[{"name": "day", "start": "0 8 * * 1-5", "durationSeconds": 36_000, "minReplicas": 3, **fields}]
    )


def latency(*others: str) -> dict[str, Any]:
    targets = [{"type": "TTFTP95Seconds", "target": "1.0"}, *({"type": other, "target": "0.8"} for other in others)]
    return scaling(metrics=targets)


@pytest.fixture
def kept(api) -> Iterator[str]:
    """The name of a service that is deleted after the test."""
    yield "kept"
    api.kubectl("delete", "infsvc", "kept", "-n", NAMESPACE, "--ignore-not-found")


@pytest.mark.parametrize(
    "spec",
    [
        scaling(**ZERO),
        scaling(mode="Paused"),
        scaling(mode="Paused", metrics=[]),
        scaling(mode="Advisory"),
        {"replicas": 2} | scaling(mode="Advisory"),
        {"replicas": 0} | scaling(mode="Advisory", **ZERO),
        latency("QueueDepth"),
        scaling(metrics=[{"type": "RunningRequests", "target": "20"}]),
        a_schedule(),
        a_schedule(timeZone="America/Argentina/Buenos_Aires", start="*/30 22-23 1,15 jan-mar mon"),
        {"budget": {"maxGPUs": 4}} | scaling(),
        {"budget": {"gpuHourCost": "2.50", "currency": "EUR"}} | scaling(),
        {"budget": {"gpuHourCost": "2.50"}, "replicas": 900},
        {"slo": {}},
        {"slo": {"objectivePercent": "99.95", "windowDays": 7, "ttftP95Seconds": "0.5", "itlP95Seconds": "0.08"}},
        {"budget": {"maxGPUs": 4}, "replicas": 4},
        {"budget": {"maxGPUs": 1}, "replicas": 9} | scaling(mode="External"),
    ],
    ids=lambda spec: json.dumps(spec)[:90],
)
@pytest.mark.capability("AS-9", "AS-10", "AS-11")
def test_these_are_accepted(api, spec):
    apply(api, a_manifest("accepted", **spec), "--dry-run=server")


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # what is wrong, the spec, the sentence
    ("zero without scaleToZero", scaling(minReplicas=0), "minReplicas 0 needs scaleToZero"),
    ("scaleToZero without zero", scaling(scaleToZero={}), "scaleToZero needs minReplicas: 0"),
    ("idle for a moment", scaling(minReplicas=0, scaleToZero={"idleSeconds": 59}), "greater than or equal to 60"),
    (
        "bytes that are no quantity",
        scaling(minReplicas=0, scaleToZero={"activation": {"maxQueuedBytes": "much"}}),
        "maxQueuedBytes must be a quantity such as 256Mi",
    ),
    ("latency alone", latency(), "TTFTP95Seconds needs another metric beside it"),
    ("Advisory without metrics", scaling(mode="Advisory", metrics=[]), "need at least one metric"),
    ("replicas while paused", {"replicas": 2} | scaling(mode="Paused"), "replicas must be absent"),
    ("a start with six fields", a_schedule(start="0 0 8 * * 1"), "should match"),
    ("an hour that is none", a_schedule(start="0 24 * * *"), "should match"),
    ("a start by a word", a_schedule(start="@daily"), "should match"),
    ("a zone by its hour", a_schedule(timeZone="UTC +2"), "should match"),
    ("a schedule above the limit", a_schedule(minReplicas=5), "must not exceed maxReplicas"),
    ("a moment", a_schedule(durationSeconds=59), "greater than or equal to 60"),
    ("a fortnight", a_schedule(durationSeconds=1_209_600), "less than or equal to 604800"),
    (
        "a budget for less than one",
        {
            "budget": {"maxGPUs": 1},
            "resources": {"gpu": {"count": 2}},
            "runtime": {"tensorParallelSize": 2},
        },
        "must allow one replica",
    ),
    ("more than the budget", {"budget": {"maxGPUs": 3}, "replicas": 4}, "must not exceed budget.maxGPUs"),
    ("a budget of nothing", {"budget": {}}, "a budget needs maxGPUs, gpuHourCost, or both"),
    ("a free GPU", {"budget": {"gpuHourCost": "0"}}, "gpuHourCost must be above 0"),
    ("a price in words", {"budget": {"gpuHourCost": "2.5 USD"}}, "should match"),
    ("a currency that is none", {"budget": {"gpuHourCost": "2", "currency": "$"}}, "should match"),
    ("an objective of everything", {"slo": {"objectivePercent": "100"}}, "objectivePercent must be 50 to 99.999"),
    ("a latency of nothing", {"slo": {"ttftP95Seconds": "0"}}, "ttftP95Seconds must be above 0"),
    ("tokens in no time", {"slo": {"itlP95Seconds": "0.0"}}, "itlP95Seconds must be above 0"),
    ("no error at all", {"slo": {"maxErrorPercent": "0"}}, "maxErrorPercent must be above 0"),
    ("a year", {"slo": {"windowDays": 365}}, "less than or equal to 90"),
]


@pytest.mark.parametrize(("spec", "sentence"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
@pytest.mark.capability("AS-9", "AS-10", "AS-11")
def test_these_are_refused_with_a_sentence(api, spec, sentence):
    assert_refused(api, a_manifest("refused", **spec), sentence)


def test_what_is_left_out_of_scale_to_zero_is_shown(api, kept):
    apply(api, a_manifest(kept, **scaling(**ZERO)))

    assert stored(api, kept)["spec"]["autoscaling"]["scaleToZero"] == {
        "idleSeconds": 900,
        "activation": {"maxQueuedRequests": 1000, "maxQueuedBytes": "256Mi", "maxWaitSeconds": 600},
    }


@pytest.mark.capability("AS-10")
def test_what_an_hpa_writes_is_stored_and_the_limits_of_the_schema_hold_for_it_too(api, kept):
    apply(api, a_manifest(kept, replicas=1, **scaling(mode="External")))
    api.kubectl("scale", "infsvc", kept, "-n", NAMESPACE, "--replicas=3")
    with pytest.raises(CommandError):
        api.kubectl("scale", "infsvc", kept, "-n", NAMESPACE, "--replicas=1001")

    assert stored(api, kept)["spec"]["replicas"] == 3
