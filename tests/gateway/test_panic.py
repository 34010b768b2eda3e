"""A service that loses all its replicas to silent nodes keeps those that still accept connections, for a while."""

import asyncio
from typing import Any

import msgspec
import pytest

from slipway_gateway.fleet import Fleet
from slipway_gateway.panic import PANIC_SECONDS, PanicMode, accepts_connections, is_silent
from slipway_gateway.picker.endpoints import Endpoint, Service
from slipway_gateway.watch import endpoint_of
from slipway_kube.objects import Pod
from tests.gateway.objects import a_pod_object

KEY = "team/chat"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class World:
    """A service of two replicas, and which of them accept connections."""

    def __init__(self) -> None:
        self.fleet, self.clock = Fleet(), Clock()
        self.fleet.set_service(KEY, Service(key=KEY, served_name="chat"))
        self.accepting = {"a", "b"}
        self.panic = PanicMode(self.fleet, accepts=self._accepts, clock=self.clock)

    async def _accepts(self, endpoint: Endpoint) -> bool:
        return endpoint.name in self.accepting

    def ready(self, name: str) -> None:
        self.panic.set_endpoint(name, an_endpoint(name), None)

    def silent(self, name: str) -> None:
        self.panic.set_endpoint(name, None, an_endpoint(name))

    def gone(self, name: str) -> None:
        self.panic.set_endpoint(name, None, None)

    async def routed(self) -> list[str]:
        await self.panic.probe()
        return [one.name for one in self.fleet.table.route(KEY).endpoints]


def an_endpoint(name: str) -> Endpoint:
    return Endpoint(name=name, service=KEY, revision="r1", url=f"http://{name}:8000")


@pytest.fixture
def world() -> World:
    world = World()
    world.ready("a")
    world.ready("b")
    return world


def a_pod(*, ready: bool, container_ready: bool) -> Pod:
    body: dict[str, Any] = a_pod_object("p", ready=ready)
    body["status"]["containerStatuses"] = [{"name": "server", "ready": container_ready}]
    return msgspec.convert(body, Pod)


@pytest.mark.capability("RG-2", "RD-9")
def test_only_a_pod_that_its_own_kubelet_calls_ready_is_on_a_silent_node():
    silent, hung = a_pod(ready=False, container_ready=True), a_pod(ready=False, container_ready=False)

    assert is_silent(silent)
    assert endpoint_of(silent) is None
    assert endpoint_of(silent, on_silent_node=True) is not None
    assert not is_silent(hung), "its readiness probe fails: it hangs"
    assert endpoint_of(hung, on_silent_node=True) is None
    assert not is_silent(a_pod(ready=True, container_ready=True))


@pytest.mark.capability("RG-2")
async def test_while_another_replica_is_ready_a_silent_one_gets_nothing(world: World):
    world.silent("a")
    assert await world.routed() == ["b"]


@pytest.mark.capability("RG-2")
async def test_when_all_are_silent_those_that_accept_connections_are_used_on(world: World):
    world.silent("a")
    world.silent("b")
    assert await world.routed() == ["a", "b"]

    world.accepting = {"b"}
    assert await world.routed() == ["b"], "the machine of the other is really gone"

    world.ready("a")
    assert await world.routed() == ["a"], "a replica is ready again: no panic any more"


async def test_a_silent_replica_is_used_on_for_a_bounded_time(world: World):
    world.silent("a")
    world.silent("b")
    assert await world.routed() == ["a", "b"]
    world.clock.now += PANIC_SECONDS - 1
    world.silent("a")  # an event of the same pod does not begin the time anew
    assert await world.routed() == ["a", "b"]
    world.clock.now += 2
    assert await world.routed() == []


async def test_a_silent_replica_that_is_deleted_or_drains_leaves_at_once(world: World):
    world.silent("a")
    world.silent("b")
    assert await world.routed() == ["a", "b"]
    world.gone("a")
    assert [one.name for one in world.fleet.table.route(KEY).endpoints] == ["b"]
    world.gone("b")
    assert await world.routed() == []


async def test_events_wake_the_probing(world: World):
    running = asyncio.create_task(world.panic.run())
    world.silent("a")
    world.silent("b")
    async with asyncio.timeout(30):
        while len(world.fleet.table.route(KEY).endpoints) < 2:  # noqa: ASYNC110  a state is waited for
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_port_that_accepts_is_told_from_one_that_does_not():
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    endpoint = Endpoint(name="a", service=KEY, revision="r1", url=f"http://127.0.0.1:{port}")
    assert await accepts_connections(endpoint)
    server.close()
    await server.wait_closed()
    assert not await accepts_connections(endpoint)
