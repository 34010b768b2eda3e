"""Stories of one informer: what it tells, what it survives, and what it never believes."""

import asyncio
from collections.abc import Awaitable, Callable

from slipway_kube.cache import Cache, Change
from slipway_kube.informer import Informer, Pace
from slipway_kube.objects import Metadata, Node, Object, Pod, Slim
from slipway_kube.resources import INFERENCE_SERVICES, NODES, PODS
from tests.fakes import FakeApiServer
from tests.kube.kit import Listener, a_pod, running
from tests.operator.virtual_time import run_in_virtual_time


def in_virtual_time(story: Callable[[FakeApiServer, Informer[Pod], Listener], Awaitable[None]]) -> Callable[[], None]:
    """A story of an informer that has seen pods `a` and `b`."""

    async def told() -> None:
        server = FakeApiServer()
        server.put(PODS, a_pod("a"))
        server.put(PODS, a_pod("b"))
        pods = Informer(server.client(), PODS, Pod, clock=asyncio.get_running_loop().time)
        listener = Listener(pods)
        assert pods.age() == float("inf")
        async with running(pods):
            await pods.synced.wait()
            await server.watched()
            assert listener.changes == [("Added", "a"), ("Added", "b")]
            listener.changes.clear()
            await story(server, pods, listener)

    def test() -> None:
        run_in_virtual_time(told())

    test.__name__, test.__doc__ = getattr(story, "__name__", "test"), story.__doc__
    return test


@in_virtual_time
async def test_changes_are_told_with_what_was_there_before(server, pods, listener):
    server.put(PODS, a_pod("a", labels={"state": "draining"}))
    server.delete(PODS, "team", "b")
    server.put(PODS, a_pod("c"))
    await asyncio.sleep(1)
    assert listener.changes == [("Modified", "a"), ("Deleted", "b"), ("Added", "c")]
    assert pods.get("team", "a").labels == {"state": "draining"}


@in_virtual_time
async def test_what_vanished_during_a_gap_is_reported_as_deleted(server, pods, listener):
    """The ghosts that other informers keep: deleted, compacted, and no event to tell."""
    server.forget(PODS, "team", "a")
    server.compact()
    server.drop_watches()
    await asyncio.sleep(60)
    assert listener.changes == [("Deleted", "a")]
    assert pods.relists == 1


@in_virtual_time
async def test_a_namesake_is_a_deletion_and_an_addition(server, pods, listener):
    server.forget(PODS, "team", "a")
    server.put(PODS, a_pod("a"))
    server.compact()
    server.drop_watches()
    await asyncio.sleep(60)
    assert listener.changes == [("Deleted", "a"), ("Added", "a")]


@in_virtual_time
async def test_events_that_come_twice_are_told_once(server, pods, listener):
    server.put(PODS, a_pod("a", labels={"step": "1"}))
    server.put(PODS, a_pod("a", labels={"step": "2"}))
    server.delete(PODS, "team", "b")
    await asyncio.sleep(1)
    listener.changes.clear()
    server.repeat(3)
    await asyncio.sleep(1)
    assert listener.changes == []
    assert pods.get("team", "a").labels == {"step": "2"}


@in_virtual_time
async def test_a_half_open_connection_is_left_after_a_while_of_silence(server, pods, listener):
    server.stall_watches()
    server.put(PODS, a_pod("c"))
    await asyncio.sleep(60)
    assert listener.changes == []
    await asyncio.sleep(40)
    assert listener.changes == [("Added", "c")]
    assert pods.relists == 0


@in_virtual_time
async def test_a_day_without_a_server_is_survived_with_the_last_view(server, pods, listener):
    server.down = True
    asked = len(server.requests)
    await asyncio.sleep(86_400)
    assert set(pods.cache) == {("team", "a"), ("team", "b")}
    assert pods.age() > 86_000
    assert 86_400 / 30 < len(server.requests) - asked < 86_400 / 10  # full jitter below 30 s: every 15 s on average
    server.delete(PODS, "team", "a")
    server.down = False
    await asyncio.sleep(60)
    assert listener.changes == [("Deleted", "a")]
    assert pods.age() < 61


