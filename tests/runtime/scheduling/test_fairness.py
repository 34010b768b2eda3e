"""Which waiting request is scheduled next when there is no room for all."""

import pytest

from slipway_runtime.scheduling.fairness import OUTPUT_WEIGHT, Shares, class_rank
from tests.runtime.paper_worker import Play


def served(play: Play, tenants: tuple[str, ...]) -> dict[str, int]:
    """Tokens of output for each tenant so far; a request is named tenant-number."""
    return {t: sum(len(play.text(name)) for name in play.outputs if name.startswith(t)) for t in tenants}


def flood(play: Play, counts: dict[str, int], **fields: object) -> None:
    for tenant, count in counts.items():
        for number in range(count):
            play.add(f"{tenant}-{number}", [number % 40 + 1] * 3, max_tokens=8, tenant=tenant, **fields)


@pytest.mark.capability("BS-6")
def test_a_flood_of_one_tenant_takes_no_more_than_its_share():
    play = Play(blocks=200, max_num_seqs=4, budget=32)
    flood(play, {"flood": 200, "modest": 20})
    while len([name for name in play.outputs if name.startswith("modest")]) < 20:
        play.step()
    tokens = served(play, ("flood", "modest"))
    assert abs(tokens["flood"] - tokens["modest"]) <= 5 * 8, "half each, to within the rows"


@pytest.mark.capability("BS-6")
def test_weights_divide_the_tokens():
    play = Play(blocks=200, max_num_seqs=4, budget=32, tenant_weights={"gold": 3.0})
    flood(play, {"gold": 300, "plain": 300})
    for _ in range(200):
        play.step()
    tokens = served(play, ("gold", "plain"))
    assert 2.6 < tokens["gold"] / tokens["plain"] < 3.4
    assert dict(play.scheduler.stats(0.0).waiting_by_tenant).keys() == {"gold", "plain"}


@pytest.mark.capability("BS-6")
def test_a_tenant_that_sent_nothing_has_no_credit():
    play = Play(blocks=200, max_num_seqs=2, budget=32)
    flood(play, {"busy": 100})
    for _ in range(100):
        play.step()
    flood(play, {"new": 100})
    before = served(play, ("busy", "new"))
    for _ in range(100):
        play.step()
    after = served(play, ("busy", "new"))
    gained = {tenant: after[tenant] - before[tenant] for tenant in after}
    assert 0.8 < gained["busy"] / gained["new"] < 1.25


@pytest.mark.capability("BS-6")
def test_adapters_of_a_tenant_share_alike():
    play = Play(blocks=200, max_num_seqs=4, budget=32, residency={"max_adapters": 2})
    for name in "ab":
        play.load(name)
    flood(play, {"a": 100}, adapter="a")
    for number in range(100):
        play.add(f"b-{number}", [number % 40 + 1] * 3, max_tokens=8, tenant="a", adapter="b")
    for _ in range(100):
        play.step()
    tokens = served(play, ("a", "b"))
    assert 0.8 < tokens["a"] / tokens["b"] < 1.25


def test_a_prefix_from_the_cache_is_not_charged_and_an_output_counts_twice():
    play = Play(blocks=200, budget=64)
    play.add("first", range(1, 18), max_tokens=4, tenant="t")
    play.run()
    play.add("second", range(1, 18), max_tokens=4, tenant="u")
    play.step()
    (sequence,) = play.scheduler._table.running
    assert sequence.share.served == 1 + OUTPUT_WEIGHT, "one token computed, one sampled"


def test_a_weight_is_above_zero():
    with pytest.raises(ValueError, match="above 0"):
        Shares({"t": 0.0})


@pytest.mark.capability("BS-5")
def test_the_important_go_first_under_twice_the_load():
    play = Play(blocks=200, max_num_seqs=2, budget=32, aging_seconds=1e9)
    flood(play, {"low": 60})
    waits = []
    for number in range(30):
        play.add(f"high-{number}", [number + 1] * 3, max_tokens=4, priority=1)
        added = play.now
        while f"high-{number}" not in play.outputs:
            play.step()
        waits.append(play.now - added)
    assert max(waits) <= 8 + 1, "as soon as a row is free"


@pytest.mark.capability("BS-5")
def test_the_unimportant_do_not_starve():
    play = Play(blocks=200, max_num_seqs=2, budget=32, aging_seconds=10.0)
    flood(play, {"high-early": 4}, priority=2)
    play.step()
    play.add("low", [1, 2, 3], max_tokens=2, priority=0)
    play.add("lower", [1, 2, 3], max_tokens=2, priority=-1)
    for number in range(300):
        play.add(f"high-{number}", [number % 40 + 1] * 3, max_tokens=4, priority=2)
        play.step()
    waits = {name: play.outputs[name][0].scheduled_at for name in ("low", "lower")}
    assert 20 <= waits["low"] <= 30
    assert waits["lower"] <= 45
    served_high = [name for name in play.outputs if name.startswith("high")]
    assert len(served_high) > 100, "one of a class goes, then the others again"


def test_a_class_rises_by_one_for_each_time_it_has_waited():
    assert class_rank(0, 60.0, aging_seconds=30.0) == 2.0
    assert class_rank(2, 0.0, aging_seconds=30.0) == 2.0
