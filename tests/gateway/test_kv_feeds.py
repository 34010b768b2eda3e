"""The gateway follows what replicas have in their KV cache: against feeds that break, lag, restart or do not exist."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from slipway_api.names import HEADER_TEXT_BLOCKS, PATH_TEXT_BLOCKS
from slipway_api.text_blocks import TextBlocks
from slipway_gateway import kv_feeds
from slipway_gateway.fleet import Fleet
from slipway_gateway.gateway import Gateway
from slipway_gateway.picker.endpoints import Endpoint, Service
from slipway_gateway.picker.prefix import BLOCK_BYTES
from slipway_gateway.settings import GatewaySettings
from slipway_runtime.messages import TextBlockChanges
from slipway_runtime.server.text_blocks import TextBlockLog
from tests.gateway.doubles import Runtime, a_caller, until

LONG = [{"role": "user", "content": "A long question about chess, asked once more. " * 40}]
NAME = "ns/chat-0"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_feeds, "FIRST_RETRY_SECONDS", 0.01)


class Replica(Runtime):
    """A replica with the runtime's own log of text blocks behind its feed; `log` None: it has no feed."""

    def __init__(self, log: TextBlockLog | None) -> None:
        super().__init__()
        self.log = log
        self.cursors: list[str] = []
        self.connection: asyncio.Transport | None = None

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path != PATH_TEXT_BLOCKS:
            return await super()._answer(request)
        if self.log is None:
            return web.Response(status=404)
        self.cursors.append(request.query["after"])
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        self.connection = request.transport
        async for lines in self.log.follow(request.query["after"]):
            await response.write(lines)
        return response

    def cut(self) -> None:
        """Break the feed off."""
        assert self.connection is not None
        self.connection.abort()


@asynccontextmanager
async def a_following_gateway(*replicas: Replica) -> AsyncIterator[Gateway]:
    fleet = Fleet()
    fleet.set_service("ns/chat", Service("ns/chat", "tiny"))
    for number, replica in enumerate(replicas):
        fleet.set_endpoint(f"ns/chat-{number}", Endpoint(f"ns/chat-{number}", "ns/chat", "r1", replica.url))
    settings = GatewaySettings(host="127.0.0.1", port=0, admin_port=0, propagation_seconds=0, kv_events=True)
    async with Gateway(settings, fleet) as gateway:
        yield gateway


def known(gateway: Gateway, *blocks: int) -> list[int]:
    """Which of these blocks the gateway believes that the first replica has."""
    return [block for block in blocks if gateway.fleet.prefixes.matched(NAME, [block])]


@pytest.mark.capability("RG-4")
async def test_what_a_replica_stores_and_evicts_is_in_the_index_and_out_of_it():
    async with Replica(log := TextBlockLog("a")) as replica, a_following_gateway(replica) as gateway:
        log.apply(TextBlockChanges(stored=(1, 2, 3)))
        await until(lambda: known(gateway, 1, 2, 3) == [1, 2, 3])
        log.apply(TextBlockChanges(removed=(2,)))
        await until(lambda: known(gateway, 1, 2, 3) == [1, 3])
        page = gateway.metrics.exposition().decode()

        assert gateway.fleet.prefixes.matched(NAME, [1, 2, 3]) == 1, "a chain ends at its first gap"
        assert "slipway_gateway_kv_feeds 1.0" in page
        assert 'slipway_gateway_kv_events_total{event="removed"} 1.0' in page


@pytest.mark.capability("RG-4")
async def test_a_request_tells_its_text_blocks_only_to_a_replica_that_has_a_feed():
    async with Replica(TextBlockLog("a")) as with_feed, Replica(None) as without:
        for replica, has_feed in ((with_feed, True), (without, False)):
            async with a_following_gateway(replica) as gateway, a_caller(gateway) as caller:
                if has_feed:
                    await until(lambda gateway=gateway: gateway.kv_feeds.live)
                async with caller.chat(messages=LONG, headers={HEADER_TEXT_BLOCKS: "forged"}) as response:
                    assert response.status == 200
        header = TextBlocks.of_header(with_feed.headers[0][HEADER_TEXT_BLOCKS])

    assert HEADER_TEXT_BLOCKS not in without.headers[0]
    assert header.block_bytes == BLOCK_BYTES
    assert len(header.hashes) == header.total_bytes // BLOCK_BYTES > 5


