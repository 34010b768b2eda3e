"""Latency as a signal: it adds replicas and holds them, waits for evidence, and never takes one away."""

from datetime import datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway_api.gateway_api import OUTCOME_BUCKETS
from slipway_operator.core.observed import Outcomes
from slipway_operator.core.scaling.latency import (
    FEWEST_REQUESTS,
    Latency,
    percentile,
    replicas_for_latency,
    ttft_p95,
)
from slipway_operator.core.scaling.signals import Readings
from tests.builders import T0, a_service, minutes, seconds
from tests.operator.core.scaling.test_autoscaling import ask, pods, quick
from tests.operator.core.simulated_cluster import SimulatedCluster

WITH_LATENCY = [{"type": "KVCacheUtilization", "target": "0.80"}, {"type": "TTFTP95Seconds", "target": "1.0"}]


def answered(*times: float) -> Outcomes:
    """Requests with these times to first token."""
    counts = [0] * (len(OUTCOME_BUCKETS) + 1)
    for time in times:
        counts[next((n for n, bound in enumerate(OUTCOME_BUCKETS) if time <= bound), len(OUTCOME_BUCKETS))] += 1
    return Outcomes(requests=len(times), ttft=tuple(counts))


def deciding(ttft: float | None, *, kv=0.6, current=2, pending=0, ready=None, requests=50):
    readings = Readings(
        metered=pods(ready or current - pending, kv=kv),
        pending=pending,
        ttft_p95=Latency(ttft, requests) if ttft is not None else None,
    )
    return ask(quick(metrics=WITH_LATENCY), readings, current=current)


@pytest.mark.capability("AS-8")
@pytest.mark.parametrize(
    ("ttft", "kv", "pending", "desired"),
    [
        (1.3, 0.6, 0, 3),
        (9.0, 0.6, 0, 4),
        (1.05, 0.6, 0, 2),
        (0.95, 0.1, 0, 2),
        (0.80, 0.1, 0, 1),
        (9.0, 0.6, 1, 2),
        (0.1, 0.95, 0, 3),
        (None, 0.1, 0, 1),
        (1.3, 1.0, 0, 3),
    ],
    ids=[
        "late answers add replicas, though the cache is half empty",
        "very late ones at most double them",
        "a little late: nothing",
        "just in time: nothing is taken away",
        "well in time: the load decides",
        "one is loading: its effect is waited for",
        "in time, with a full cache: the load decides",
        "too few requests to tell: the load decides",
        "both ask: the one that asks for most",
    ],
)
def test_latency_adds_and_holds(ttft, kv, pending, desired):
    assert deciding(ttft, kv=kv, pending=pending).desired == desired


@pytest.mark.capability("AS-8")
def test_the_evidence_names_the_latency():
    assert deciding(1.3).reason == "2→3: TTFTP95Seconds 1.30 > 1.00 (2/2 pods, 0s old)"


@pytest.mark.capability("AS-8")
@given(
    ttft=st.none() | st.floats(0, 600),
    kv=st.floats(0, 1),
    current=st.integers(1, 9),
    pending=st.integers(0, 3),
)
def test_with_a_latency_never_fewer_replicas_than_without(ttft, kv, current, pending):
    pending = min(pending, current - 1)
    facts = {"kv": kv, "current": current, "pending": pending}

    assert deciding(ttft, **facts).desired >= deciding(None, **facts).desired


@pytest.mark.capability("AS-8")
@given(
    slow=st.floats(0, 50),
    slower=st.floats(0, 50),
    ready=st.integers(1, 20),
    pending=st.integers(0, 3),
    broken=st.integers(0, 3),
)
def test_later_answers_never_ask_for_fewer(slow, slower, ready, pending, broken):
    facts = {
        "ready": ready,
        "pending": pending,
        "broken": broken,
        "current": ready + pending + broken,
        "tolerance_up": 0.1,
        "tolerance_down": 0.1,
    }
    low, high = sorted((slow, slower))

    assert replicas_for_latency(low, **facts) <= replicas_for_latency(high, **facts)


