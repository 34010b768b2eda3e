"""A replica may send anything: the gateway's client reads a whole answer, or reports a failure."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from slipway_gateway.picker.endpoints import Endpoint
from slipway_gateway.replica_connection import MAX_BUFFERED, MAX_OVERHEAD
from slipway_gateway.replica_pool import MAX_IDLE
from slipway_gateway.upstream import FirstByteWait, LostError, Reply, SilentError, UnreachableError, Upstream
from tests.gateway.doubles import until

pytestmark = pytest.mark.capability("API-1", "API-2")

OK = b"HTTP/1.1 200 OK\r\n"
Answerer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """One request to its last byte; b"": the client closed the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""
    (length,) = (int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:"))
    return head + await reader.readexactly(length)


class Replica:
    """A socket that sends what the test wants."""

    def __init__(self, answer: bytes = b"", answerer: Answerer | None = None) -> None:
        self.answer = answer
        self.answerer = answerer
        self.requests: list[bytes] = []
        self.connections = 0
        self.open = 0
        self.endpoint = Endpoint("ns/one", "ns/service", "r1", "")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            if self.answerer is not None:
                await self.answerer(reader, writer)
                return
            while request := await read_request(reader):
                self.requests.append(request)
                writer.write(self.answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def serving(replica: Replica) -> AsyncIterator[Upstream]:
    server = await asyncio.start_server(replica.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    replica.endpoint = Endpoint("ns/one", "ns/service", "r1", f"http://127.0.0.1:{port}")
    async with Upstream() as upstream:
        yield upstream
    server.close()


def patience() -> FirstByteWait:
    return FirstByteWait(asyncio.get_running_loop().time() + 30, SilentError, "no first byte")


def attempt(upstream: Upstream, replica: Replica, body: bytes = b"{}", **options):
    return upstream.attempt(replica.endpoint, "/v1/chat/completions", body, {}, patience(), math.inf, **options)


async def rest_of(reply: Reply) -> bytes:
    whole = reply.first
    while piece := await reply.read_more():
        whole += piece
    return whole


async def ask(upstream: Upstream, replica: Replica, body: bytes = b"{}") -> tuple[int, bytes]:
    async with attempt(upstream, replica, body) as reply:
        return reply.status, await rest_of(reply)


async def answer_then_close(answer: bytes) -> tuple[int, bytes]:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer)
        writer.close()

    replica = Replica(answerer=once)
    async with serving(replica) as upstream:
        return await ask(upstream, replica)


WHOLE = {
    "length": OK + b"Content-Length: 5\r\n\r\nhello",
    "chunks": OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n",
    "extensions and trailers": OK + b"Transfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\nX-T: 1\r\n\r\n",
    "until it closes": OK + b"Connection: close\r\n\r\nhello",
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\n\r\nhello",
    "after interim answers": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nA: b\r\n\r\n"
    + OK
    + b"Content-Length: 5\r\n\r\nhello",
    "without a reason": b"HTTP/1.1 200\r\nContent-Length: 5\r\n\r\nhello",
}


@pytest.mark.parametrize("answer", WHOLE.values(), ids=WHOLE)
async def test_every_way_to_delimit_a_body_is_read(answer: bytes):
    assert await answer_then_close(answer) == (200, b"hello")


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_without_a_body_is_complete_and_keeps_its_connection(status: int):
    replica = Replica(b"HTTP/1.1 %d Nothing\r\n\r\n" % status)
    async with serving(replica) as upstream:
        for _ in range(2):
            assert await ask(upstream, replica) == (status, b"")
    assert replica.connections == 1


MALFORMED = {
    "no HTTP": b"garbage\r\n\r\n",
    "another protocol": b"HTTP/3.0 200 OK\r\n\r\n",
    "length and chunks": OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "chunks and length": OK + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "two lengths": OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "the same length twice": OK + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "a list of lengths": OK + b"Content-Length: 5, 5\r\n\r\nhello",
    "a negative length": OK + b"Content-Length: -5\r\n\r\nhello",
    "a length with a sign": OK + b"Content-Length: +5\r\n\r\nhello",
    "a length beyond 64 bits": OK + b"Content-Length: 99999999999999999999\r\n\r\nhello",
    "gzip chunks": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "chunks not last": OK + b"Transfer-Encoding: chunked, gzip\r\n\r\nhello",
    "two codings": OK + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "another coding": OK + b"Transfer-Encoding: identity\r\n\r\nhello",
    "a coding with a tab": OK + b"Transfer-Encoding: \x0bchunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "a header that is continued": OK + b"A: b\r\n c\r\nTransfer-Encoding: \r\n chunked, x\r\n\r\nhello",
    "a space before the colon": OK + b"Content-Length : 5\r\n\r\nhello",
    "a header with NUL": OK + b"A: b\x00c\r\nContent-Length: 5\r\n\r\nhello",
    "a bare line feed": OK + b"A: b\nContent-Length: 5\r\n\r\nhello",
    "an upgrade": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nhello",
    "an upgrade without a protocol": b"HTTP/1.1 101 Switching Protocols\r\n\r\nhello",
    "a status of two digits": b"HTTP/1.1 20 OK\r\nContent-Length: 5\r\n\r\nhello",
    "interim answers only": b"HTTP/1.1 100 Continue\r\n\r\n",
    "endless interim answers": b"HTTP/1.1 100 Continue\r\n\r\n" * 5000 + OK + b"Content-Length: 5\r\n\r\nhello",
    "a giant header": OK + b"A: " + b"b" * MAX_OVERHEAD + b"\r\nContent-Length: 5\r\n\r\nhello",
    "giant headers": OK + b"A: bcdef\r\n" * (MAX_OVERHEAD // 4) + b"Content-Length: 5\r\n\r\nhello",
    "a giant reason": b"HTTP/1.1 200 " + b"O" * 400_000 + b"\r\nContent-Length: 5\r\n\r\nhello",
}  # fmt: skip


@pytest.mark.parametrize("answer", MALFORMED.values(), ids=MALFORMED)
async def test_an_answer_that_could_be_read_in_two_ways_or_is_none_is_a_lost_connection(answer: bytes):
    with pytest.raises(LostError):
        await answer_then_close(answer)


TRUNCATED_LATER = {
    "a chunk size that is no number": b"5\r\nhello\r\nxyz\r\n",
    "a chunk size beyond 64 bits": b"5\r\nhello\r\nfffffffffffffffffff\r\nx",
    "a chunk that is longer than its size": b"5\r\nhello\r\n2\r\nabc\r\n0\r\n\r\n",
    "a chunk size cut short": b"5\r\nhello\r\n1",
    "endless trailers": b"5\r\nhello\r\n0\r\n" + b"A: bcdef\r\n" * (MAX_OVERHEAD // 2),
    "an endless extension": b"5\r\nhello\r\n5;" + b"a" * (5 * MAX_OVERHEAD),
}


@pytest.mark.parametrize("body", TRUNCATED_LATER.values(), ids=TRUNCATED_LATER)
async def test_what_came_before_the_fault_is_read_and_then_the_connection_is_lost(body: bytes):
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK + b"Transfer-Encoding: chunked\r\n\r\n" + body)
        await writer.drain()
        writer.close()

    replica = Replica(answerer=once)
    async with serving(replica) as upstream:
        async with attempt(upstream, replica) as reply:
            assert reply.first.startswith(b"hello")
            with pytest.raises(LostError):
                await rest_of(reply)
        await until(lambda: not replica.open)
        assert upstream.pool.idle == 0


@pytest.mark.parametrize("form", ["length", "chunks", "after interim answers"])
async def test_an_early_end_at_every_byte_is_a_lost_connection(form: str):
    answer = WHOLE[form]
    ends = iter(range(len(answer) + 1))

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer[: next(ends)])
        writer.close()

    replica = Replica(answerer=once)
    async with serving(replica) as upstream:
        for _ in answer:
            with pytest.raises(LostError):
                await ask(upstream, replica)
        assert await ask(upstream, replica) == (200, b"hello")


@pytest.mark.parametrize("form", WHOLE)
async def test_an_answer_in_single_bytes_is_the_same_answer(form: str):
    async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for byte in WHOLE[form]:
            writer.write(bytes([byte]))
            await writer.drain()
        writer.close()

    replica = Replica(answerer=slowly)
    async with serving(replica) as upstream:
        assert await ask(upstream, replica) == (200, b"hello")


async def test_a_connection_carries_one_request_after_another():
    replica = Replica(WHOLE["chunks"])
    async with serving(replica) as upstream:
        for _ in range(20):
            assert await ask(upstream, replica) == (200, b"hello")
        assert (replica.connections, upstream.pool.idle) == (1, 1)
    await until(lambda: not replica.open)


@pytest.mark.parametrize(
    "answer",
    [
        WHOLE["length"] + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil",
        WHOLE["chunks"] + b"x",
        OK + b"Connection: close\r\nContent-Length: 5\r\n\r\nhello",
        OK + b"Connection: close\r\nContent-Length: 5\r\n\r\nhellomore",
        b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    ],
)
async def test_a_connection_with_bytes_after_the_answer_or_without_keep_alive_is_not_used_again(answer: bytes):
    replica = Replica(answer)
    async with serving(replica) as upstream:
        for number in range(1, 4):
            assert await ask(upstream, replica) == (200, b"hello")
            assert replica.connections == number
            assert upstream.pool.idle == 0


async def test_bytes_that_nobody_asked_for_close_an_idle_connection():
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(WHOLE["length"])
        await asyncio.sleep(0.05)
        writer.write(OK + b"Content-Length: 4\r\n\r\nevil")
        await reader.read()

    replica = Replica(answerer=talk)
    async with serving(replica) as upstream:
        assert await ask(upstream, replica) == (200, b"hello")
        await until(lambda: upstream.pool.idle == 0)
        assert await ask(upstream, replica) == (200, b"hello")
        assert replica.connections == 2


async def test_a_request_that_met_a_closing_idle_connection_is_sent_once_more():
    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        replica.requests.append(await read_request(reader))
        writer.write(WHOLE["length"])
        replica.requests.append(await read_request(reader))  # the race: it came, and nobody reads it any more

    replica = Replica(answerer=answer_once)
    async with serving(replica) as upstream:
        assert await ask(upstream, replica) == (200, b"hello")
        assert await ask(upstream, replica) == (200, b"hello")
        assert replica.connections == 2


async def test_a_request_is_not_sent_again_once_a_byte_was_answered_or_on_a_new_connection():
    async def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        replica.requests.append(await read_request(reader))
        if len(replica.requests) > 1:
            writer.write(b"H")
            return
        writer.write(WHOLE["length"])
        replica.requests.append(await read_request(reader))
        writer.write(b"HTTP/1.1 2")

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        replica.requests.append(await read_request(reader))

    replica = Replica(answerer=begin)
    async with serving(replica) as upstream:
        assert await ask(upstream, replica) == (200, b"hello")
        with pytest.raises(LostError):
            await ask(upstream, replica)
        assert (len(replica.requests), replica.connections) == (2, 1)
    replica = Replica(answerer=never)
    async with serving(replica) as upstream:
        with pytest.raises(LostError):
            await ask(upstream, replica)
        assert (len(replica.requests), replica.connections) == (1, 1)


async def test_a_replica_that_is_gone_after_it_was_sent_the_request_is_lost_and_not_unreachable():
    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(WHOLE["length"])
        await read_request(reader)
        server.close()

    replica = Replica(answerer=answer_once)
    server = await asyncio.start_server(replica.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    replica.endpoint = Endpoint("ns/one", "ns/service", "r1", f"http://127.0.0.1:{port}")
    async with Upstream() as upstream:
        assert await ask(upstream, replica) == (200, b"hello")
        with pytest.raises(LostError):
            await ask(upstream, replica)
        with pytest.raises(UnreachableError):
            await ask(upstream, replica)


async def test_an_answer_before_the_request_was_read_is_the_answer_and_its_connection_is_closed():
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 5\r\n\r\nhello")
        await writer.drain()
        await is_read.wait()

    is_read = asyncio.Event()
    replica = Replica(answerer=refuse)
    async with serving(replica) as upstream:
        assert await ask(upstream, replica, b"x" * (32 << 20)) == (413, b"hello")
        assert upstream.pool.idle == 0
        is_read.set()


async def test_a_large_body_arrives_whole():
    body = bytes(range(256)) * (1 << 14)
    replica = Replica(WHOLE["length"])
    async with serving(replica) as upstream:
        for _ in range(2):
            assert await ask(upstream, replica, body) == (200, b"hello")
    assert [request.partition(b"\r\n\r\n")[2] == body for request in replica.requests] == [True, True]
    assert replica.connections == 1


async def test_an_answer_that_is_not_read_stops_its_replica():
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        writer.write(OK + b"Content-Length: %d\r\n\r\n" % (64 << 20))
        writer.transport.set_write_buffer_limits(high=1 << 16)
        for _ in range(1024):
            writer.write(bytes(1 << 16))
            await writer.drain()
            sent += 1 << 16

    replica = Replica(answerer=flood)
    async with serving(replica) as upstream, attempt(upstream, replica) as reply:
        before = -1
        while sent != before:  # until neither side's kernel takes more
            before = sent
            await asyncio.sleep(0.1)
        assert sent < 32 << 20
        assert reply._connection._size <= MAX_BUFFERED + (1 << 18)  # one read of the event loop

        seen: list[int] = []

        def refuse_at(limit: int) -> Callable[[bytes], bool]:
            def take(piece: bytes) -> bool:
                if sum(seen) >= limit:
                    return False
                seen.append(len(piece))
                return True

            return take

        await reply.deliver(refuse_at(8 << 20))
        whole = len(reply.first) + sum(seen)
        while piece := await reply.read_more():
            whole += len(piece)
        assert whole == 64 << 20, "nothing is lost between pieces that are delivered and pieces that are read"


async def test_what_the_reader_of_pieces_raises_reaches_the_request_and_closes_the_connection():
    async def two(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        await more.wait()
        writer.write(b"1\r\nb\r\n")
        await reader.read()

    def fail(piece: bytes) -> bool:
        raise ConnectionResetError("the client left")

    more = asyncio.Event()
    replica = Replica(answerer=two)
    async with serving(replica) as upstream:
        async with attempt(upstream, replica) as reply:
            more.set()
            with pytest.raises(ConnectionResetError):
                await reply.deliver(fail)
        await until(lambda: not replica.open)


async def test_leaving_early_closes_the_connection():
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        await reader.read()

    replica = Replica(answerer=endless)
    async with serving(replica) as upstream:
        async with attempt(upstream, replica) as reply:
            assert reply.first == b"a"
        await until(lambda: not replica.open)
        call = asyncio.create_task(attempt(upstream, replica).__aenter__())
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await until(lambda: not replica.open)
        assert upstream.pool.idle == 0


async def test_idle_connections_are_bounded_and_old_ones_are_closed(monkeypatch):
    monkeypatch.setattr("slipway_gateway.replica_pool.MAX_IDLE", 3)
    monkeypatch.setattr("slipway_gateway.replica_pool.KEEP_SECONDS", 0.05)
    assert MAX_IDLE == 256
    replica = Replica(WHOLE["length"])
    async with serving(replica) as upstream:
        await asyncio.gather(*(ask(upstream, replica) for _ in range(10)))
        assert upstream.pool.idle <= 3
        await until(lambda: upstream.pool.idle == 0)
        await until(lambda: not replica.open)


@pytest.mark.parametrize("value", ["a\r\nX-Forged: 1", "a\nb", "a\rb", "a\0b"])
async def test_a_value_with_a_line_break_is_not_sent(value: str):
    replica = Replica(WHOLE["length"])
    async with serving(replica) as upstream:
        with pytest.raises(ValueError, match="line break"):
            async with upstream.attempt(replica.endpoint, "/v1", b"{}", {"traceparent": value}, patience()):
                pass
    assert replica.connections == 0


async def test_the_request_names_its_host_length_and_prefix():
    replica = Replica(WHOLE["length"])
    async with serving(replica) as upstream:
        plain = replica.endpoint.url
        replica.endpoint = Endpoint("ns/one", "ns/service", "r1", f"{plain}/prefix")
        async with upstream.attempt(replica.endpoint, "/v1/x?a=%20b", b"{}", {"accept": "ü"}, patience()) as reply:
            await rest_of(reply)
    host = plain.removeprefix("http://").encode()
    assert replica.requests == [
        b"POST /prefix/v1/x?a=%20b HTTP/1.1\r\nHost: " + host + "\r\naccept: ü".encode()
        + b"\r\nContent-Length: 2\r\n\r\n{}"
    ]  # fmt: skip


async def test_a_host_name_is_looked_up_and_each_of_its_addresses_is_tried(monkeypatch):
    replica = Replica(WHOLE["length"])
    async with serving(replica) as upstream:
        port = replica.endpoint.url.rpartition(":")[2]
        replica.endpoint = Endpoint("ns/one", "ns/service", "r1", f"http://localhost:{port}")
        assert await ask(upstream, replica) == (200, b"hello")
        replica.endpoint = Endpoint("ns/one", "ns/service", "r1", "http://no-such-host.invalid:1")
        with pytest.raises(UnreachableError):
            await ask(upstream, replica)
