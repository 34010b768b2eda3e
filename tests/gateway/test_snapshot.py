"""The file that keeps the routing table, and what a gateway does with it at its start."""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from slipway_api.inference_service import RoutingStrategy
from slipway_gateway.fleet import Fleet
from slipway_gateway.picker.endpoints import Adapter, Endpoint, LatencyLimits, Service, WaitLimits
from slipway_gateway.resolve import RoutingTable
from slipway_gateway.snapshot import FILE_NAME, Snapshot, SnapshotError, SnapshotFile
from slipway_gateway.startup import RouteStartup, StartupLimits
from slipway_gateway.watch import Watch
from slipway_kube.client import Client
from slipway_kube.resources import INFERENCE_SERVICES, PODS
from tests.fakes import FakeApiServer
from tests.gateway.doubles import until
from tests.gateway.objects import NAMESPACE, a_pod_object, a_service_object

CHAT = Service(
    key="team/chat",
    served_name="chat",
    uid="u1",
    created=datetime(2026, 1, 1, tzinfo=UTC),
    weights={"r1": 90, "r2": 10},
    withheld=frozenset({"r0"}),
    mirrors={"r3": 5},
    desired_replicas=2,
    activation=WaitLimits(requests=7, bytes=1 << 20, seconds=60),
    strategy=RoutingStrategy.LEAST_LOAD,
    request_seconds=30.0,
    fallback="team/small",
    latency_limits=LatencyLimits(ttft_seconds=0.5),
)
REPLICA = Endpoint(
    "team/chat-r1-0", "team/chat", "r1", "http://10.0.0.7:8000", "u1", token_digests=("d1",), adapters=frozenset("ab")
)
POET = Adapter("team/poet", "poet", "team/chat", alias="writer", alias_weight=3, on_demand=True)
WHOLE = Snapshot((CHAT,), (REPLICA,), (POET,))


def a_table(snapshot: Snapshot = WHOLE) -> RoutingTable:
    table = RoutingTable()
    for service in snapshot.services:
        table.set_service(service.key, service)
    for endpoint in snapshot.endpoints:
        table.set_endpoint(endpoint.name, endpoint)
    for adapter in snapshot.adapters:
        table.set_adapter(adapter.key, adapter)
    return table


@pytest.mark.capability("RD-8")
async def test_what_is_read_is_what_was_written(tmp_path):
    many = tuple(replace(REPLICA, name=f"team/chat-{number}") for number in range(1000))
    whole = Snapshot.of(a_table(Snapshot((CHAT,), many, (POET,))))

    await SnapshotFile(tmp_path).write(whole, confirmed_at=1_000.0)

    assert SnapshotFile(tmp_path).read() == (whole, 1_000.0)
    assert len(whole.endpoints) == 1000
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


async def test_a_file_that_a_killed_gateway_left_half_written_is_not_in_the_way(tmp_path):
    (tmp_path / f"{FILE_NAME}.new").write_text("half")

    await SnapshotFile(tmp_path).write(WHOLE, confirmed_at=1.0)

    assert SnapshotFile(tmp_path).read() == (WHOLE, 1.0)


