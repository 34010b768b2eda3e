"""Requests over kept connections: what is reused, what is repeated, and what is not believed."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from slipway_operator.keepalive import BadReply, ConnectionEnded, KeptConnections

Answer = Callable[[int, int], bytes]
"""(number of the connection, number of the request on it) -> what the server sends; b"" closes."""


class Server:
    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.connections = 0
        self.requests: list[bytes] = []
        self.port = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        mine, count = self.connections, 0
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                self.requests.append(head + await reader.readexactly(length))
                count += 1
                reply = self.answer(mine, count)
                if not reply:
                    break
                for start in range(0, len(reply), 7):  # in pieces, as a network may bring it
                    writer.write(reply[start : start + 7])
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(answer: Answer, host: str = "127.0.0.1") -> AsyncIterator[Server]:
    server = Server(answer)
    listening = await asyncio.start_server(server.handle, host, 0)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()


def ok(body: bytes = b"{}", headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%s\r\n%s" % (len(body), headers, body)


@asynccontextmanager
async def connections_to(server: Server):
    connections = KeptConnections()

    async def get(path: str = "/signals") -> tuple[int, bytes]:
        return await connections.request("GET", "127.0.0.1", server.port, path, {"X-Token": "t"}, None)

    try:
        yield connections, get
    finally:
        connections.close()


async def test_a_connection_is_kept_and_used_again():
    async with serving(lambda _, count: ok(b"%d" % count)) as server, connections_to(server) as (connections, get):
        assert [await get() for _ in range(3)] == [(200, b"1"), (200, b"2"), (200, b"3")]
        assert server.connections == 1
        assert len(connections) == 1
    assert server.requests[0] == b"GET /signals HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nX-Token: t\r\n\r\n" % server.port


async def test_a_body_travels_with_its_length_and_other_statuses_come_back():
    async with serving(lambda *_: b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n") as server:
        connections = KeptConnections()
        reply = await connections.request("POST", "127.0.0.1", server.port, "/drain", {}, b'{"a": 1}')
        connections.close()
    assert reply == (401, b"")
    assert server.requests[0].endswith(b'Content-Length: 8\r\n\r\n{"a": 1}')


async def test_a_kept_connection_that_the_server_closed_is_replaced_by_a_new_one():
    def answer(connection: int, count: int) -> bytes:
        return b"" if (connection, count) == (1, 2) else ok()

    async with serving(answer) as server, connections_to(server) as (_, get):
        await get()
        assert await get() == (200, b"{}")
        assert server.connections == 2


async def test_a_new_connection_that_the_server_closes_is_an_error():
    async with serving(lambda *_: b"") as server, connections_to(server) as (_, get):
        with pytest.raises(ConnectionEnded):
            await get()
        assert server.connections == 1


async def test_a_connection_that_the_server_wants_closed_is_not_kept():
    def answer(*_: int) -> bytes:
        return ok(headers=b"Connection: close\r\n")

    async with serving(answer) as server, connections_to(server) as (connections, get):
        await get()
        assert len(connections) == 0


async def test_a_request_that_was_given_up_never_answers_the_next_one():
    release = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        is_first = not release.is_set()
        await release.wait()
        writer.write(ok(b"late" if is_first else b"fresh"))

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    connections, port = KeptConnections(), listening.sockets[0].getsockname()[1]
    task = asyncio.create_task(connections.request("GET", "127.0.0.1", port, "/", {}, None))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    release.set()

    assert len(connections) == 0
    assert await connections.request("GET", "127.0.0.1", port, "/", {}, None) == (200, b"fresh")
    connections.close()
    listening.close()


@pytest.mark.parametrize(
    "nonsense",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 x\r\nContent-Length: 0\r\n\r\n",
    ],
)
async def test_what_is_no_reply_is_refused(nonsense):
    async with serving(lambda *_: nonsense) as server, connections_to(server) as (connections, get):
        with pytest.raises(BadReply):
            await get()
        assert len(connections) == 0
