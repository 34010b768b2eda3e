"""Properties of the pick: exact splits, only fitting replicas, load spread, no randomness of its own."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway_api.inference_service import RoutingStrategy
from slipway_gateway.picker.endpoints import Endpoint, Route, Service
from slipway_gateway.picker.pick import Load, NoneReady, Picked, UnknownRevision, pick
from slipway_gateway.picker.scorers import RoutingRequest
from slipway_gateway.picker.split import choose_revision

revisions = st.sampled_from(["r1", "r2", "r3", "r4"])
weights = st.dictionaries(revisions, st.integers(0, 100), max_size=4)
draws = st.floats(0, 1, exclude_max=True)


REQUEST = RoutingRequest("chat")


def an_endpoint(name: str, revision: str = "r1") -> Endpoint:
    return Endpoint(name=f"ns/{name}", service="ns/chat", revision=revision, url=f"http://{name}:8000")


def a_route(*endpoints: Endpoint, **shares: int) -> Route:
    return Route(Service("ns/chat", "chat", weights=shares), endpoints)


endpoints = st.lists(st.tuples(st.integers(0, 9), revisions), unique_by=lambda pair: pair[0], max_size=6).map(
    lambda pairs: tuple(an_endpoint(f"p{number}", revision) for number, revision in pairs)
)


@given(weights, st.sets(revisions))
def test_of_evenly_spaced_draws_every_ready_revision_gets_exactly_its_weight(shares, ready):
    total = sum(weight for revision, weight in shares.items() if revision in ready)
    chosen = Counter(choose_revision(shares, ready, (draw + 0.5) / total) for draw in range(total))

    assert chosen == {revision: weight for revision, weight in shares.items() if weight and revision in ready}


@given(weights, st.sets(revisions), draws)
def test_a_revision_without_weight_or_without_replica_is_never_chosen(shares, ready, draw):
    revision = choose_revision(shares, ready, draw)

    assert revision is None or (shares[revision] > 0 and revision in ready)


@given(weights, endpoints, draws, draws, st.data())
def test_the_picked_endpoint_fits(shares, fleet, draw, tie_break, data):
    names = st.sets(st.sampled_from([endpoint.name for endpoint in fleet])) if fleet else st.just(set())
    tried, ejected = data.draw(names), data.draw(names)
    pin = data.draw(st.sampled_from(["", "r1", "r2"]))
    loads = {endpoint.name: Load(data.draw(st.integers(0, 1000)), 1) for endpoint in fleet}
    route = Route(Service("ns/chat", "chat", weights=shares), fleet)
    request = RoutingRequest("chat", pin=pin)
    arguments = {"loads": loads, "ejected": ejected, "tried": tried, "draw": draw, "tie_break": tie_break}
    picked = pick(route, request, **arguments)

    assert picked == pick(route, request, **arguments), "the same arguments give the same pick"
    match picked:
        case Picked(endpoint):
            peers = [e for e in fleet if e.revision == endpoint.revision and e.name not in tried]
            assert endpoint in peers
            assert not pin or endpoint.revision == pin
            if endpoint.name in ejected:
                assert all(peer.name in ejected for peer in peers), "a suspect only when no other is left"
            if shares.get(endpoint.revision, 0) == 0 and not pin:
                assert not any(shares.get(e.revision, 0) for e in fleet if e.name not in tried)
        case UnknownRevision(revision):
            assert revision == pin
            assert pin not in shares
        case NoneReady():
            assert not any(e.name not in tried and (not pin or e.revision == pin) for e in fleet)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=8), draws)
def test_the_least_loaded_replica_is_picked_and_equals_share_by_tie_break(loads, tie_break):
    fleet = [an_endpoint(f"p{number}") for number in range(len(loads))]
    picked = pick(
        a_route(*fleet),
        REQUEST,
        loads={endpoint.name: Load(load, 1) for endpoint, load in zip(fleet, loads, strict=True)},
        draw=0.0,
        tie_break=tie_break,
    )

    assert isinstance(picked, Picked)
    assert loads[fleet.index(picked.endpoint)] == min(loads)


def test_equal_replicas_are_all_picked():
    fleet = [an_endpoint(f"p{number}") for number in range(4)]
    picked = [pick(a_route(*fleet), REQUEST, loads={}, draw=0.0, tie_break=number / 4) for number in range(4)]

    assert picked == [Picked(endpoint) for endpoint in fleet]


def test_a_pin_to_an_unknown_revision_is_told_apart_from_one_that_is_not_ready():
    route = a_route(an_endpoint("p0", "r1"), r1=90, r2=10)

    assert pick(route, RoutingRequest("chat", pin="r9"), loads={}, draw=0, tie_break=0) == UnknownRevision("r9")
    assert pick(route, RoutingRequest("chat", pin="r2"), loads={}, draw=0, tie_break=0) == NoneReady(
        "revision r2 of chat has no ready replica"
    )


def test_while_status_lags_behind_a_rollout_any_ready_replica_serves():
    route = a_route(an_endpoint("new", "r2"), r1=100)

    assert pick(route, REQUEST, loads={}, draw=0.5, tie_break=0) == Picked(an_endpoint("new", "r2"))


@pytest.mark.capability("EV-2", "RG-1")
def test_a_revision_that_was_rolled_back_answers_only_those_that_pin_it():
    """Also while no other revision has a ready replica: what failed its analysis or its gates answers nobody."""
    route = a_route(an_endpoint("bad", "new"), old=100, new=0)
    route = replace(route, service=replace(route.service, withheld=frozenset({"new"})))

    def picked(pin: str = ""):
        return pick(route, RoutingRequest("chat", pin=pin), loads={}, draw=0.5, tie_break=0.5)

    assert picked() == NoneReady("chat has no ready replica")
    assert picked(pin="new") == Picked(route.endpoints[0])


def test_a_scorer_is_given_the_request_and_the_candidates():
    """Review of the control plane, §5.5: later scorers match prefixes and adapters of the request."""
    seen = []

    def prefers_the_last(request, candidates):
        seen.append((request, [candidate.endpoint.name for candidate in candidates]))
        return [float(number) for number in range(len(candidates))]

    request = RoutingRequest("chat", cost=7)
    picked = pick(
        a_route(an_endpoint("p0"), an_endpoint("p1")),
        request,
        loads={},
        draw=0,
        tie_break=0,
        weighted=[(prefers_the_last, 1.0)],
    )

    assert picked == Picked(an_endpoint("p1"))
    assert seen == [(request, ["ns/p0", "ns/p1"])]


@pytest.mark.capability("RD-9")
@pytest.mark.parametrize("strategy", list(RoutingStrategy))
@given(nodes=st.lists(st.sampled_from(["", "a", "b"]), min_size=1, max_size=6), draw=draws, turn=st.integers(0, 9))
def test_replicas_on_the_node_of_a_lost_one_come_last(strategy, nodes, draw, turn):
    fleet = [replace(an_endpoint(f"p{number}"), node=node) for number, node in enumerate(nodes)]
    route = Route(Service("ns/chat", "chat", strategy=strategy), tuple(fleet))
    picked = pick(route, REQUEST, loads={}, avoid_nodes={"a"}, draw=draw, tie_break=draw, turn=turn)

    assert picked.endpoint.node != "a" or set(nodes) == {"a"}
