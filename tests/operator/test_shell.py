"""kopf as a shell: it watches our kind, hands over what it sees, survives outages and writes nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice

import pytest

from slipway_kube.resources import INFERENCE_SERVICES
from slipway_operator import main
from slipway_operator.main import EndlessBackoff, Shell, kopf_settings
from tests.operator.discovery import DiscoverableApiServer

Seen = list[tuple[str | None, str]]


def a_service(name: str = "chat") -> dict:
    return {"metadata": {"name": name, "namespace": "team"}, "spec": {"model": {"uri": "file:///models/tiny"}}}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries again at once."""
    monkeypatch.setattr(main, "BACKOFF_SECONDS", 0.02)


@asynccontextmanager
async def a_shell(server: DiscoverableApiServer, **options) -> AsyncIterator[Seen]:
    loop, seen = asyncio.get_running_loop(), []

    def deliver(kind, body) -> None:
        loop.call_soon_threadsafe(seen.append, (kind, body["metadata"]["name"]))

    shell = Shell(lambda: server.connection, deliver, **options)
    shell.start()
    try:
        yield seen
    finally:
        shell.stop()
        assert await asyncio.to_thread(shell.join), "the shell must end when asked to"


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  what the server and kopf's thread do sets no event
            await asyncio.sleep(0.02)


async def test_delivers_what_exists_what_comes_and_what_goes_and_writes_nothing():
    async with DiscoverableApiServer() as server:
        server.put(INFERENCE_SERVICES, a_service("chat"))
        async with a_shell(server) as seen:
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


async def test_watches_only_the_namespaces_that_it_is_told():
    async with DiscoverableApiServer() as server:
        server.put(INFERENCE_SERVICES, a_service("chat"))
        async with a_shell(server, namespaces=("team",)) as seen:
            await until(lambda: (None, "chat") in seen)

        lists = {request.path for request in server.requests if request.path.endswith("/inferenceservices")}
        assert lists == {INFERENCE_SERVICES.path("team")}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("status", [500, 503, 403])
async def test_an_api_server_that_refuses_does_not_end_it(status):
    async with DiscoverableApiServer() as server:
        server.fail(method="GET", path="inferenceservices", status=status, times=2)
        server.put(INFERENCE_SERVICES, a_service())
        async with a_shell(server) as seen:
            await until(lambda: (None, "chat") in seen)


async def test_a_cut_connection_does_not_end_it_and_later_changes_arrive():
    async with DiscoverableApiServer() as server:
        server.put(INFERENCE_SERVICES, a_service())
        async with a_shell(server) as seen:
            await until(lambda: (None, "chat") in seen and server.open_watches)
            server.down = True
            await asyncio.sleep(0.2)
            server.down = False
            server.put(INFERENCE_SERVICES, a_service("code"))
            await until(lambda: any(name == "code" for _, name in seen))


@pytest.mark.usefixtures("impatient")
async def test_is_started_again_should_kopf_itself_end():
    restarts = []
    async with DiscoverableApiServer() as server:
        # kopf gives up for good when discovery answers what it does not expect.
        server.fail(method="GET", path="^/apis$", status=404)
        server.put(INFERENCE_SERVICES, a_service())
        async with a_shell(server, on_restart=lambda: restarts.append(1)) as seen:
            await until(lambda: (None, "chat") in seen)

    assert restarts == [1]


def test_the_backoff_never_ends_and_can_be_taken_again():
    backoff = EndlessBackoff()

    assert len(list(islice(backoff, 500))) == 500
    assert all(0.75 <= seconds <= 30 for seconds in islice(backoff, 500))


def test_kopf_has_nothing_left_that_writes_or_gives_up():
    settings = kopf_settings()

    assert settings.peering.standalone
    assert settings.scanning.disabled
    assert not settings.posting.enabled
    assert isinstance(settings.networking.error_backoffs, EndlessBackoff)
