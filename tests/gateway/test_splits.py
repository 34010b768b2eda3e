"""Traffic splits through a real gateway: shares, cohorts, pins, and which revision an answer names."""

from contextlib import asynccontextmanager

import pytest

from slipway_gateway.fleet import Fleet
from slipway_gateway.gateway import Gateway
from slipway_gateway.picker.endpoints import Endpoint, Service
from slipway_gateway.settings import GatewaySettings
from tests.gateway.doubles import MODEL, Runtime, a_caller, events_of, text_of

KEY = "team/chat"


@asynccontextmanager
async def a_split_gateway(first: Runtime, second: Runtime, **weights: int):
    fleet = Fleet()
    fleet.set_service(KEY, Service(KEY, MODEL, weights=weights))
    for name, runtime in (("old", first), ("new", second)):
        fleet.set_endpoint(name, Endpoint(name=name, service=KEY, revision=name, url=runtime.url))
    async with Gateway(GatewaySettings(host="127.0.0.1", port=0, admin_port=0), fleet) as gateway:
        yield gateway


async def revision_of(caller, **options) -> str:
    """The revision that the answer names, which must be the one that made it."""
    async with caller.chat(stream=True, **options) as response:
        assert response.status == 200
        named = response.headers["x-slipway-revision"]
        assert text_of(await events_of(response)) == named
    return named


@pytest.mark.capability("RG-1", "PF-13")
async def test_an_answer_names_the_revision_that_made_it_and_each_gets_its_share():
    async with (
        Runtime(words=["old"]) as old,
        Runtime(words=["new"]) as new,
        a_split_gateway(old, new, old=75, new=25) as gateway,
        a_caller(gateway) as caller,
    ):
        draws = iter([number / 200 for number in range(200) for _ in range(2)])
        gateway.fleet._draw = lambda: next(draws)
        answered = [await revision_of(caller) for _ in range(200)]

        gateway.fleet._draw = lambda: 0.0
        assert answered.count("new") == 50, "of evenly spaced draws, exactly its share"
        assert {await revision_of(caller, headers={"x-slipway-pin-revision": "old"}) for _ in range(5)} == {"old"}


@pytest.mark.capability("EV-5")
async def test_one_user_stays_on_one_revision_and_the_header_works_like_the_field():
    async with (
        Runtime(words=["old"]) as old,
        Runtime(words=["new"]) as new,
        a_split_gateway(old, new, old=50, new=50) as gateway,
        a_caller(gateway) as caller,
    ):
        first = {}
        for user in map(str, range(20)):
            first[user] = await revision_of(caller, user=user)
            assert {await revision_of(caller, user=user) for _ in range(3)} == {first[user]}
            assert await revision_of(caller, headers={"x-slipway-cohort": user}) == first[user]
        assert set(first.values()) == {"old", "new"}

        gateway.fleet.set_service(KEY, Service(KEY, MODEL, weights={"old": 25, "new": 75}))
        for user, before in first.items():
            assert await revision_of(caller, user=user) in (before, "new"), "users move only to what grew"