@pytest.mark.capability("RG-4")
async def test_after_a_break_the_feed_continues_and_nothing_is_lost():
    async with Replica(log := TextBlockLog("a")) as replica, a_following_gateway(replica) as gateway:
        log.apply(TextBlockChanges(stored=(1, 2)))
        await until(lambda: known(gateway, 1, 2) == [1, 2])
        log.apply(TextBlockChanges(removed=(1,)))
        replica.cut()
        log.apply(TextBlockChanges(stored=(3,)))
        await until(lambda: known(gateway, 1, 2, 3) == [2, 3])
        resets = gateway.metrics.kv_events.labels("reset")._value.get()

    assert replica.cursors[0] == ""
    assert replica.cursors[1].startswith("a.")
    assert resets == 1, "the feed was not begun anew"


@pytest.mark.capability("RG-4")
@pytest.mark.parametrize("reason", ["restart", "too_late"])
async def test_a_restarted_replica_or_a_log_that_has_moved_on_begins_anew(reason: str):
    async with Replica(log := TextBlockLog("a", most_hashes=8)) as replica, a_following_gateway(replica) as gateway:
        log.apply(TextBlockChanges(stored=(1, 2)))
        await until(lambda: known(gateway, 1, 2) == [1, 2])
        if reason == "restart":
            replica.log = TextBlockLog("b")
            replica.log.apply(TextBlockChanges(stored=(9,)))
            replica.cut()
            await until(lambda: known(gateway, 1, 2, 9) == [9])
        else:
            replica.cut()
            log.apply(TextBlockChanges(removed=(1,)))
            for number in range(10, 30):
                log.apply(TextBlockChanges(stored=(number,)))
            await until(lambda: known(gateway, 1, 2, 10, 29) == [2, 10, 29])


@pytest.mark.capability("RG-4")
async def test_without_a_feed_the_index_is_what_this_gateway_sent():
    async with (
        Replica(None) as replica,
        Replica(None) as other,
        a_following_gateway(replica, other) as gateway,
        a_caller(gateway) as caller,
    ):
        for _ in range(4):
            async with caller.chat(messages=LONG) as response:
                assert response.status == 200
        assert gateway.kv_feeds.live == set()

    assert sorted((replica.requests, other.requests)) == [0, 4]


async def test_a_replica_that_leaves_is_followed_no_more_and_forgotten():
    async with Replica(log := TextBlockLog("a")) as replica, a_following_gateway(replica) as gateway:
        log.apply(TextBlockChanges(stored=(1,)))
        await until(lambda: known(gateway, 1))
        gateway.fleet.set_endpoint(NAME, None)
        await until(lambda: not gateway.kv_feeds.live)

        assert known(gateway, 1) == []
        await until(lambda: log.feeds == 0)
        gateway.fleet.set_endpoint(NAME, Endpoint(NAME, "ns/chat", "r1", replica.url))
        await until(lambda: known(gateway, 1))
        gateway.fleet.set_endpoint(NAME, Endpoint(NAME, "ns/chat", "r1", replica.url, adapters=frozenset({"legal"})))
        assert known(gateway, 1) == [1], "a new adapter is no new replica"


async def test_two_gateways_know_the_same():
    async with (
        Replica(log := TextBlockLog("a")) as replica,
        a_following_gateway(replica) as one,
        a_following_gateway(replica) as two,
    ):
        log.apply(TextBlockChanges(stored=(1, 2)))
        await until(lambda: known(one, 1, 2) == known(two, 1, 2) == [1, 2])


async def test_the_log_is_bounded_and_its_lines_are_short():
    log = TextBlockLog("a", most_hashes=10_000)
    log.apply(TextBlockChanges(stored=tuple(range(50_000))))
    for start in range(0, 40_000, 1000):
        log.apply(TextBlockChanges(removed=tuple(range(start, start + 1000))))

    assert log._num_hashes <= 10_000
    assert all(len(update.line()) < 32_000 for number in (-1, 60) for update in log.since(number))
    left = [one for update in log.since(-1) for one in update.stored]
    assert left == list(range(40_000, 50_000))
