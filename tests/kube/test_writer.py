"""Every write passes the fence, keeps the pace, and is remembered until the cache shows it."""

import asyncio
from typing import Any

import pytest

from slipway_kube.cache import Change
from slipway_kube.errors import AlreadyExists, Invalid, NotLeader, StatusError, TooManyRequests, Unreachable
from slipway_kube.expectations import Expectations, Pending
from slipway_kube.informer import Informer
from slipway_kube.lease import NoRivals
from slipway_kube.objects import Metadata, Pod
from slipway_kube.resources import INFERENCE_SERVICES, PODS
from slipway_kube.token_bucket import TokenBucket
from slipway_kube.writer import Send, Write, Writer
from tests.fakes import FakeApiServer
from tests.kube.kit import a_pod, running
from tests.operator.virtual_time import run_in_virtual_time

CHAT = ("team", "chat")


class Switch:
    """A fence to be opened and closed by hand."""

    leader = True

    def is_leader(self) -> bool:
        return self.leader

    def seconds_left(self) -> float:
        return 7.0 if self.leader else 0.0


def a_writer(server: FakeApiServer, fence: Any = None, **options: Any) -> Writer:
    return Writer(server.client(), fence or NoRivals(), clock=asyncio.get_running_loop().time, **options)


def names(server: FakeApiServer) -> list[str]:
    return [pod["metadata"]["name"] for pod in server.objects(PODS)]


async def test_a_standby_writes_nothing():
    server, fence, told = FakeApiServer(), Switch(), []
    writer = a_writer(server, fence, on_write=lambda write, outcome: told.append((write.verb, outcome)))
    fence.leader = False

    for attempt in (
        writer.create(PODS, "team", a_pod("x"), owner=CHAT),
        writer.delete(PODS, "team", "x", uid="u", owner=CHAT),
        writer.apply(PODS, "team", "x", {}, field_manager="m"),
        writer.json_patch(PODS, "team", "x", []),
        writer.merge_patch(PODS, "team", "x", {}),
    ):
        with pytest.raises(NotLeader):
            await attempt

    assert server.requests == []
    assert not writer.pending(CHAT)
    assert {outcome for _, outcome in told} == {"NotLeader"}


def test_leadership_lost_while_waiting_for_its_turn_stops_a_write():
    async def story() -> None:
        server, fence = FakeApiServer(), Switch()
        writer = a_writer(server, fence, rate=1, burst=1)
        await writer.create(PODS, "team", a_pod("first"))
        second = asyncio.create_task(writer.create(PODS, "team", a_pod("second")))
        await asyncio.sleep(0.5)
        fence.leader = False
        with pytest.raises(NotLeader):
            await second
        assert names(server) == ["first"]

    run_in_virtual_time(story())


def test_a_burst_goes_at_once_and_the_rest_at_the_rate():
    async def story() -> None:
        server = FakeApiServer()
        writer, loop = a_writer(server, rate=50, burst=100), asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(*(writer.create(PODS, "team", a_pod(f"p{index}")) for index in range(100)))
        assert loop.time() - began < 0.001
        await asyncio.gather(*(writer.create(PODS, "team", a_pod(f"q{index}")) for index in range(100)))
        assert loop.time() - began == pytest.approx(2.0, abs=0.05)

    run_in_virtual_time(story())


def test_when_the_server_asks_for_a_break_all_writes_take_it():
    async def story() -> None:
        server, loop = FakeApiServer(), asyncio.get_running_loop()
        writer = a_writer(server)
        server.fail(status=429, retry_after=3)
        with pytest.raises(TooManyRequests) as refused:
            await writer.create(PODS, "team", a_pod("x"))
        assert refused.value.retry_after == 3
        began = loop.time()
        await writer.create(PODS, "team", a_pod("y"))
        assert loop.time() - began == pytest.approx(3.0)

    run_in_virtual_time(story())


