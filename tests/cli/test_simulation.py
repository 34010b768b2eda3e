"""The simulation runs the operator's own plan: it scales as the operator would, and loses no request."""

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway_cli.simulation import Load, ReplicaModel, simulate
from tests.builders import a_service

FAST = ReplicaModel(cold_start=timedelta(seconds=20), token_seconds=0.01)


def autoscaled(**policy):
    return a_service(autoscaling={"maxReplicas": 4, **policy})


@pytest.mark.capability("BM-3", "AS-1")
def test_a_burst_scales_up_and_its_end_down_again_after_the_window():
    trace = [
        Load(seconds=0, requests_per_second=1),
        Load(seconds=60, requests_per_second=60, output_tokens=400),
        Load(seconds=180, requests_per_second=0),
    ]

    result = simulate(autoscaled(), trace, FAST, seconds=1200)

    assert max(moment.desired for moment in result.moments) == 4
    assert result.moments[-1].desired == 1
    ups = [at for at, reason, _ in result.changes if reason == "ScaledUp"]
    downs = [at for at, reason, _ in result.changes if reason == "ScaledDown"]
    assert min(ups) < 90
    assert min(downs) >= 180 + 300 - 120  # a whole stabilization window after the last high recommendation
    assert result.unfinished == 0


@pytest.mark.capability("BM-3")
def test_a_fixed_number_stays_and_nothing_happens():
    result = simulate(a_service(replicas=2), [Load(seconds=0, requests_per_second=5)], FAST, seconds=120)

    assert {moment.desired for moment in result.moments} == {2}
    assert result.moments[-1].ready == 2
    assert result.changes == ()


@pytest.mark.capability("BM-3")
def test_the_reason_of_a_change_has_its_numbers():
    trace = [Load(seconds=0, requests_per_second=100, output_tokens=400)]

    result = simulate(autoscaled(), trace, FAST, seconds=120)

    assert "QueueDepth" in result.changes[0][2]
    assert result.changes[0][2].startswith("1→3")  # two replicas in 30 s


@pytest.mark.capability("BM-3")
@settings(max_examples=15)
@given(
    rates=st.lists(st.floats(0, 50), min_size=1, max_size=6),
    cold=st.integers(2, 120),
    most=st.integers(1, 6),
)
def test_replicas_stay_within_their_limits_and_every_request_is_counted(rates, cold, most):
    trace = [Load(seconds=60.0 * number, requests_per_second=rate) for number, rate in enumerate(rates)]
    model = ReplicaModel(cold_start=timedelta(seconds=cold), token_seconds=0.01)

    result = simulate(a_service(autoscaling={"maxReplicas": most}), trace, model, seconds=60.0 * len(rates) + 60)

    assert all(1 <= moment.desired <= most for moment in result.moments)
    arrived = sum(rate * 60 for rate in rates[:-1]) + rates[-1] * 120
    assert abs(result.requests - arrived) <= len(rates) + 120  # steps of two seconds
    assert 0 <= result.unfinished <= result.requests


def test_the_same_trace_gives_the_same_result():
    trace = [Load(seconds=0, requests_per_second=7.3)]

    assert simulate(autoscaled(), trace, FAST, seconds=300) == simulate(autoscaled(), trace, FAST, seconds=300)


@pytest.mark.capability("OP-11", "BM-3")
def test_the_service_of_another_engine_scales_as_one_of_our_own():
    trace = [Load(seconds=0, requests_per_second=1), Load(seconds=60, requests_per_second=40)]
    service = autoscaled()
    runtime = service.spec.runtime.model_copy(update={"engine": "vllm"})
    other = service.model_copy(update={"spec": service.spec.model_copy(update={"runtime": runtime})})
    own, foreign = (simulate(each, trace, FAST, seconds=300) for each in (service, other))

    assert foreign == own
    assert own.moments[-1].ready > 1
