"""Connections that pass through the proxy, with real sockets."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvloop

from e2e.cluster.service_table import Address
from e2e.cluster.tcp_proxy import AcceptedConnection, reset

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def proxied() -> AsyncIterator[tuple[Streams, Streams]]:
    """The client's and the server's end of one connection with a proxy in between."""
    arrived: asyncio.Future[Streams] = asyncio.get_running_loop().create_future()
    far = await asyncio.start_server(lambda r, w: arrived.set_result((r, w)), "127.0.0.1", 0)
    async with _proxy_to(far.sockets[0].getsockname()) as address:
        client = await asyncio.open_connection(*address)
        client[1].write(b"hello")
        server = await asyncio.wait_for(arrived, 5)
        assert await server[0].readexactly(5) == b"hello"
        yield client, server
        client[1].close()
        server[1].close()
        far.close()


@asynccontextmanager
async def _proxy_to(target: Address | None) -> AsyncIterator[Address]:
    loop = asyncio.get_running_loop()
    proxy = await loop.create_server(lambda: AcceptedConnection(lambda _: target), "127.0.0.1", 0)
    yield proxy.sockets[0].getsockname()
    proxy.close()


async def test_each_piece_arrives_as_it_was_sent() -> None:
    async with proxied() as ((reader, _), (_, server)):
        for token in (b"once", b"upon", b"a", b"time"):
            server.write(token)
            assert await asyncio.wait_for(reader.read(100), 5) == token


async def test_a_client_that_has_said_all_still_hears_the_answer() -> None:
    async with proxied() as ((reader, writer), (server_reader, server)):
        writer.write_eof()
        assert await asyncio.wait_for(server_reader.read(), 5) == b""

        server.write(b"answer")
        server.close()
        assert await asyncio.wait_for(reader.read(), 5) == b"answer"


async def test_the_end_of_the_server_is_the_end_for_the_client() -> None:
    async with proxied() as ((reader, writer), (server_reader, server)):
        server.write(b"bye")
        server.write_eof()
        assert await asyncio.wait_for(reader.read(), 5) == b"bye"

        writer.write(b"wait")
        writer.write_eof()
        assert await asyncio.wait_for(server_reader.read(), 5) == b"wait"


@pytest.mark.parametrize("who", ["client", "server"])
async def test_a_broken_side_breaks_the_other(who: str) -> None:
    async with proxied() as ends:
        (reader, writer), (other_reader, _) = ends if who == "client" else reversed(ends)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(1, 13, struct.pack("ii", 1, 0))  # SO_LINGER: close means reset
        writer.transport.abort()

        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(other_reader.read(), 5)
        assert reader is not None


async def test_a_slow_reader_slows_the_writer_down() -> None:
    async with proxied() as ((reader, _), (_, server)):
        server.write(b"x" * 50_000_000)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(server.drain(), 0.5)  # much less than that fits on the way

        assert len(await asyncio.wait_for(reader.readexactly(50_000_000), 30)) == 50_000_000


async def test_a_connection_to_nowhere_is_refused_by_reset() -> None:
    async with _proxy_to(None) as address:
        reader, writer = await asyncio.open_connection(*address)
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 5)
        writer.close()


async def test_nothing_is_lost_that_was_said_before_the_other_side_was_there() -> None:
    async def upper(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read()).upper())
        writer.close()

    far = await asyncio.start_server(upper, "127.0.0.1", 0)
    async with _proxy_to(far.sockets[0].getsockname()) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"in a hurry")
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 5) == b"IN A HURRY"
        writer.close()
    far.close()


def test_a_connection_that_is_closed_already_can_be_broken() -> None:
    """Both ends of an outage close at once; the transports of uvloop have no descriptor then."""

    async def break_closed() -> None:
        async with _proxy_to(None) as address:
            transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, *address)
            transport.abort()
            await asyncio.sleep(0.01)  # the event loop closes it
            reset(transport)

    uvloop.run(break_closed())
