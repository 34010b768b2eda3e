"""Properties of the pick: exact splits, only fitting replicas, load spread, nothing left to chance."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from slipway_gateway.picker.endpoints import Endpoint, Route, RoutingTable, Service
from slipway_gateway.picker.pick import Load, NoneReady, Picked, UnknownRevision, pick
from slipway_gateway.picker.split import choose_revision

revisions = st.sampled_from(["r1", "r2", "r3", "r4"])
weights = st.dictionaries(revisions, st.integers(0, 100), max_size=4)
draws = st.floats(0, 1, exclude_max=True)


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
def test_whoever_is_picked_fits(shares, fleet, draw, tie_break, data):
    names = st.sets(st.sampled_from([endpoint.name for endpoint in fleet])) if fleet else st.just(set())
    tried, ejected = data.draw(names), data.draw(names)
    pin = data.draw(st.sampled_from(["", "r1", "r2"]))
    loads = {endpoint.name: Load(data.draw(st.integers(0, 1000)), 1) for endpoint in fleet}
    route = Route(Service("ns/chat", "chat", weights=shares), fleet)
    arguments = {"loads": loads, "ejected": ejected, "tried": tried, "pin": pin, "draw": draw, "tie_break": tie_break}
    picked = pick(route, **arguments)

    assert picked == pick(route, **arguments), "the same arguments give the same pick"
    match picked:
        case Picked(endpoint):
            peers = [e for e in fleet if e.revision == endpoint.revision and e.name not in tried]
            assert endpoint in peers
            assert not pin or endpoint.revision == pin
            if endpoint.name in ejected:
                assert all(peer.name in ejected for peer in peers), "a suspect only when nobody else is left"
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
        loads={endpoint.name: Load(load, 1) for endpoint, load in zip(fleet, loads, strict=True)},
        draw=0.0,
        tie_break=tie_break,
    )

    assert isinstance(picked, Picked)
    assert loads[fleet.index(picked.endpoint)] == min(loads)


def test_equals_all_get_their_turn():
    fleet = [an_endpoint(f"p{number}") for number in range(4)]
    picked = [pick(a_route(*fleet), loads={}, draw=0.0, tie_break=number / 4) for number in range(4)]

    assert picked == [Picked(endpoint) for endpoint in fleet]


def test_a_pin_to_an_unknown_revision_is_told_apart_from_one_that_is_not_ready():
    route = a_route(an_endpoint("p0", "r1"), r1=90, r2=10)

    assert pick(route, loads={}, pin="r9", draw=0, tie_break=0) == UnknownRevision("r9")
    assert pick(route, loads={}, pin="r2", draw=0, tie_break=0) == NoneReady("revision r2 of chat has no ready replica")


def test_while_status_lags_behind_a_rollout_whoever_is_ready_serves():
    route = a_route(an_endpoint("new", "r2"), r1=100)

    assert pick(route, loads={}, draw=0.5, tie_break=0) == Picked(an_endpoint("new", "r2"))


def test_on_a_clash_of_names_the_older_service_serves_and_the_other_answers_to_its_full_name():
    younger = Service("a/chat", "chat", created="2026-02-01T00:00:00+00:00")
    older = Service("b/chat", "chat", created="2026-01-01T00:00:00+00:00")
    table = RoutingTable.of([younger, older], [])

    assert table.resolve("chat") == Route(older)
    assert table.resolve("a/chat") == Route(younger)
    assert table.served_models() == [("a/chat", younger), ("chat", older)]


def test_a_full_name_cannot_be_taken_by_someone_elses_served_name():
    victim = Service("a/chat", "chat", created="2026-02-01T00:00:00+00:00")
    thief = Service("b/fake", "a/chat", created="2026-01-01T00:00:00+00:00")
    table = RoutingTable.of([victim, thief], [])

    assert table.resolve("a/chat") == Route(victim)
    assert table.resolve("b/fake") == Route(thief)
    assert table.served_models() == [("b/fake", thief), ("chat", victim)]


def test_an_unknown_model_resolves_to_nothing():
    assert RoutingTable.of([Service("a/chat", "chat")], []).resolve("") is None


def test_a_change_of_endpoints_makes_a_new_table_and_leaves_the_old_one_alone():
    table = RoutingTable.of([Service("ns/chat", "chat")], [an_endpoint("p0")])
    changed = table.with_endpoints("ns/chat", [])

    assert table.routes["ns/chat"].endpoints == (an_endpoint("p0"),)
    assert changed.routes["ns/chat"].endpoints == ()
