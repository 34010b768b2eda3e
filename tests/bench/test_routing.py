"""The simulation of routing: affinity brings hits and balance under the real picker, and counts nothing twice."""

import pytest

from bench.routing import simulate
from slipway_api.inference_service import RoutingStrategy


@pytest.mark.capability("RG-4", "DD-5")
@pytest.mark.parametrize("mix", ["shared prefixes", "conversations"])
def test_prefix_routing_hits_more_than_round_robin_and_overloads_no_replica(mix):
    base = simulate(mix, RoutingStrategy.ROUND_ROBIN, 8, requests=1500, warm_up=500)
    prefix = simulate(mix, RoutingStrategy.PREFIX_CACHE, 8, requests=1500, warm_up=500)

    assert len(prefix.ttft) == len(base.ttft) == 1000
    assert prefix.prompt_tokens == base.prompt_tokens
    assert prefix.hit_rate > 1.25 * base.hit_rate
    assert max(prefix.per_replica.values()) < 1.4 * 1000 / 8
    assert sum(prefix.ttft) < 0.9 * sum(base.ttft)


@pytest.mark.capability("DD-5")
def test_with_session_ids_two_gateways_agree_from_the_first_turn():
    without = simulate("conversations", RoutingStrategy.PREFIX_CACHE, 8, requests=1500, warm_up=500)
    with_ids = simulate(
        "conversations", RoutingStrategy.PREFIX_CACHE, 8, with_sessions=True, requests=1500, warm_up=500
    )

    assert with_ids.hit_rate > without.hit_rate


@pytest.mark.capability("RG-4", "DD-5")
@pytest.mark.parametrize("mix", ["shared prefixes", "conversations"])
def test_kv_events_bring_more_hits_than_the_guess(mix):
    guess = simulate(mix, RoutingStrategy.PREFIX_CACHE, 8, requests=1500, warm_up=500)
    told = simulate(mix, RoutingStrategy.PREFIX_CACHE, 8, kv_events=True, requests=1500, warm_up=500)

    assert told.hit_rate > guess.hit_rate + 0.02
    assert sum(told.ttft) < sum(guess.ttft)
