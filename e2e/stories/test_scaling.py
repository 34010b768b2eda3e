"""Replicas follow the load, and no request fails."""

import re
from collections.abc import Callable

import pytest

from e2e import checks
from e2e.ledger import Ledger
from e2e.slipway import EXAMPLES, Slipway, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

EVIDENCE = re.compile(r"\d+→\d+: (KVCacheUtilization|QueueDepth) [\d.]+ [<>] [\d.]+ \(\d+/\d+ pods?")


@pytest.mark.capability("AS-1", "AS-3", "AS-6", "PF-7", "OB-3", "OP-7")
def test_replicas_follow_the_load_out_and_in_and_no_request_fails(
    clean: Slipway, open_ledger: Callable[[str], Ledger]
) -> None:
    clean.apply(EXAMPLES / "chat.yaml")
    clean.wait_ready("chat", replicas=1)

    going_out = open_ledger("chat")
    load = clean.load("chat", concurrency=24, seconds=240, max_tokens=96, retry_429=True)  # more than one can take
    try:
        clean.wait_ready("chat", replicas=3, timeout=120)
    finally:
        report = load.stop()
    assert report.failed == 0, report.failures
    assert report.finished == report.sent > 50
    checks.no_request_lost(report, going_out)

    going_in = open_ledger("chat")
    small = clean.load("chat", concurrency=1, seconds=240, max_tokens=24)  # replicas leave while it runs
    try:
        wait_for("back to one replica", lambda: clean.wait_ready("chat", replicas=1, timeout=5), timeout=150)
    finally:
        meanwhile = small.stop()
    assert meanwhile.failed == 0, meanwhile.failures
    checks.no_request_lost(meanwhile, going_in)

    print(f"{report.retried} of {report.sent} requests were answered after a 429 and a retry")
    events = clean.wait_events("chat", "ScaledUp", "ScaledDown", "ReplicaDraining", "ReplicaDrained")
    scaled = [event.note for event in events if event.reason in ("ScaledUp", "ScaledDown")]
    assert any(EVIDENCE.search(note) for note in scaled), scaled
    history = clean.service("chat")["status"]["autoscaling"]["history"]
    assert {"time", "from", "to", "reason"} <= set(history[0])
    assert max(entry["to"] for entry in history) <= 3


@pytest.mark.capability("OP-7", "DD-1")
def test_in_external_mode_kubectl_scale_decides_and_the_operator_follows(clean: Slipway) -> None:
    clean.apply(EXAMPLES / "external-scaling.yaml")
    (name,) = clean.services()
    clean.wait_ready(name)

    clean.access.kubectl("scale", f"infsvc/{name}", "--replicas=2")
    clean.wait_ready(name, replicas=2)
    clean.access.kubectl("scale", f"infsvc/{name}", "--replicas=1")
    clean.wait_ready(name, replicas=1)

    assert (clean.condition(name, "ScalingActive") or {})["reason"] == "External"
