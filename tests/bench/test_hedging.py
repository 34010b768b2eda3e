"""The simulation of hedging: stalls of replicas vanish from the tail, and the extra load stays within the budget."""

import pytest

from bench.hedging import simulate


@pytest.mark.capability("RG-5")
def test_hedging_cuts_the_tail_for_little_more_load():
    base = simulate(5.0, hedged=False, requests=5000, warm_up=500)
    hedged = simulate(5.0, hedged=True, requests=5000, warm_up=500)

    assert len(base.ttft) == len(hedged.ttft) == 4500
    assert base.hedges == 0
    assert 0 < hedged.hedges < 0.1 * len(hedged.ttft)
    assert sorted(hedged.ttft)[-45] < 0.8 * sorted(base.ttft)[-45]
    assert hedged.computed_tokens < 1.1 * base.computed_tokens
