"""Mirroring: the share that is copied, that a copy never touches the user, and how the two answers compare."""

from contextlib import asynccontextmanager

import pytest

from slipway_gateway import mirror
from slipway_gateway.fleet import Fleet
from slipway_gateway.gateway import Gateway
from slipway_gateway.mirror import text_of
from slipway_gateway.picker.endpoints import Endpoint, Service
from slipway_gateway.settings import GatewaySettings
from tests.gateway.doubles import (
    MODEL,
    WORDS,
    Runtime,
    a_caller,
    be_draining,
    be_full,
    chunk,
    die_after_two_words,
    event,
    events_of,
    hang_up,
    until,
)
from tests.gateway.doubles import (
    text_of as client_text,
)

KEY = "team/chat"


@asynccontextmanager
async def a_mirroring_gateway(stable: Runtime, shadow: Runtime | None, percent: int = 100):
    fleet = Fleet()
    fleet.set_service(KEY, Service(KEY, MODEL, weights={"r1": 100, "new": 0}, mirrors={"new": percent}))
    fleet.set_endpoint("p0", Endpoint(name="p0", service=KEY, revision="r1", url=stable.url))
    if shadow is not None:
        fleet.set_endpoint("p1", Endpoint(name="p1", service=KEY, revision="new", url=shadow.url))
    async with Gateway(GatewaySettings(host="127.0.0.1", port=0, admin_port=0), fleet) as gateway:
        yield gateway


def counted(gateway: Gateway) -> dict[str, int]:
    samples = [sample for metric in gateway.metrics.mirrored.collect() for sample in metric.samples]
    return {one.labels["outcome"]: int(one.value) for one in samples if one.name.endswith("_total") and one.value}


@pytest.mark.capability("EV-6")
@pytest.mark.parametrize("stream", [True, False])
async def test_a_copy_goes_to_the_mirrored_revision_and_its_answer_to_nobody(stream):
    async with (
        Runtime() as stable,
        Runtime(words=["Something", " else"], revision="new") as shadow,
        a_mirroring_gateway(stable, shadow) as gateway,
        a_caller(gateway) as caller,
    ):
        async with caller.chat(stream=stream, temperature=0) as response:
            assert response.headers["x-slipway-revision"] == "r1"
            raw = await response.read()
        await until(lambda: counted(gateway))

        assert text_of(raw) == {0: "".join(WORDS)}
        assert shadow.bodies == stable.bodies
        assert shadow.headers[0]["x-request-id"] == stable.headers[0]["x-request-id"] + "-copy"
        assert counted(gateway) == {"different": 1}
        report = gateway.requests.outcomes.report()
        assert {one.revision: (one.requests, one.errors) for one in report.revisions} == {"r1": (1, 0), "new": (1, 0)}


@pytest.mark.capability("EV-6")
async def test_equal_answers_at_temperature_zero_are_the_same_and_others_are_not_compared():
    async with (
        Runtime() as stable,
        Runtime(revision="new") as shadow,
        a_mirroring_gateway(stable, shadow) as gateway,
        a_caller(gateway) as caller,
    ):
        for temperature in (0, 1):
            async with caller.chat(stream=True, temperature=temperature) as response:
                await events_of(response)
        await until(lambda: sum(counted(gateway).values()) == 2)

        assert counted(gateway) == {"same": 1, "answered": 1}


@pytest.mark.capability("EV-6")
@pytest.mark.parametrize("trouble", [hang_up, die_after_two_words, be_draining, be_full])
async def test_whatever_happens_to_the_copy_the_user_gets_the_answer_and_the_copy_is_not_repeated(trouble):
    async with (
        Runtime() as stable,
        Runtime(trouble, revision="new") as shadow,
        a_mirroring_gateway(stable, shadow) as gateway,
        a_caller(gateway) as caller,
    ):
        async with caller.chat(stream=True) as response:
            assert client_text(await events_of(response)) == "".join(WORDS)
        await until(lambda: counted(gateway))

        assert (shadow.requests, counted(gateway)) == (1, {"failed": 1})
        await until(lambda: not gateway.requests.mirror.running)


@pytest.mark.capability("EV-6")
async def test_a_copy_that_hangs_delays_nobody_and_the_budget_bounds_how_many_hang(monkeypatch):
    monkeypatch.setattr(mirror, "MAX_COPIES", 8)
    async with (
        Runtime() as stable,
        Runtime(revision="new").hold() as shadow,
        a_mirroring_gateway(stable, shadow) as gateway,
        a_caller(gateway) as caller,
    ):
        for _ in range(20):
            async with caller.chat(stream=True) as response:
                await events_of(response)

        assert gateway.requests.mirror.running == 4, "one service may hold as much as is free"
        assert counted(gateway) == {"skipped": 16}


@pytest.mark.capability("EV-6")
async def test_the_share_is_that_of_the_status_and_without_a_replica_nothing_is_copied():
    draws = iter([0.09, 0.11, 0.5, 0.0])
    async with (
        Runtime() as stable,
        Runtime(revision="new") as shadow,
        a_mirroring_gateway(stable, shadow, percent=10) as gateway,
        a_caller(gateway) as caller,
    ):
        gateway.requests.mirror._draw = lambda: next(draws)
        for _ in range(4):
            async with caller.chat() as response:
                await response.read()
        await until(lambda: counted(gateway) == {"answered": 2})
        assert shadow.requests == 2
        gateway.fleet.set_endpoint("p1", None)
        gateway.requests.mirror._draw = lambda: 0.0
        async with caller.chat() as response:
            assert response.status == 200
        assert counted(gateway) == {"answered": 2, "skipped": 1}


@pytest.mark.capability("EV-6")
async def test_when_no_other_replica_is_left_the_mirrored_one_still_gets_no_user_but_a_pin_reaches_it():
    async with (
        Runtime() as stable,
        Runtime(revision="new") as shadow,
        a_mirroring_gateway(stable, shadow) as gateway,
        a_caller(gateway) as caller,
    ):
        gateway.fleet.set_endpoint("p0", None)
        async with caller.chat() as response:
            assert response.status == 503
        assert shadow.requests == 0
        gateway.fleet.set_endpoint("p0", Endpoint(name="p0", service=KEY, revision="r1", url=stable.url))
        async with caller.chat(stream=True, headers={"x-slipway-pin-revision": "new"}) as response:
            assert (response.status, response.headers["x-slipway-revision"]) == (200, "new")


def test_the_text_of_an_answer_streamed_or_whole():
    streamed = event(chunk("Once")) + event(chunk(" upon", finish="stop")) + b"data: [DONE]\n\n"

    assert text_of(streamed) == {0: "Once upon"}
    assert text_of(b'{"choices": [{"index": 0, "text": "a"}, {"index": 1, "text": "b"}]}') == {0: "a", 1: "b"}
    assert text_of(b"<html>") is None
    assert text_of(b'{"choices": []}') == {}
    assert text_of(b'{"content": []}') is None, "of another API"
