"""The baseline of each optimization in the same harness does more work for the same answers: counted, not timed."""

import random

import pytest

from bench.eviction import SPLITS
from bench.features import in_static_batches, steps_of, varied_lengths
from bench.routing import simulate
from bench.servers import EMBEDDED_MODEL
from slipway_api.inference_service import RoutingStrategy
from slipway_runtime.engine.build import build_engine
from slipway_runtime.scheduling.trace import Machine, play, skewed_trace


def an_engine(**options: object):
    return build_engine(EMBEDDED_MODEL, dtype="fp32", max_num_seqs=4, kv_cache_bytes=8 << 20, **options)


@pytest.mark.capability("BM-2", "PF-3")
def test_continuous_batching_against_static_batches_of_the_same_requests():
    requests = varied_lengths(12)
    continuous, texts = steps_of(an_engine(), requests)
    static, same_texts = in_static_batches(an_engine(), requests, size=4)

    assert texts == same_texts
    assert static > 1.2 * continuous


@pytest.mark.capability("BM-2")
def test_the_prefix_cache_against_the_same_engine_without_it():
    requests = varied_lengths(6, shared=64)
    engines = an_engine(), an_engine(prefix_caching=False)
    # One after another: a request finds only what an earlier one has computed.
    (_, texts), (_, same_texts) = (in_static_batches(engine, requests, size=1) for engine in engines)
    with_it, without = (engine.stats(0.0) for engine in engines)

    assert texts == same_texts
    assert (with_it.prefix_hits, without.prefix_hits) == (5 * 64, 0)
    assert without.computed_tokens == with_it.computed_tokens + 5 * 64


@pytest.mark.capability("BM-2")
def test_speculation_against_the_same_engine_without_it():
    requests = varied_lengths(4, repeated=True)
    engines = an_engine(speculation="promptLookup", speculation_max_tokens=4), an_engine()
    (fewer, texts), (more, same_texts) = (steps_of(engine, requests) for engine in engines)

    assert texts == same_texts
    assert engines[0].stats(0.0).accepted_tokens > 0 == engines[1].stats(0.0).drafts
    assert fewer < more


@pytest.mark.capability("BM-2")
def test_overlap_against_the_same_engine_without_it():
    requests = varied_lengths(6)
    (_, texts), (_, same_texts) = (steps_of(an_engine(overlap=on), requests) for on in (True, False))

    assert texts == same_texts


@pytest.mark.capability("BM-2")
def test_prefix_routing_against_round_robin_over_the_same_arrivals():
    base, prefix = (
        simulate("shared prefixes", strategy, 4, requests=800, warm_up=300)
        for strategy in (RoutingStrategy.ROUND_ROBIN, RoutingStrategy.PREFIX_CACHE)
    )

    assert base.prompt_tokens == prefix.prompt_tokens
    assert prefix.hit_rate > base.hit_rate


@pytest.mark.capability("BM-2", "ML-6")
def test_one_budget_for_adapters_and_kv_against_two_independent_lrus_over_the_same_trace():
    trace = skewed_trace(random.Random(7).random, requests=200)
    aware = play(trace, dependency_aware=True)
    apart = [play(trace, Machine(adapter_share=share), dependency_aware=False) for share in SPLITS]

    assert aware.max_invalid_blocks == 0
    assert all(result.max_invalid_blocks > 0 for result in apart), "KV that no request can use"
