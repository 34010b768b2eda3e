"""No service uses up another's share of the gateway: retries, memory, connections (OP-14)."""

import asyncio

import pytest

from slipway_gateway.fleet import Fleet
from slipway_gateway.gateway import Gateway
from slipway_gateway.picker.endpoints import Endpoint, Service
from slipway_gateway.settings import GatewaySettings
from tests.gateway.doubles import Runtime, a_caller, be_full, hang_up, until


def serve(fleet: Fleet, name: str, *urls: str) -> None:
    key = f"team/{name}"
    fleet.set_service(key, Service(key, name))
    for number, url in enumerate(urls):
        pod = f"{key}-{number}"
        fleet.set_endpoint(pod, Endpoint(pod, key, "r1", url))


def a_gateway_for(fleet: Fleet, **settings) -> Gateway:
    base = {"host": "127.0.0.1", "port": 0, "admin_port": 0, "propagation_seconds": 0}
    return Gateway(GatewaySettings(**base | settings), fleet)


@pytest.mark.capability("OP-14")
async def test_an_overloaded_service_takes_no_retries_from_its_neighbour():
    """Finding 8: with a global budget a healthy neighbour with one dead replica answered 13 of 30 with 503."""
    async with Runtime(be_full) as full, Runtime(be_full) as full_too, Runtime() as well, Runtime(hang_up) as dead:
        fleet = Fleet()
        serve(fleet, "overloaded", full.url, full_too.url)
        serve(fleet, "healthy", dead.url, well.url)
        async with a_gateway_for(fleet) as gateway, a_caller(gateway) as caller:
            for _ in range(100):
                async with caller.chat(model="overloaded") as response:
                    assert response.status == 429
            budget = fleet.destination("team/overloaded").retry_budget
            assert not budget.spend(), "the overloaded service has used up its own retries"
            statuses = []
            for _ in range(30):
                async with caller.chat(model="overloaded"), caller.chat(model="healthy") as response:
                    statuses.append(response.status)

        assert statuses == [200] * 30


@pytest.mark.capability("OP-14")
async def test_a_service_whose_replicas_hang_leaves_memory_and_connections_to_its_neighbour():
    settings = {"max_connections": 60, "max_connections_per_client": 60, "max_bodies_bytes": 200_000}
    async with Runtime().hold() as hung, Runtime() as well:
        fleet = Fleet()
        serve(fleet, "hung", hung.url)
        serve(fleet, "healthy", well.url)
        async with a_gateway_for(fleet, **settings) as gateway, a_caller(gateway) as caller:
            padding = "x" * 5000
            waiting = [asyncio.create_task(caller.chat(model="hung", padding=padding).__aenter__()) for _ in range(50)]
            await until(lambda: sum(task.done() for task in waiting) + hung.requests == 50)
            refused = [task.result().status for task in waiting if task.done()]
            statuses = []
            for _ in range(30):
                async with caller.chat(model="healthy", padding=padding) as response:
                    statuses.append(response.status)
            async with caller.session.get(f"{caller.admin_url}/metrics") as response:
                text = await response.text()
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

        assert statuses == [200] * 30
        assert refused
        assert set(refused) == {429}
        assert hung.requests <= 30, "half of the connections at most"
        assert "slipway_gateway_refused_total{" in text


async def test_a_broken_service_ejects_no_replica_of_another():
    async with Runtime(hang_up) as broken, Runtime() as well:
        fleet = Fleet()
        serve(fleet, "broken", broken.url)
        serve(fleet, "healthy", well.url)
        async with a_gateway_for(fleet) as gateway, a_caller(gateway) as caller:
            for _ in range(5):
                async with caller.chat(model="broken") as response:
                    assert response.status == 502

        assert not fleet.destination("team/healthy").health
        assert fleet.destination("team/broken").health


async def test_what_is_remembered_of_a_service_goes_with_it():
    fleet = Fleet()
    serve(fleet, "chat", "http://127.0.0.1:1")
    (endpoint,) = fleet.table.route("team/chat").endpoints
    fleet.record_unreachable(endpoint)
    fleet.set_endpoint(endpoint.name, None)
    fleet.set_service("team/chat", None)
    fleet.record_unreachable(endpoint)

    assert not fleet._destinations


async def test_series_of_revisions_and_services_that_are_gone_leave_the_metrics():
    """Review §5.5: a revision label for canary analysis, with as many values as there are revisions."""
    async with Runtime() as well:
        fleet = Fleet()
        key = "team/chat"
        fleet.set_service(key, Service(key, "chat"))
        async with a_gateway_for(fleet) as gateway, a_caller(gateway) as caller:
            for number in range(20):
                well.revision = f"r{number}"
                fleet.set_endpoint("team/p", Endpoint("team/p", key, f"r{number}", well.url))
                async with caller.chat(model="chat") as response:
                    assert response.status == 200
            async with caller.session.get(f"{caller.admin_url}/metrics") as response:
                text = await response.text()
            assert 'requests_total{code="200",model="chat",revision="r19",service="team/chat"} 1.0' in text
            assert 'revision="r18"' not in text
            fleet.set_service(key, None)
            async with caller.session.get(f"{caller.admin_url}/metrics") as response:
                assert "team/chat" not in await response.text()
