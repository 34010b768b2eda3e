"""An object that the operator cannot plan, by a fault of its own, says so; others are reconciled.

review/control-plane.md 13: it kept Ready=True, 1 of 1, without a pod.
"""

from datetime import UTC, datetime

import pytest

from slipway_kube.resources import EVENTS
from slipway_operator.controller.internal_error import internal_error_status
from slipway_operator.inputs import inference_services
from tests.operator.simulated_cluster import NAMESPACE, simulated_cluster
from tests.operator.virtual_time import run_in_virtual_time

pytestmark = pytest.mark.capability("OP-16", "OP-18")


def test_its_status_says_so_once_and_the_others_are_reconciled(tmp_path, monkeypatch):
    plan, broken = inference_services.plan, {"bad"}

    def plan_or_fail(observed, now):
        if observed.service.metadata.name in broken:
            raise OverflowError("date value out of range")
        return plan(observed, now)

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("bad", replicas=1)
            cluster.apply("chat", replicas=1)
            cluster.start_operator()
            await cluster.until(lambda: cluster.condition("chat", "Ready").get("status") == "True", "chat is ready")
            await cluster.until(lambda: cluster.condition("bad", "Ready").get("status") == "True", "bad is ready")

            monkeypatch.setattr(inference_services, "plan", plan_or_fail)
            cluster.apply("bad", replicas=2)
            cluster.apply("chat", replicas=2)
            await cluster.until(lambda: len(cluster.serving("chat")) == 2, "chat is scaled")
            await cluster.until(lambda: cluster.condition("bad", "Stalled").get("status") == "True", "bad says so")
            await cluster.quiet(30)
            ready = cluster.condition("bad", "Ready")
            assert (ready["status"], ready["reason"]) == ("Unknown", "InternalError")
            assert "OverflowError: date value out of range. Its pods are left as they are" in ready["message"]
            posted = [one for one in cluster.server.objects(EVENTS, NAMESPACE) if one["reason"] == "InternalError"]
            assert len(posted) == 1
            assert len(cluster.serving("bad")) == 1

            broken.clear()
            await cluster.until(
                lambda: cluster.condition("bad", "Ready").get("status") == "True", "bad is planned again"
            )
            await cluster.until(lambda: len(cluster.serving("bad")) == 2, "bad is scaled")
            assert not cluster.condition("bad", "Stalled")

    run_in_virtual_time(story())


def test_conditions_that_cannot_be_read_are_dropped_and_the_rest_of_the_status_stays():
    now = datetime(2026, 1, 1, tzinfo=UTC)
    before = {"replicas": 3, "conditions": ["?", {"type": "Ready"}]}
    status, sentence = internal_error_status(before, ValueError("x" * 5000), generation=4, now=now)
    assert status["replicas"] == 3
    assert {one["type"]: one["status"] for one in status["conditions"]} == {"Ready": "Unknown", "Stalled": "True"}
    assert len(sentence) < 600
    again, repeated = internal_error_status(status, ValueError("y"), generation=4, now=now)
    assert repeated == ""
    assert again["conditions"][0]["lastTransitionTime"] == status["conditions"][0]["lastTransitionTime"]