def test_without_a_file_there_is_no_snapshot(tmp_path):
    assert SnapshotFile(tmp_path).read() is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a snapshot"),
        (b"routes: []\n", "not a snapshot"),
        (b'{"version":9,"services":0,"endpoints":0,"adapters":0}\n', "version 9"),
        (b'{"version":1,"services":1,"endpoints":0,"adapters":0}\n', "lines are missing"),
        (b'{"version":1,"services":1,"endpoints":0,"adapters":0}\n{"key":1}\n', "not a snapshot"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(content, reason):
    with pytest.raises(SnapshotError, match=reason):
        Snapshot.parse(content)


async def test_a_file_that_others_may_write_or_that_is_a_link_is_refused(tmp_path):
    """The file decides to which addresses prompts are sent, so no other user may be able to write it."""
    file = SnapshotFile(tmp_path)
    await file.write(WHOLE, confirmed_at=1.0)
    (tmp_path / FILE_NAME).chmod(0o622)
    with pytest.raises(SnapshotError, match="this user alone"):
        file.read()

    (tmp_path / FILE_NAME).rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").chmod(0o600)
    (tmp_path / FILE_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SnapshotError, match="symbolic"):
        file.read()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
async def test_a_file_of_another_user_is_refused(tmp_path):
    file = SnapshotFile(tmp_path)
    await file.write(WHOLE, confirmed_at=1.0)
    os.chown(tmp_path / FILE_NAME, 65534, 65534)

    with pytest.raises(SnapshotError, match="this user alone"):
        file.read()


async def test_a_directory_that_cannot_be_written_is_an_error_of_the_snapshot_alone(tmp_path):
    with pytest.raises(SnapshotError, match="No such file"):
        await SnapshotFile(tmp_path / "absent").write(WHOLE, confirmed_at=1.0)


class Clock:
    def __init__(self) -> None:
        self.now = 50_000.0

    def __call__(self) -> float:
        return self.now


class Started:
    """A fleet whose gateway has just started, with its directory."""

    def __init__(self, fleet: Fleet, known: asyncio.Event) -> None:
        self.fleet = fleet
        self.known = known
        self.written: list[str] = []

    def endpoints(self, service: str = "team/chat") -> list[str]:
        return [one.name for one in self.fleet.table.route(service).endpoints]


@asynccontextmanager
async def a_start(
    server: FakeApiServer, directory: Path, *, clock: Clock | None = None, max_age: float = 100.0, wait: float = 0.05
) -> AsyncIterator[Started]:
    started = Started(Fleet(), asyncio.Event())
    limits = StartupLimits(wait_seconds=wait, max_age_seconds=max_age)
    async with Client(server.connection) as client:
        watch = Watch(client, started.fleet)
        startup = RouteStartup(
            started.fleet, watch, started.known, directory, limits,
            count=started.written.append, clock=clock or Clock(),
        )  # fmt: skip
        tasks = [asyncio.create_task(part) for part in (watch.run(), startup.run())]
        yield started
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def a_served_team(server: FakeApiServer, *pods: str) -> str:
    uid = server.put(INFERENCE_SERVICES, a_service_object(served_name="tiny", r1=100))["metadata"]["uid"]
    for pod in pods:
        server.put(PODS, a_pod_object(pod, owner_uid=uid))
    return str(uid)


@pytest.mark.capability("RD-8")
async def test_a_gateway_that_restarts_without_the_api_server_routes_as_before_until_it_lists(tmp_path):
    async with FakeApiServer() as server:
        uid = a_served_team(server, "p1", "p2")
        async with a_start(server, tmp_path, wait=30) as first:
            await until(lambda: first.written == ["written"])
            assert not first.fleet.view().from_snapshot

        server.down = True
        clock = Clock()
        clock.now += 40
        async with a_start(server, tmp_path, clock=clock) as second:
            await second.known.wait()
            view = second.fleet.view()
            assert (view.synced, view.from_snapshot) == (True, True)
            assert 39 <= view.age_seconds <= 41
            assert second.endpoints() == ["team/p1", "team/p2"]

            server.delete(PODS, NAMESPACE, "p1", grace=0)
            server.put(PODS, a_pod_object("p3", owner_uid=uid))
            server.down = False
            await until(lambda: second.written)  # the table that the API server listed
            assert not second.fleet.view().from_snapshot
            assert second.endpoints() == ["team/p2", "team/p3"]


@pytest.mark.capability("RD-8")
async def test_a_service_that_was_deleted_meanwhile_goes_when_the_api_server_lists(tmp_path):
    async with FakeApiServer() as server:
        await SnapshotFile(tmp_path).write(WHOLE, confirmed_at=50_000.0)
        server.down = True
        async with a_start(server, tmp_path) as started:
            await started.known.wait()
            assert started.fleet.table.resolve("poet") is not None
            server.down = False
            await until(lambda: started.written)
            assert len(started.fleet.table) == 0
            assert not started.fleet.table.endpoints
            assert not started.fleet.table.adapters


@pytest.mark.capability("RD-8")
@pytest.mark.parametrize(("age", "is_used"), [(99, True), (101, False)])
async def test_a_snapshot_that_was_current_too_long_ago_is_not_used(tmp_path, age, is_used):
    async with FakeApiServer() as server:
        server.down = True
        clock = Clock()
        await SnapshotFile(tmp_path).write(WHOLE, confirmed_at=clock.now - age)
        async with a_start(server, tmp_path, clock=clock) as started:
            await started.known.wait()

            assert started.fleet.view().synced is is_used
            assert len(started.fleet.table) == int(is_used)


async def test_a_broken_snapshot_is_as_good_as_none(tmp_path):
    async with FakeApiServer() as server:
        a_served_team(server, "p1")
        server.down = True
        (tmp_path / FILE_NAME).write_text("broken")
        (tmp_path / FILE_NAME).chmod(0o600)
        async with a_start(server, tmp_path) as started:
            await started.known.wait()
            assert not started.fleet.view().synced
            server.down = False
            await until(lambda: started.written)

    found = SnapshotFile(tmp_path).read()
    assert found is not None
    assert [one.name for one in found[0].endpoints] == ["team/p1"]


async def test_an_api_server_that_answers_in_time_is_believed_and_not_the_snapshot(tmp_path):
    async with FakeApiServer() as server:
        await SnapshotFile(tmp_path).write(WHOLE, confirmed_at=50_000.0)
        async with a_start(server, tmp_path, wait=30) as started:
            await started.known.wait()

            assert not started.fleet.view().from_snapshot
            assert len(started.fleet.table) == 0


@pytest.mark.capability("SE-8")
async def test_a_restarted_gateway_remembers_the_namespaces_whose_objects_are_absent_just_now(tmp_path):
    """review/control-plane.md 1: a service that GitOps creates again must not lose its full name meanwhile."""
    async with FakeApiServer() as server:
        server.put(INFERENCE_SERVICES, a_service_object("thief", served_name="gone/chat"))
        await SnapshotFile(tmp_path).write(replace(WHOLE, namespaces=("gone",)), confirmed_at=50_000.0)
        async with a_start(server, tmp_path, wait=30) as started:
            await started.known.wait()
            table = started.fleet.table

            assert table.resolve("gone/chat") is None
            assert table.resolve("team/thief") is not None
            await until(lambda: started.written)
    assert "gone" in SnapshotFile(tmp_path).read()[0].namespaces


def test_no_field_of_the_table_can_hold_a_secret():
    """A new field of these structs goes into the file: whoever adds it decides here that it may."""
    known = {
        Service: "key served_name uid created weights withheld mirrors desired_replicas activation is_suspended stalled"
        " max_num_seqs strategy request_seconds fallback fallback_seconds hedged_prompt_tokens handover latency_limits",
        Endpoint: "name service revision url owner_uid served_name token_digests adapters node engine tls_name",
        Adapter: "key name service alias alias_weight created on_demand stalled",
    }
    for kind, names in known.items():
        assert list(kind.__dataclass_fields__) == re.split(r"\s+", names)