async def test_what_was_created_is_pending_until_the_cache_shows_it():
    server = FakeApiServer()
    writer = a_writer(server)
    pods = Informer(server.client(), PODS, Pod)
    pods.on_change(writer.expectations.saw)

    await writer.create(PODS, "team", a_pod("chat-1"), owner=CHAT)
    assert writer.pending(CHAT) == Pending(creates=frozenset({"chat-1"}))
    assert not writer.pending(("team", "other"))
    async with running(pods):
        await pods.synced.wait()
        assert not writer.pending(CHAT)


async def test_what_was_deleted_is_pending_until_the_cache_shows_it_terminating():
    server = FakeApiServer()
    uid = server.put(PODS, a_pod("chat-1", node="n1"))["metadata"]["uid"]
    writer = a_writer(server)
    pods = Informer(server.client(), PODS, Pod)
    async with running(pods):
        await pods.synced.wait()
        shown = asyncio.Event()
        pods.on_change(lambda change, old, new: shown.set())
        pods.on_change(writer.expectations.saw)

        assert await writer.delete(PODS, "team", "chat-1", uid=uid, owner=CHAT)
        await asyncio.wait_for(shown.wait(), 5)
        assert pods.cache["team", "chat-1"].is_terminating
        assert not writer.pending(CHAT)


async def test_a_refused_create_is_not_waited_for():
    server = FakeApiServer()
    writer = a_writer(server)
    server.fail(method="POST", status=422)
    with pytest.raises(Invalid):
        await writer.create(PODS, "team", a_pod("x"), owner=CHAT)
    assert not writer.pending(CHAT)


def test_a_create_of_unknown_outcome_is_waited_for_shortly_and_the_next_try_finds_out():
    async def story() -> None:
        server = FakeApiServer()
        writer = a_writer(server)
        server.fail(method="POST", lose_reply=True)
        with pytest.raises(Unreachable):
            await writer.create(PODS, "team", a_pod("x"), owner=CHAT)
        assert writer.pending(CHAT).creates == {"x"}
        await asyncio.sleep(11)
        assert not writer.pending(CHAT)
        with pytest.raises(AlreadyExists):
            await writer.create(PODS, "team", a_pod("x"), owner=CHAT)
        assert names(server) == ["x"]

    run_in_virtual_time(story())


async def test_deleting_spares_a_namesake_and_what_is_gone_is_fine():
    server = FakeApiServer()
    writer = a_writer(server)
    server.put(PODS, a_pod("x"))
    assert await writer.delete(PODS, "team", "x", uid="of-its-predecessor", owner=CHAT) is False
    assert await writer.delete(PODS, "team", "gone", uid="u", owner=CHAT) is False
    assert names(server) == ["x"]
    assert not writer.pending(CHAT)


async def test_an_apply_of_what_is_applied_already_is_not_sent():
    server, told = FakeApiServer(), []
    server.put(INFERENCE_SERVICES, {"metadata": {"name": "chat", "namespace": "team"}, "spec": {}})
    writer = a_writer(server, on_write=lambda write, outcome: told.append(outcome))
    body = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    apply = {"field_manager": "slipway-operator", "subresource": "status"}

    assert await writer.apply(INFERENCE_SERVICES, *CHAT, body, **apply) is not None
    assert await writer.apply(INFERENCE_SERVICES, *CHAT, dict(body), last=body, **apply) is None
    assert len(server.writes()) == 1
    assert told == ["ok", "skipped"]
    assert server.get(INFERENCE_SERVICES, *CHAT)["status"] == body["status"]


async def test_a_dry_run_changes_nothing_and_expects_nothing():
    server = FakeApiServer()
    uid = server.put(PODS, a_pod("old"))["metadata"]["uid"]
    writer = a_writer(server, dry_run=True)
    await writer.create(PODS, "team", a_pod("new"), owner=CHAT)
    await writer.delete(PODS, "team", "old", uid=uid, owner=CHAT)
    await writer.merge_patch(PODS, "team", "old", {"metadata": {"labels": {"a": "b"}}})
    assert names(server) == ["old"]
    assert server.get(PODS, "team", "old")["metadata"]["labels"] == {}
    assert not writer.pending(CHAT)


