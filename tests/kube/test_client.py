"""The client over real sockets: what comes back, what an error is called, and that nothing waits for ever."""

import asyncio
import re
from contextlib import aclosing

import msgspec
import pytest
from aiohttp import web

from slipway_kube import errors
from slipway_kube.auth import Connection, RefreshingCredentials, StaticCredentials
from slipway_kube.client import MOST_POD_BYTES, Client
from slipway_kube.informer import Informer
from slipway_kube.objects import Pod
from slipway_kube.resources import PODS
from tests.fakes import FakeApiServer
from tests.kube.kit import a_pod, running

POD = PODS.path("team", "x")


@pytest.fixture
async def server():
    async with FakeApiServer() as server:
        yield server


@pytest.fixture
async def client(server):
    async with Client(server.connection, timeout=5) as client:
        yield client


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, errors.BadRequest),
        (401, errors.Unauthorized),
        (403, errors.Forbidden),
        (404, errors.NotFound),
        (409, errors.Conflict),
        (410, errors.Gone),
        (422, errors.Invalid),
        (429, errors.TooManyRequests),
        (418, errors.StatusError),
        (500, errors.ServerError),
        (503, errors.ServerError),
    ],
)
async def test_every_refusal_has_a_name_and_keeps_the_servers_sentence(server, client, status, error):
    server.fail(status=status, message="because", retry_after=7, times=2)
    with pytest.raises(error) as refused:
        await client.get(POD)
    assert type(refused.value) is error
    assert (refused.value.status, refused.value.message, refused.value.retry_after) == (status, "because", 7)


async def test_a_create_of_what_exists_is_told_apart_from_other_conflicts(server, client):
    server.put(PODS, a_pod("x"))
    with pytest.raises(errors.AlreadyExists):
        await client.create(PODS.path("team"), a_pod("x"))
    with pytest.raises(errors.Conflict) as conflict:
        await client.delete(POD, uid="another")
    assert not isinstance(conflict.value, errors.AlreadyExists)


async def test_a_broken_connection_is_unreachable_with_its_cause(server, client):
    server.fail(method="POST", lose_reply=True)
    with pytest.raises(errors.Unreachable) as lost:
        await client.create(PODS.path("team"), a_pod("x"))
    assert lost.value.__cause__ is not None
    assert server.get(PODS, "team", "x")  # it had happened


async def test_nobody_listening_is_unreachable():
    async with Client(Connection("http://127.0.0.1:1", StaticCredentials())) as client:
        with pytest.raises(errors.Unreachable):
            await client.get(POD)


async def test_every_call_is_bounded(server, client):
    server.fail(hang=True)
    with pytest.raises(errors.Unreachable, match=re.escape("no answer within 0.05 s")):
        await client.get(POD, timeout=0.05)


async def test_a_full_pool_counts_into_the_timeout(server):
    async with Client(server.connection, pool=1, timeout=5) as client:
        server.fail(hang=True)
        slow = asyncio.create_task(client.get(POD))
        await asyncio.sleep(0.05)
        with pytest.raises(errors.Unreachable):
            await client.get("/version", timeout=0.05)
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        assert await client.get("/version")


async def test_a_list_comes_in_pages(server, client):
    for index in range(7):
        server.put(PODS, a_pod(f"p{index}", labels={"app": "ours" if index else "theirs"}))
    pages = [page async for page in client.list_pages(PODS.path(), label_selector="app=ours", limit=4)]
    assert [len(page.items) for page in pages] == [4, 2]


async def test_a_watch_carries_objects_of_any_size(server, client):
    """aiohttp's own line reader gives up at 64 KiB."""
    begin = server.store.version
    server.put(PODS, a_pod("big") | {"spec": {"containers": [], "padding": "x" * 3_000_000}})
    server.put(PODS, a_pod("small"))
    async with aclosing(client.watch(PODS.path(), resource_version=str(begin))) as lines:
        first, second = await anext(lines), await anext(lines)
    assert len(first) > 3_000_000
    assert msgspec.json.decode(second)["object"]["metadata"]["name"] == "small"


async def test_a_watch_from_too_long_ago_tells_so(server, client):
    server.put(PODS, a_pod("x"))
    server.compact()
    async with aclosing(client.watch(PODS.path(), resource_version="1")) as lines:
        event = msgspec.json.decode(await anext(lines))
    assert (event["type"], event["object"]["code"]) == ("ERROR", 410)


async def test_a_refused_watch_raises(server, client):
    server.fail(status=403)
    with pytest.raises(errors.Forbidden):
        async with aclosing(client.watch(PODS.path(), resource_version="1")) as lines:
            await anext(lines)


async def test_a_rotated_token_is_read_again():
    """The server refuses the old token; the client looks at the file again and goes on."""
    token, accepted = "old", "new"

    async def guard(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {accepted}":
            return web.Response(status=401)
        return web.json_response({"ok": True})

    application = web.Application()
    application.router.add_get("/version", guard)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    credentials = RefreshingCredentials(lambda: {"Authorization": f"Bearer {token}"})
    host, port = runner.addresses[0]
    try:
        async with Client(Connection(f"http://{host}:{port}", credentials)) as client:
            with pytest.raises(errors.Unauthorized):
                await client.get("/version")
            token = "new"
            assert msgspec.json.decode(await client.get("/version")) == {"ok": True}
    finally:
        await runner.cleanup()


async def test_an_informer_over_real_sockets_follows_and_survives_a_broken_connection(server, client):
    server.put(PODS, a_pod("before"))
    pods = Informer(client, PODS, Pod)
    news = asyncio.Event()
    pods.on_change(lambda change, old, new: news.set())
    async with running(pods):
        await asyncio.wait_for(pods.synced.wait(), 10)
        assert pods.get("team", "before") is not None
        await server.watched()
        server.drop_watches()
        server.put(PODS, a_pod("after"))
        news.clear()
        await asyncio.wait_for(news.wait(), 10)
        assert pods.get("team", "after") is not None
        assert pods.relists == 0


@pytest.mark.capability("SE-9")
async def test_the_answer_of_a_pod_is_read_up_to_a_limit():
    """review/control-plane.md 8: a pod's owner decides what it answers."""
    sent = 0

    async def flood(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        while sent < 64 * MOST_POD_BYTES:
            await response.write(bytes(1 << 20))
            sent += 1 << 20
        return response

    application = web.Application()
    application.router.add_get("/{path:.*}", flood)
    runner = web.AppRunner(application, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    try:
        async with Client(Connection(f"http://{host}:{port}", RefreshingCredentials(dict))) as client:
            with pytest.raises(errors.Unreachable, match=f"longer than {MOST_POD_BYTES} bytes"):
                await client.proxy_to_pod("team", "pod", 8001, "/signals")
    finally:
        await runner.cleanup()

    assert sent < 64 * MOST_POD_BYTES