@in_virtual_time
async def test_bookmarks_keep_it_young_and_spare_a_relist(server, pods, listener):
    await asyncio.sleep(3600)
    assert pods.age() <= 121  # a watch may have ended just before its bookmark
    for index in range(50):
        server.put(NODES, {"metadata": {"name": f"n{index}"}})  # history moves on, nothing of it is ours
    server.bookmark()
    await asyncio.sleep(1)
    server.compact()
    server.drop_watches()
    await asyncio.sleep(10)
    assert pods.relists == 0


@in_virtual_time
async def test_one_listeners_bug_blinds_nobody(server, pods, listener):
    def buggy(*_: object) -> None:
        raise ZeroDivisionError

    pods.on_change(buggy)
    heard = []
    pods.on_change(lambda change, old, new: heard.append(change))
    server.put(PODS, a_pod("c"))
    await asyncio.sleep(1)
    assert heard == [Change.ADDED]


@in_virtual_time
async def test_an_object_that_does_not_fit_stays_as_last_seen_and_the_others_go_on(server, pods, listener):
    server.put(PODS, a_pod("a") | {"spec": {"nodeName": 17}})
    server.put(PODS, a_pod("c"))
    await asyncio.sleep(1)
    assert listener.changes == [("Added", "c")]
    assert pods.undecodable == 1
    await pods.refresh()
    assert pods.get("team", "a") is not None
    server.finish_pod("team", "a")
    await asyncio.sleep(1)
    assert pods.get("team", "a") is None


@in_virtual_time
async def test_a_refresh_is_a_list_begun_after_it_was_asked_for(server, pods, listener):
    server.stall_watches()  # the watch would not tell
    server.put(PODS, a_pod("c"))
    await pods.refresh()
    assert pods.get("team", "c") is not None


@in_virtual_time
async def test_drift_is_what_the_watch_does_not_correct_by_itself(server, pods, listener):
    assert await pods.drift() == 0
    server.stall_watches()
    server.put(PODS, a_pod("c"))
    server.delete(PODS, "team", "a")
    assert await pods.drift() == 2


def test_a_server_that_ends_every_watch_at_once_is_not_hammered():
    async def story() -> None:
        server = FakeApiServer()
        pods = Informer(server.client(), PODS, Pod, clock=asyncio.get_running_loop().time)
        server.fail(path="/pods$", skip=1, times=10_000)
        async with running(pods):
            await asyncio.sleep(600)
        assert len(server.requests) < 150

    run_in_virtual_time(story())


def test_nodes_and_our_own_kind_are_followed_by_their_own_projection():
    class Status(Slim, frozen=True):
        served_name: str = ""

    class Service(Object, frozen=True):
        status: Status = Status()

    async def story() -> None:
        server = FakeApiServer()
        server.put(NODES, {"metadata": {"name": "n1"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}})
        server.put(
            INFERENCE_SERVICES,
            {"metadata": {"name": "chat", "namespace": "team"}, "status": {"servedName": "tiny", "newer": ["field"]}},
        )
        nodes = Informer(server.client(), NODES, Node, pace=Pace(page_size=1))
        services = Informer(server.client(), INFERENCE_SERVICES, Service)
        async with running(nodes, services):
            await nodes.synced.wait()
            await services.synced.wait()
            assert nodes.get("", "n1").is_ready
            assert services.get("team", "chat").status.served_name == "tiny"

    run_in_virtual_time(story())


def test_late_news_of_a_predecessor_does_not_remove_its_namesake():
    cache = Cache[Pod](lambda change, old, new: None)
    cache.put(Pod(metadata=Metadata(name="a", namespace="team", uid="new", resource_version="9")))
    cache.remove(Pod(metadata=Metadata(name="a", namespace="team", uid="old", resource_version="10")))
    assert ("team", "a") in cache.view
