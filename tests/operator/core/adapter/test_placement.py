"""Which replicas load an adapter: all, or some that move as little as possible."""

from collections import Counter
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway_api.lora_adapter import Placement, PlacementMode
from slipway_api.runtime_api import AdapterInfo
from slipway_operator.core.adapter.observed import AdapterPod, Listing
from slipway_operator.core.adapter.placement import UNREADY_FOR, choose, next_change
from tests.builders import T0

NAMES = st.lists(st.text("abcdefgh", min_size=1, max_size=6), min_size=2, max_size=12, unique=True)


def pods(*names: str, **facts: object) -> list[AdapterPod]:
    return [AdapterPod(name=name, uid=f"uid-{name}", ready=True, **facts) for name in names]  # type: ignore[arg-type]


def some(count: int) -> Placement:
    return Placement(mode=PlacementMode.REPLICAS, replicas=count)


def names_of(chosen: tuple[AdapterPod, ...]) -> list[str]:
    return [pod.name for pod in chosen]


def having(pod: AdapterPod, *adapters: str, most: int = 0) -> AdapterPod:
    known = {name: AdapterInfo(name=name, state="host") for name in adapters}
    listing = Listing(at=T0, boot_id="b", restarts=0, adapters=known, max_cpu_adapters=most)
    return AdapterPod(name=pod.name, uid=pod.uid, ready=True, listing=listing)


@pytest.mark.capability("ML-8")
@given(names=NAMES, count=st.integers(1, 6), newcomer=st.text("xyz", min_size=1, max_size=6))
def test_a_new_replica_moves_at_most_one_copy_of_an_adapter(names, count, newcomer):
    before = set(names_of(choose("sailor", pods(*names), some(count), T0)))
    after = set(names_of(choose("sailor", pods(*names, newcomer), some(count), T0)))

    assert len(after) == min(count, len(names) + 1)
    assert after - before <= {newcomer}, "nothing moves between the old ones"


@pytest.mark.capability("ML-8")
@given(names=NAMES, count=st.integers(1, 6), position=st.integers(0, 11))
def test_a_replica_that_goes_gives_away_only_its_own_adapters(names, count, position):
    gone = names[position % len(names)]
    before = set(names_of(choose("sailor", pods(*names), some(count), T0)))
    after = set(names_of(choose("sailor", pods(*(one for one in names if one != gone)), some(count), T0)))

    assert before - {gone} <= after


@given(names=NAMES, count=st.integers(1, 6), seed=st.randoms(use_true_random=False))
def test_the_order_in_which_replicas_are_seen_changes_nothing(names, count, seed):
    shuffled = list(names)
    seed.shuffle(shuffled)

    assert choose("sailor", pods(*names), some(count), T0) == choose("sailor", pods(*shuffled), some(count), T0)


def test_adapters_spread_over_the_replicas():
    replicas = pods(*(f"chat-{number}" for number in range(8)))
    counts = Counter(name for n in range(400) for name in names_of(choose(f"a{n}", replicas, some(2), T0)))

    assert len(counts) == 8
    assert max(counts.values()) <= 1.5 * 100


def test_a_replica_whose_memory_is_full_of_others_comes_last_and_one_that_has_the_adapter_keeps_it():
    first, *others = names_of(choose("sailor", pods("a", "b", "c"), some(3), T0))
    best = next(iter(names_of(choose("sailor", pods("a", "b", "c"), some(1), T0))))
    full = [having(pod, "x", "y", most=2) if pod.name == best else pod for pod in pods("a", "b", "c")]
    holds = [having(pod, "x", "sailor", most=2) if pod.name == best else pod for pod in pods("a", "b", "c")]

    assert names_of(choose("sailor", full, some(1), T0)) != [best]
    assert names_of(choose("sailor", holds, some(1), T0)) == [best]
    assert {first, *others} == {"a", "b", "c"}


def test_a_replica_that_is_unready_for_a_moment_keeps_its_adapters():
    flapping = AdapterPod(name="a", uid="a", ready=False, unready_since=T0)
    starting = AdapterPod(name="b", uid="b", ready=False)
    soon, late = T0 + timedelta(seconds=5), T0 + UNREADY_FOR

    assert names_of(choose("sailor", [flapping, starting], Placement(), soon)) == ["a"]
    assert names_of(choose("sailor", [flapping, starting], Placement(), late)) == []
    assert next_change([flapping, starting], soon) == late
    assert next_change([flapping, starting], late) is None
