"""The operator's side of the admin port, against a real server that keeps the contract."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from slipway_api.admin_token import admin_token, token_digest
from slipway_operator.keepalive import KeptConnections
from slipway_operator.masters import Masters, MissingKey
from slipway_operator.replica_client import (
    Address,
    ReplicaClient,
    ReplicaRefused,
    ReplicaUnreachable,
    direct,
)
from tests.operator.runtime_double import RuntimeDouble

CHAT = Address("team", "chat-abcde-0-0", "127.0.0.1", nonce="d00d")
OLD, NEW = b"old-master", b"new-master"


def digest(master: bytes, address: Address = CHAT) -> str:
    return token_digest(admin_token(master, address.namespace, address.pod, address.nonce))


def masters_in(directory, current: bytes, previous: bytes | None = None) -> Masters:
    (directory / "current").write_bytes(current + b"\n")
    if previous is not None:
        (directory / "previous").write_bytes(previous)
    return Masters(directory)


@asynccontextmanager
async def a_client(masters: Masters, port: int, **options):
    connections = KeptConnections()
    try:
        yield ReplicaClient(direct(connections, port=port), masters, **options)
    finally:
        connections.close()


async def test_asks_for_signals_with_the_token_of_the_pod(tmp_path):
    runtime = RuntimeDouble(digests=(digest(NEW),), kv_usage=0.93, running=7, waiting=2)

    async with runtime.serving(), a_client(masters_in(tmp_path, NEW), runtime.port) as client:
        signals = await client.signals(CHAT)

    assert (signals.kv_usage, signals.running, signals.waiting) == (0.93, 7, 2)
    assert runtime.calls == ["GET /signals"]


async def test_a_pod_older_than_the_rotation_is_opened_with_the_previous_token(tmp_path):
    runtime = RuntimeDouble(digests=(digest(OLD),))

    async with runtime.serving(), a_client(masters_in(tmp_path, NEW, OLD), runtime.port) as client:
        await client.signals(CHAT)

    assert runtime.calls == ["GET /signals", "GET /signals"]


async def test_a_pod_that_knows_neither_master_refuses_and_is_not_asked_a_third_time(tmp_path):
    runtime = RuntimeDouble(digests=(digest(b"another"),))

    async with runtime.serving(), a_client(masters_in(tmp_path, NEW, OLD), runtime.port) as client:
        with pytest.raises(ReplicaRefused) as refusal:
            await client.signals(CHAT)

    assert refusal.value.status == 401
    assert len(runtime.calls) == 2


async def test_a_token_opens_only_its_own_pod(tmp_path):
    runtime = RuntimeDouble(digests=(digest(NEW),))

    async with runtime.serving(), a_client(masters_in(tmp_path, NEW), runtime.port) as client:
        with pytest.raises(ReplicaRefused):
            await client.signals(Address("team", "code-abcde-0-0", "127.0.0.1"))


async def test_drain_says_how_long_and_why_and_may_be_repeated(tmp_path):
    runtime = RuntimeDouble(digests=(digest(NEW),), running=3)

    async with runtime.serving(), a_client(masters_in(tmp_path, NEW), runtime.port) as client:
        first = await client.drain(CHAT, timeout_seconds=30, refuse_after_seconds=5, reason="scale down 3 → 2")
        again = await client.drain(CHAT, timeout_seconds=20, reason="scale down 3 → 2")

    assert first.draining
    assert not first.is_drained
    assert again == first
    assert [drain.timeout_seconds for drain in runtime.drains] == [30, 20]
    assert [drain.refuse_after_seconds for drain in runtime.drains] == [5, 0]
    assert runtime.drains[0].reason == "scale down 3 → 2"


async def test_undrain_makes_it_accept_again(tmp_path):
    runtime = RuntimeDouble(digests=(digest(NEW),), draining=True)

    async with runtime.serving(), a_client(masters_in(tmp_path, NEW), runtime.port) as client:
        assert not (await client.undrain(CHAT)).draining


async def test_a_silent_pod_costs_its_timeout_and_is_unreachable(tmp_path):
    async def never(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(never, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, a_client(masters_in(tmp_path, NEW), port, timeout_seconds=0.05) as client:
        with pytest.raises(ReplicaUnreachable, match=r"no answer within 0\.05 s"):
            await client.signals(CHAT)


async def test_a_pod_that_does_not_listen_is_unreachable(tmp_path):
    async with a_client(masters_in(tmp_path, NEW), 1) as client:
        with pytest.raises(ReplicaUnreachable):
            await client.signals(CHAT)


async def test_nonsense_is_refused_not_believed(tmp_path):
    runtime = RuntimeDouble(digests=(digest(NEW),), nonsense=b'{"bootId": "x", "kvUsage": 7}')

    async with runtime.serving(), a_client(masters_in(tmp_path, NEW), runtime.port) as client:
        with pytest.raises(ReplicaRefused, match="not a Signals"):
            await client.signals(CHAT)


async def test_dials_an_ipv6_pod(tmp_path):
    address = Address("team", "chat-abcde-0-0", "::1")
    runtime = RuntimeDouble(digests=(digest(NEW, address),), running=1)

    async with runtime.serving("::1"), a_client(masters_in(tmp_path, NEW), runtime.port) as client:
        assert (await client.signals(address)).running == 1


def test_a_rotated_master_is_seen_without_a_restart_and_new_pods_accept_both(tmp_path):
    masters = masters_in(tmp_path, OLD)
    before = masters.digests("team", CHAT.pod, CHAT.nonce)
    (tmp_path / "previous").write_bytes(OLD)
    (tmp_path / "fresh").write_bytes(NEW)
    (tmp_path / "fresh").rename(tmp_path / "current")

    after = masters.digests("team", CHAT.pod, CHAT.nonce)

    assert before == (digest(OLD),)
    assert after == (digest(NEW), digest(OLD))


def test_without_a_master_the_operator_says_which_secret_is_missing(tmp_path):
    with pytest.raises(MissingKey, match="slipway-admin-master"):
        Masters(tmp_path).read()


def test_the_last_masters_stay_valid_while_the_mount_is_swapped(tmp_path):
    masters = masters_in(tmp_path, NEW)
    masters.read()
    (tmp_path / "current").unlink()

    assert masters.read() == (NEW,)