@pytest.mark.capability("AS-8", "PF-7")
@pytest.mark.parametrize(
    ("times", "low", "high"),
    [
        ([0.045] * 100, 0.04, 0.05),
        ([0.045] * 94 + [3.0] * 6, 2.5, 3.2),
        ([0.045] * 96 + [3.0] * 4, 0.04, 0.05),
        ([900.0] * 50, 600, 600),
    ],
    ids=["all alike", "six of a hundred are slow", "four of a hundred are slow", "beyond the last bucket"],
)
def test_it_is_the_95th_percentile_and_no_mean(times, low, high):
    found = percentile([answered(*times)], 0.95)

    assert found is not None
    assert low <= found.seconds <= high
    assert found.requests == len(times)


@settings(max_examples=100)
@given(st.lists(st.floats(0.001, 700), min_size=FEWEST_REQUESTS, max_size=200))
def test_the_percentile_is_in_the_bucket_of_the_true_one(times):
    true = sorted(times)[-(-95 * len(times) // 100) - 1]
    found = percentile([answered(*times[::2]), answered(*times[1::2])], 0.95)

    assert found is not None
    bounds = (0.0, *OUTCOME_BUCKETS)
    low = max(bound for bound in bounds if bound < true)
    high = next((bound for bound in bounds if bound >= true), OUTCOME_BUCKETS[-1])
    assert min(low, OUTCOME_BUCKETS[-1]) <= found.seconds <= high


@pytest.mark.capability("AS-8")
def test_few_requests_are_no_evidence():
    assert percentile([answered(*[9.0] * (FEWEST_REQUESTS - 1))], 0.95) is None
    assert percentile([], 0.95) is None
    assert ttft_p95(None, [], T0) is None


@pytest.mark.capability("AS-8")
@pytest.mark.parametrize(
    ("ready_since", "since"),
    [
        ([T0 - minutes(9)], T0 - seconds(60)),
        ([T0 - minutes(9), T0 - seconds(5)], T0 - seconds(5)),
        ([T0 + minutes(9)], T0 - seconds(60)),
    ],
    ids=["the last minute", "only what the newest replica had a part in", "a clock that was set back"],
)
def test_it_looks_at_the_last_minute_since_the_newest_replica(ready_since, since):
    asked: list[datetime] = []

    def outcomes_since(moment: datetime) -> dict[str, Outcomes]:
        asked.append(moment)
        return {"a": answered(*[1.0] * 20), "b": answered(*[1.0] * 20)}

    found = ttft_p95(outcomes_since, ready_since, T0)

    assert asked == [since]
    assert found is not None
    assert found.requests == 40


@pytest.mark.capability("AS-8")
def test_a_burst_is_answered_in_steps_that_wait_for_each_other():
    """The replicas that were added are given the time to show in the answers, so there is no overshoot.

    Two replicas' worth of late answers: with four, answers are in time.
    """
    world = SimulatedCluster(a_service(autoscaling={"maxReplicas": 10, "metrics": WITH_LATENCY}), load_seconds=45)
    log: list[tuple[datetime, float]] = []

    def load(world):
        for pod in world.ready:
            pod.kv, pod.running = 0.5, 5
        log.extend([(world.now, 4.0 / max(1, len(world.ready)))] * 5)  # four replicas answer within a second

    def outcomes_since(moment: datetime) -> dict[str, Outcomes]:
        return {"a": answered(*[time for at, time in log if at > moment])}

    world.load, world.outcomes_since = load, outcomes_since
    world.reconcile()
    world.run(600)

    assert world.desired == 4
    ups = [one.message.split(":")[0] for one in world.events if one.reason == "ScaledUp"]
    assert ups == ["1→2", "2→4"]
    world.run(timedelta(minutes=10).total_seconds())
    assert world.desired == 4, "in time by a hair: held, although the caches are half empty"
