"""A socket has one owner: whatever goes wrong while a connection is made, its descriptor is closed once."""

import asyncio
import os
import socket
import ssl
import struct
from collections.abc import Callable

import pytest
import uvloop

from slipway_gateway.event_loop import LOOPS, UvLoop

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close sends RST


def on(loop: Callable[[], asyncio.AbstractEventLoop], test: Callable[[], object]) -> object:
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(test())  # type: ignore[arg-type]


async def a_connected_socket() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection; the first is ours."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.socket()
        ours.setblocking(False)
        await asyncio.get_running_loop().sock_connect(ours, listener.getsockname())
        theirs, _ = listener.accept()
    return ours, theirs


async def descriptors_after_a_reset_before_tls() -> tuple[int, int]:
    """What the Python socket believes to own after the peer has reset the connection, and what a new file gets."""
    ours, theirs = await a_connected_socket()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    theirs.close()
    context = ssl.create_default_context()
    with pytest.raises(ConnectionResetError):
        await asyncio.get_running_loop().create_connection(
            asyncio.Protocol, sock=ours, ssl=context, server_hostname="localhost"
        )
    believed = ours.fileno()
    gets, other = os.pipe()
    os.close(other)
    os.close(gets)
    ours.detach()  # or this test would close another one's
    return believed, gets


async def test_the_tests_of_the_gateway_run_on_its_own_loop():
    assert isinstance(asyncio.get_running_loop(), UvLoop)


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_socket_that_was_reset_before_tls_owns_nothing(loop):
    believed, _ = on(loop, descriptors_after_a_reset_before_tls)

    assert believed == -1


def test_uvloop_alone_still_leaves_it_a_descriptor_that_others_get():
    """Where this fails, uvloop has mended it, and `event_loop.UvLoop` is not needed any longer."""
    believed, gets = on(uvloop.new_event_loop, descriptors_after_a_reset_before_tls)

    assert believed == gets


async def test_a_connection_that_is_cancelled_while_it_is_made_owns_nothing():
    ours, theirs = await a_connected_socket()
    with theirs:
        made = asyncio.ensure_future(asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours))
        await asyncio.sleep(0)
        made.cancel()
        with pytest.raises(asyncio.CancelledError):
            await made

        assert ours.fileno() == -1
        assert await asyncio.to_thread(theirs.recv, 1) == b""  # and it is closed


async def test_a_connection_that_was_made_works_and_closes():
    ours, theirs = await a_connected_socket()
    with theirs:
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
        transport.write(b"hello")
        assert await asyncio.to_thread(theirs.recv, 5) == b"hello"
        assert transport.get_extra_info("socket").getpeername() == theirs.getsockname()
        transport.close()
        assert await asyncio.to_thread(theirs.recv, 1) == b""
