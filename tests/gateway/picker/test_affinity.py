"""Routing with affinity: agreement between gateways, minimal movement, and a bound that no affinity breaks."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway_api.inference_service import RoutingStrategy
from slipway_gateway.picker.affinity import home, within_bound
from slipway_gateway.picker.endpoints import Endpoint, Route, Service
from slipway_gateway.picker.pick import Load, Picked, pick
from slipway_gateway.picker.prefix import TOKENS_OF_BLOCK, PrefixIndex
from slipway_gateway.picker.scorers import UNKNOWN_REQUEST_TOKENS, Candidate, ReplicaLoad, RoutingRequest

names = st.lists(st.text("abcdef", min_size=1, max_size=6), min_size=1, max_size=8, unique=True)
keys = st.integers(0, 2**64 - 1)
KEYS = [number * 0x9E3779B97F4A7C15 % 2**64 for number in range(4000)]


def an_endpoint(name: str, **fields) -> Endpoint:
    return Endpoint(f"ns/{name}", "ns/chat", "r1", f"http://{name}", **fields)


def a_route(*endpoints: Endpoint, strategy: RoutingStrategy = RoutingStrategy.PREFIX_CACHE) -> Route:
    return Route(Service("ns/chat", "chat", strategy=strategy), endpoints)


def picked(route: Route, request: RoutingRequest, **arguments) -> str:
    arguments = {"loads": {}, "draw": 0.0, "tie_break": 0.0} | arguments
    choice = pick(route, request, **arguments)
    assert isinstance(choice, Picked)
    return choice.endpoint.name


FLEET = [an_endpoint(name) for name in ("p0", "p1", "p2", "p3")]
PROMPT = RoutingRequest("chat", cost=1000, blocks=tuple(range(100, 120)))


@given(names, keys, st.data())
def test_when_an_endpoint_leaves_only_its_own_keys_move(endpoints, key, data):
    left = data.draw(st.sampled_from(endpoints))
    rest = [name for name in endpoints if name != left]
    if not rest:
        return

    before, after = home(key, endpoints), home(key, rest)

    assert after == before or before == left


@given(names, keys, st.text("xyz", min_size=1, max_size=6))
def test_when_an_endpoint_joins_keys_move_only_to_it(endpoints, key, joined):
    assert home(key, [*endpoints, joined]) in {home(key, endpoints), joined}


@pytest.mark.parametrize("count", [2, 3, 8])
def test_every_endpoint_is_the_home_of_its_share_of_the_keys(count):
    homes = Counter(home(key, [f"ns/p{number}" for number in range(count)]) for key in KEYS)

    assert len(homes) == count
    assert all(abs(share - len(KEYS) / count) < 0.15 * len(KEYS) / count for share in homes.values())


@pytest.mark.capability("RG-4")
@given(st.lists(st.integers(0, 100_000), min_size=2, max_size=8), st.integers(0, 10_000), st.data())
def test_affinity_never_picks_an_endpoint_beyond_the_bound(loads, cost, data):
    """However much is cached where, and whatever the session: the load stays near the least."""
    fleet = [an_endpoint(f"p{number}") for number in range(len(loads))]
    prefixes = PrefixIndex()
    for endpoint in fleet:
        prefixes.add(endpoint.name, PROMPT.blocks[: data.draw(st.integers(0, 20))])
    request = replace(PROMPT, cost=cost, session=data.draw(st.sampled_from(["", "s1", "s2"])))
    held = {endpoint.name: Load(load, 1) for endpoint, load in zip(fleet, loads, strict=True)}

    name = picked(a_route(*fleet), request, loads=held, prefixes=prefixes, tie_break=data.draw(st.floats(0, 0.99)))

    mean = sum(loads) / len(loads)
    saved = prefixes.matched(name, request.blocks) * TOKENS_OF_BLOCK
    assert held[name].tokens <= min(loads) + 2 * min(cost, 2048) + 0.25 * mean + saved


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=8), st.integers(0, 10_000))
def test_the_least_loaded_is_always_within_the_bound(loads, cost):
    candidates = [Candidate(an_endpoint(f"p{number}"), tokens, 1) for number, tokens in enumerate(loads)]
    within = within_bound(RoutingRequest("chat", cost=cost), candidates)

    assert min(candidates, key=lambda candidate: candidate.load_tokens) in within


@pytest.mark.capability("RG-4")
def test_two_gateways_that_share_nothing_send_a_new_prompt_to_the_same_endpoint():
    for number in range(50):
        request = replace(PROMPT, blocks=(number * 7919,))
        one = picked(a_route(*FLEET), request, prefixes=PrefixIndex(), loads={"ns/p1": Load(900, 1)})
        two = picked(a_route(*FLEET), request, prefixes=PrefixIndex(), loads={"ns/p2": Load(900, 1)}, tie_break=0.9)

        assert one == two


@pytest.mark.capability("RG-4", "DD-5")
def test_the_next_turn_goes_where_the_longest_part_of_the_conversation_is_cached():
    prefixes = PrefixIndex()
    for endpoint in FLEET:
        prefixes.add(endpoint.name, PROMPT.blocks[:5])  # the system prompt is cached everywhere
    prefixes.add("ns/p2", PROMPT.blocks[:15])

    chosen = {
        picked(a_route(*FLEET), PROMPT, prefixes=prefixes, tie_break=tie / 10, loads={"ns/p2": Load(2000, 1)})
        for tie in range(10)
    }

    assert chosen == {"ns/p2"}


@pytest.mark.capability("RG-4")
def test_an_endpoint_with_the_prefix_and_too_much_load_is_left_to_finish_its_work():
    prefixes = PrefixIndex()
    prefixes.add("ns/p2", PROMPT.blocks)
    saved = len(PROMPT.blocks) * TOKENS_OF_BLOCK
    busy = {endpoint.name: Load(10_000, 5) for endpoint in FLEET}

    within = picked(a_route(*FLEET), PROMPT, prefixes=prefixes, loads=busy | {"ns/p2": Load(10_000 + saved, 6)})
    beyond = picked(a_route(*FLEET), PROMPT, prefixes=prefixes, loads=busy | {"ns/p2": Load(17_000, 9)})

    assert within == "ns/p2"
    assert beyond != "ns/p2"


@pytest.mark.capability("DD-5", "RG-4")
def test_a_session_stays_although_its_prompts_are_too_short_for_a_block():
    sessions = {f"s{number}" for number in range(200)}
    homes = {
        session: {
            picked(a_route(*FLEET), RoutingRequest("chat", cost=300, session=session), tie_break=tie / 5)
            for tie in range(5)
        }
        for session in sessions
    }

    assert all(len(endpoints) == 1 for endpoints in homes.values())
    assert {name for (name,) in homes.values()} == {endpoint.name for endpoint in FLEET}


@pytest.mark.capability("RG-4")
def test_of_the_sessions_only_the_share_of_a_new_replica_moves():
    before = {key: picked(a_route(*FLEET), RoutingRequest("chat", session=f"s{key}")) for key in range(1000)}
    larger = a_route(*FLEET, an_endpoint("p4"))
    after = {key: picked(larger, RoutingRequest("chat", session=f"s{key}")) for key in range(1000)}

    moved = [key for key in before if before[key] != after[key]]
    assert {after[key] for key in moved} == {"ns/p4"}
    assert 140 < len(moved) < 260  # a fifth


@pytest.mark.capability("ML-8")
def test_an_endpoint_with_the_adapter_is_preferred_within_the_bound():
    fleet = [an_endpoint("p0"), an_endpoint("p1", adapters=frozenset({"law"})), an_endpoint("p2")]
    request = RoutingRequest("law", cost=1000, adapter="law", blocks=(1, 2, 3))

    assert {picked(a_route(*fleet), request, tie_break=tie / 5) for tie in range(5)} == {"ns/p1"}
    assert picked(a_route(*fleet), request, loads={"ns/p1": Load(50_000, 9)}) != "ns/p1"


@pytest.mark.capability("RG-3")
def test_load_is_counted_in_tokens_and_contains_what_other_gateways_have_sent():
    quiet = {"ns/p1": ReplicaLoad(0.1, foreign_waiting=0)}
    busy = {"ns/p0": ReplicaLoad(0.1, foreign_waiting=3)}
    two = [FLEET[0], FLEET[1]]
    route = a_route(*two, strategy=RoutingStrategy.LEAST_LOAD)
    # One long request is more load than two short ones.
    loads = {"ns/p0": Load(100, 2), "ns/p1": Load(UNKNOWN_REQUEST_TOKENS, 1)}

    assert picked(route, RoutingRequest("chat"), loads=loads) == "ns/p0"
    assert picked(route, RoutingRequest("chat"), loads=loads, reports=busy | quiet) == "ns/p1"


def test_among_equal_loads_the_one_with_more_free_cache_is_picked():
    reports = {"ns/p0": ReplicaLoad(0.9), "ns/p1": ReplicaLoad(0.2)}
    route = a_route(FLEET[0], FLEET[1], strategy=RoutingStrategy.LEAST_LOAD)

    assert picked(route, RoutingRequest("chat"), reports=reports) == "ns/p1"


def test_round_robin_takes_the_endpoints_in_turn():
    route = a_route(*FLEET, strategy=RoutingStrategy.ROUND_ROBIN)
    chosen = [picked(route, PROMPT, turn=turn, loads={"ns/p0": Load(10**6, 9)}) for turn in range(8)]

    assert chosen == [endpoint.name for endpoint in FLEET] * 2
