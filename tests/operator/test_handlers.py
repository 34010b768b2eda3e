"""kopf in our one event loop: it starts and stops the manager, hands over events, survives outages, writes nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice

import kopf
import pytest

from slipway_kube.resources import INFERENCE_SERVICES
from slipway_operator import handlers
from tests.operator.discovery import DiscoverableApiServer

Seen = list[tuple[str | None, str]]


def a_service(name: str = "chat") -> dict:
    return {"metadata": {"name": name, "namespace": "team"}, "spec": {"model": {"uri": "file:///models/tiny"}}}


class ManagerDouble:
    """Keeps what it is told, and a task of its own as the real one does."""

    def __init__(self) -> None:
        self.seen: Seen = []
        self.in_hand: asyncio.Task | None = None
        self.story: list[str] = []

    async def start(self) -> None:
        self.in_hand = asyncio.create_task(asyncio.sleep(3600))
        self.story.append("started")

    async def stop(self) -> None:
        self.story.append("cancelled" if self.in_hand.cancelled() else "alive when asked to stop")
        self.in_hand.cancel()

    def heard(self, kind, type, body) -> None:
        assert kind == "InferenceService"
        self.seen.append((type, body["metadata"]["name"]))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries again at once."""
    monkeypatch.setattr(handlers, "FIRST_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(handlers, "LONGEST_RETRY_SECONDS", 0.05)


@asynccontextmanager
async def kopf_running(server: DiscoverableApiServer, **options) -> AsyncIterator[ManagerDouble]:
    manager, stop = ManagerDouble(), asyncio.Event()
    task = asyncio.create_task(
        kopf.operator(
            memo=kopf.Memo(manager=manager, connect=lambda: server.connection, watches=3),
            standalone=True,
            stop_flag=stop,
            **(options or {"clusterwide": True}),
        )
    )
    try:
        yield manager
    finally:
        stop.set()
        await asyncio.wait_for(task, 60)


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  what the server and kopf do sets no event
            await asyncio.sleep(0.02)


async def test_hands_over_what_exists_what_comes_and_what_goes_and_writes_nothing():
    async with DiscoverableApiServer() as server:
        server.put(INFERENCE_SERVICES, a_service("chat"))
        async with kopf_running(server) as manager:
            seen = manager.seen
            await until(lambda: (None, "chat") in seen and server.open_watches)
            server.put(INFERENCE_SERVICES, a_service("code"))
            await until(lambda: ("ADDED", "code") in seen)
            server.patch_status(INFERENCE_SERVICES, "team", "code", {"readyReplicas": 1})
            await until(lambda: ("MODIFIED", "code") in seen)
            server.delete(INFERENCE_SERVICES, "team", "code")
            await until(lambda: ("DELETED", "code") in seen)

        assert server.writes() == []
        metadata = server.get(INFERENCE_SERVICES, "team", "chat")["metadata"]
        assert not metadata.get("annotations")
        assert not metadata.get("finalizers")


async def test_the_manager_starts_before_the_first_event_and_is_stopped_before_its_tasks_are_cancelled():
    """kopf cancels every task of its loop when it ends: ours must have finished by then, in the order we want."""
    async with DiscoverableApiServer() as server:
        server.put(INFERENCE_SERVICES, a_service("chat"))
        async with kopf_running(server) as manager:
            await until(lambda: manager.seen)
            assert manager.story == ["started"]

    assert manager.story == ["started", "alive when asked to stop"]


async def test_watches_only_the_namespaces_that_it_is_told():
    async with DiscoverableApiServer() as server:
        server.put(INFERENCE_SERVICES, a_service("chat"))
        async with kopf_running(server, namespaces=("team",)) as manager:
            await until(lambda: (None, "chat") in manager.seen)

        lists = {request.path for request in server.requests if request.path.endswith("/inferenceservices")}
        assert lists == {INFERENCE_SERVICES.path("team")}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("status", [500, 503, 403])
async def test_an_api_server_that_refuses_does_not_end_it(status):
    async with DiscoverableApiServer() as server:
        server.fail(method="GET", path="inferenceservices", status=status, times=12)
        server.put(INFERENCE_SERVICES, a_service())
        async with kopf_running(server) as manager:
            await until(lambda: (None, "chat") in manager.seen)


async def test_a_cut_connection_does_not_end_it_and_later_changes_arrive():
    async with DiscoverableApiServer() as server:
        server.put(INFERENCE_SERVICES, a_service())
        async with kopf_running(server) as manager:
            await until(lambda: (None, "chat") in manager.seen and server.open_watches)
            server.down = True
            await until(lambda: not server.open_watches)
            server.down = False
            server.put(INFERENCE_SERVICES, a_service("code"))
            await until(lambda: any(name == "code" for _, name in manager.seen))


def test_kopf_has_nothing_left_that_writes_or_gives_up():
    settings = kopf.OperatorSettings()
    handlers.configure(settings)

    assert settings.peering.standalone
    assert settings.scanning.disabled
    assert not settings.posting.enabled
    for _ in range(2):  # a retry of each request begins anew
        delays = list(islice(settings.networking.error_backoffs, 500))
        assert len(delays) == 500
        assert all(0.75 <= seconds <= 30 for seconds in delays)
