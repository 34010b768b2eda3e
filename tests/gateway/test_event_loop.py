"""A socket has one owner, and a broken connection is one line of the log, whatever goes wrong while it is made."""

import asyncio
import gc
import logging
import os
import socket
import ssl
import struct
from collections.abc import Callable

import pytest
import uvloop
from structlog.testing import capture_logs

from slipway_gateway.event_loop import LOOPS, UvLoop, log_exception

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


async def give_up_between_tcp_and_tls(*, sends: bytes = b"") -> None:
    """Cancel a connection when TCP is connected and TLS is not; its peer has reset it, or sent something else."""
    ours, theirs = await a_connected_socket()
    with theirs:
        theirs.sendall(sends)
        if not sends:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            theirs.close()
        loop = asyncio.get_running_loop()
        context = ssl.create_default_context()
        made = asyncio.ensure_future(
            loop.create_connection(asyncio.Protocol, sock=ours, ssl=context, server_hostname="localhost")
        )
        for _ in range(2):  # steps of the event loop
            await asyncio.sleep(0)
        made.cancel()
        await asyncio.gather(made, return_exceptions=True)
        del made
        await asyncio.sleep(0.05)  # the peer's answer arrives
        gc.collect()  # the future is reported when it is collected


@pytest.mark.parametrize(
    ("sends", "kind", "cause"),
    [(b"", "ConnectionResetError", "reset by peer"), (b"HTTP/1.1 400 No\r\n\r\n", "SSLError", "WRONG_VERSION_NUMBER")],
    ids=["reset", "no TLS"],
)
async def test_a_connection_that_breaks_after_it_was_given_up_is_one_line_without_a_traceback(
    caplog, sends, kind, cause
):
    asyncio.get_running_loop().set_exception_handler(log_exception)
    with capture_logs() as logs:
        await give_up_between_tcp_and_tls(sends=sends)

    (line,) = logs
    assert (line["log_level"], line["event"], line["kind"]) == ("warning", "a connection broke", kind)
    assert cause in line["error"]
    assert caplog.records == [], "the default handler writes a traceback"


async def fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("error", [ValueError("a mistake"), ConnectionResetError("in a task of ours")], ids=repr)
async def test_what_a_task_of_ours_did_not_handle_keeps_its_traceback(caplog, error):
    asyncio.get_running_loop().set_exception_handler(log_exception)
    with capture_logs() as logs, caplog.at_level(logging.ERROR):
        task = asyncio.create_task(fail(error))
        await asyncio.wait({task})
        del task
        gc.collect()

    assert logs == []
    assert [record.exc_info[1] for record in caplog.records] == [error]
