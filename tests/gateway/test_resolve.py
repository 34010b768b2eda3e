"""Which service a model name means, and that a change costs the same whatever the size of the fleet."""

from datetime import UTC, datetime

import pytest

from slipway_gateway.picker.endpoints import Endpoint, Route, Service
from slipway_gateway.resolve import RoutingTable

JANUARY = datetime(2026, 1, 1, tzinfo=UTC)
FEBRUARY = datetime(2026, 2, 1, tzinfo=UTC)


def an_endpoint(name: str, service: str = "ns/chat", **facts: str) -> Endpoint:
    return Endpoint(name=name, service=service, revision="r1", url="http://10.0.0.1:8000", **facts)


def a_table(*services: Service, endpoints: tuple[Endpoint, ...] = ()) -> RoutingTable:
    table = RoutingTable()
    for endpoint in endpoints:
        table.set_endpoint(endpoint.name, endpoint)
    for service in services:
        table.set_service(service.key, service)
    return table


def test_on_a_clash_of_names_the_older_service_serves_and_the_other_answers_to_its_full_name():
    younger = Service("a/chat", "chat", created=FEBRUARY)
    older = Service("b/chat", "chat", created=JANUARY)
    table = a_table(younger, older)

    assert table.resolve("chat") == Route(older)
    assert table.resolve("a/chat") == Route(younger)
    assert table.served_models() == [("a/chat", Route(younger)), ("chat", Route(older))]


@pytest.mark.parametrize("reverse", [False, True])
def test_two_services_of_one_second_are_ordered_as_the_operator_orders_them(reverse):
    """Finding 20: by namespace and then by name, not by the joined string, in which "a-b/x" sorts before "a/x"."""
    services = [Service("a/x", "chat", created=JANUARY), Service("a-b/x", "chat", created=JANUARY)]
    table = a_table(*(reversed(services) if reverse else services))

    assert table.resolve("chat") == Route(services[0])


def test_when_the_older_service_goes_the_younger_one_gets_the_name():
    table = a_table(Service("a/chat", "chat", created=FEBRUARY), Service("b/chat", "chat", created=JANUARY))
    table.set_service("b/chat", None)

    assert table.resolve("chat") == table.resolve("a/chat")


def test_a_full_name_cannot_be_taken_by_the_served_name_of_another_service():
    victim = Service("a/chat", "chat", created=FEBRUARY)
    thief = Service("b/fake", "a/chat", created=JANUARY)
    table = a_table(victim, thief)

    assert table.resolve("a/chat") == Route(victim)
    assert table.resolve("b/fake") == Route(thief)
    assert table.served_models() == [("b/fake", Route(thief)), ("chat", Route(victim))]


def test_an_unknown_model_resolves_to_nothing():
    assert a_table(Service("a/chat", "chat")).resolve("") is None
    assert a_table(Service("a/chat", "chat")).resolve("other") is None


def test_a_changed_served_name_leaves_the_old_name_valid_while_a_replica_answers_to_it():
    """Finding 3: both names lead to the service until no replica answers to the old one."""
    table = a_table(
        Service("ns/chat", "new"),
        endpoints=(an_endpoint("p0", served_name="old"), an_endpoint("p1", served_name="new")),
    )

    assert table.resolve("old") is table.resolve("new") is not None
    table.set_endpoint("p0", None)
    assert table.resolve("old") is None
    assert table.resolve("new") is not None


def test_a_former_name_gives_way_to_the_service_that_is_called_so():
    table = a_table(
        Service("ns/chat", "new", created=JANUARY),
        Service("ns/heir", "old", created=FEBRUARY),
        endpoints=(an_endpoint("p0", served_name="old"),),
    )

    assert table.resolve("old") == table.resolve("ns/heir")


def test_a_pod_that_another_object_controls_is_no_endpoint_and_claims_no_name():
    """Security: labels alone would let anyone who may create pods receive the prompts of a service."""
    own = an_endpoint("own", owner_uid="uid-1", served_name="chat")
    table = a_table(
        Service("ns/chat", "chat", uid="uid-1"),
        endpoints=(own, an_endpoint("stranger", owner_uid="uid-2", served_name="bait")),
    )

    assert table.resolve("chat") == Route(Service("ns/chat", "chat", uid="uid-1"), (own,))
    assert table.resolve("bait") is None


def test_pods_of_a_deleted_service_do_not_serve_its_successor():
    table = a_table(Service("ns/chat", "chat", uid="old"), endpoints=(an_endpoint("p0", owner_uid="old"),))
    table.set_service("ns/chat", Service("ns/chat", "chat", uid="new"))

    assert table.resolve("chat") == Route(Service("ns/chat", "chat", uid="new"))


def test_a_change_builds_one_route_and_no_other():
    """Review §3: a status change of one of a thousand services rebuilt the routes of all."""
    table = RoutingTable()
    for number in range(1000):
        key = f"ns/s{number}"
        table.set_service(key, Service(key, f"m{number}"))
        for replica in range(10):
            name = f"ns/s{number}-{replica}"
            table.set_endpoint(name, an_endpoint(name, key))
    assert table.built_routes == 0, "nothing is built before it is asked for"
    for number in range(1000):
        table.resolve(f"m{number}")
    assert table.built_routes == 1000

    table.set_service("ns/s7", Service("ns/s7", "m7", weights={"r1": 100}))
    table.set_endpoint("ns/s8-0", None)
    table.set_endpoint("ns/s8-1", None)
    for number in range(1000):
        table.resolve(f"m{number}")
    assert table.built_routes == 1002


def test_a_change_that_says_nothing_new_builds_nothing():
    table = a_table(Service("ns/chat", "chat"), endpoints=(an_endpoint("p0"),))
    route = table.resolve("chat")

    assert not table.set_service("ns/chat", Service("ns/chat", "chat"))
    assert not table.set_endpoint("p0", an_endpoint("p0"))
    assert table.resolve("chat") is route