async def test_a_transport_sees_every_write_and_may_lose_it():
    server, seen = FakeApiServer(), []

    async def crash_after_the_second(write: Write, send: Send) -> bytes:
        seen.append((write.verb, write.name))
        reply = await send()
        if len(seen) == 2:
            raise Unreachable("the process was cut off here")
        return reply

    writer = a_writer(server, transport=crash_after_the_second)
    await writer.create(PODS, "team", a_pod("a"))
    with pytest.raises(Unreachable):
        await writer.create(PODS, "team", a_pod("b"))
    assert seen == [("create", "a"), ("create", "b")]
    assert names(server) == ["a", "b"]


def test_expectations_are_forgotten_after_five_minutes():
    expectations = Expectations()
    expectations.expect_create(CHAT, "team", "a", now=0.0)
    expectations.expect_delete(CHAT, "u", now=0.0)
    assert expectations.pending(CHAT, now=299.0) == Pending(frozenset({"a"}), frozenset({"u"}))
    assert not expectations.pending(CHAT, now=301.0)


def test_a_deletion_that_is_seen_ends_the_wait_for_it():
    expectations = Expectations()
    expectations.expect_delete(CHAT, "u", now=0.0)
    expectations.saw(Change.DELETED, Pod(metadata=Metadata(name="a", namespace="team", uid="u")), None)
    assert not expectations.pending(CHAT, now=1.0)


def test_a_label_is_waited_for_until_the_informer_shows_it_and_no_longer():
    """Finding 11: what was labelled as draining must be seen so by the next decision."""

    def a_cached(state: str) -> Pod:
        return Pod(metadata=Metadata(name="a", namespace="team", uid="u", labels={"state": state}))

    expectations = Expectations()
    expectations.expect_label(CHAT, "u", "state", "draining", now=0.0)
    expectations.saw(Change.MODIFIED, a_cached("serving"), a_cached("serving"))
    assert expectations.pending(CHAT, now=1.0) == Pending(labels=frozenset({"u"}))
    assert not expectations.pending(("team", "other"), now=1.0)

    expectations.saw(Change.MODIFIED, a_cached("serving"), a_cached("draining"))
    assert not expectations.pending(CHAT, now=1.0)

    expectations.expect_label(CHAT, "u", "state", "draining", now=0.0)
    expectations.saw(Change.DELETED, a_cached("draining"), None)
    assert not expectations.pending(CHAT, now=1.0)


def test_expectations_that_were_met_leave_nothing_behind():
    expectations = Expectations()
    for number in range(100):
        expectations.expect_create(("team", str(number)), "team", str(number), now=0.0)
        expectations.saw(Change.ADDED, None, Pod(metadata=Metadata(name=str(number), namespace="team", uid="u")))
    assert not expectations._until
    assert not expectations._owners


async def test_a_label_that_was_refused_is_not_waited_for():
    server = FakeApiServer()
    writer = a_writer(server)
    server.fail(method="PATCH", status=409)
    body = {"metadata": {"name": "gone", "namespace": "team", "uid": "u", "labels": {"state": "draining"}}}
    with pytest.raises(StatusError):
        await writer.label(PODS, "team", "gone", body, label="state", field_manager="m", owner=CHAT)
    assert not writer.pending(CHAT)


def test_a_bucket_fills_again():
    bucket = TokenBucket(rate=10, burst=2)
    assert [bucket.try_take(0.0) for _ in range(3)] == [True, True, False]
    assert bucket.reserve(0.0) == pytest.approx(0.1)
    assert bucket.try_take(0.15) is False  # half a token after paying the credit back
    assert bucket.try_take(10.0) is True
