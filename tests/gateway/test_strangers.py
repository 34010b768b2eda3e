"""What a caller costs before the gateway knows who calls: a constant, whatever it sends.

review/control-plane.md 2: one megabyte without an API key stopped all streams of a gateway for seconds.
"""

import asyncio
import gzip
from contextlib import AsyncExitStack

import pytest
from aiohttp import web

from slipway_gateway import listener as gateway_listener
from slipway_gateway.listener import UNREAD_BYTES, Connection, ConnectionLimits, Listener
from tests.gateway.doubles import Runtime, a_gateway
from tests.gateway.test_tenancy import KEY, a_tenanted_gateway, write_tenants

PATHS = [
    "/v1/chat/completions", "/v1/messages", "/v1/responses/input_tokens", "/v1/embeddings", "/tokenize", "/v1/models",
    "/v1/models/chat", "/v1/files", "/v1/batches", "/no/such/path?" + "a=b&" * 500,
]  # fmt: skip
ENCODED = ["gzip", "deflate", "br", "zstd", "identity, gzip", "nonsense"]
LARGEST_READ = 256 * 1024  # of the event loop's: one read may be under way when reading stops


@pytest.fixture
def read(monkeypatch):
    """The bytes of clients that reached the gateway's process."""
    monkeypatch.setattr(gateway_listener, "UNREAD_SECONDS", 0.3)  # in which a client may read its answer
    sizes: list[int] = []
    received = Connection.data_received

    def count(self, data):
        sizes.append(len(data))
        received(self, data)

    monkeypatch.setattr(Connection, "data_received", count)
    return sizes


async def send_without_end(port: int, head: str) -> bytes:
    """Send this head and then a body as long as the gateway takes it; what it answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def flood():
        while True:
            writer.write(b"400\r\n" + b"x" * 1024 + b"\r\n")
            await writer.drain()

    writer.write(f"{head}\r\n\r\n".encode())
    flooding = asyncio.create_task(flood())
    answer = b""
    try:
        while piece := await reader.read(65_536):
            answer += piece
    except ConnectionError:
        pass
    flooding.cancel()
    await asyncio.gather(flooding, return_exceptions=True)
    writer.close()
    return answer


def head_of(path: str, *headers: str, method: str = "POST") -> str:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: gateway", *headers])


@pytest.mark.capability("SE-9")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", ["", "Authorization: Bearer sk-wrong"], ids=["no key", "wrong key"])
async def test_of_a_stranger_s_body_a_constant_is_read_on_every_path(tmp_path, path, key, read):
    """review/control-plane.md 2"""
    headers = [header for header in (key, "Transfer-Encoding: chunked") if header]
    files = write_tenants(tmp_path) | {"batch_directory": tmp_path / "batches"}
    async with Runtime() as runtime, a_tenanted_gateway(runtime, files) as gateway:
        answer = await send_without_end(gateway.port, head_of(path, *headers))

        assert answer.startswith((b"HTTP/1.1 401", b"HTTP/1.1 404", b"HTTP/1.1 405"))
        assert b"connection: close" in answer.lower()
        assert sum(read) <= UNREAD_BYTES + 2 * LARGEST_READ
        assert gateway.client_listener.connections.timed_out["unread"] == 1


@pytest.mark.capability("SE-9")
@pytest.mark.parametrize("path", ["/ready", "/health", "/metrics", "/debug/routes", "/nothing"])
async def test_the_admin_port_reads_a_constant_of_a_body_too(path, read):
    async with Runtime() as runtime, a_gateway(runtime) as gateway:
        await send_without_end(gateway.admin_port, head_of(path, "Transfer-Encoding: chunked"))

        assert sum(read) <= UNREAD_BYTES + 2 * LARGEST_READ


@pytest.mark.capability("SE-9")
@pytest.mark.parametrize("path", [*PATHS, "/ready"])
@pytest.mark.parametrize("key", ["", "sk-wrong", KEY], ids=["no key", "wrong key", "key"])
async def test_an_encoded_body_is_415_on_every_path_by_its_headers_with_and_without_a_key(tmp_path, path, key):
    """review/control-plane.md 2"""
    files = write_tenants(tmp_path) | {"batch_directory": tmp_path / "batches"}
    async with Runtime() as runtime, a_tenanted_gateway(runtime, files) as gateway:
        port = gateway.admin_port if path == "/ready" else gateway.port
        for encoding in ENCODED:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            sent = [f"Authorization: Bearer {key}", f"Content-Encoding: {encoding}", "Content-Length: 1000000"]
            writer.write((head_of(path, *sent) + "\r\n\r\n").encode())
            answer = await reader.readuntil(b"\r\n\r\n")
            writer.close()

            assert answer.startswith(b"HTTP/1.1 415 "), encoding
            assert b"Accept-Encoding: identity" in answer
        assert runtime.requests == 0


@pytest.mark.capability("SE-9")
@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Transfer-Encoding: gzip, chunked", b"501"),
        ("Transfer-Encoding: chunked, chunked", b"400"),
        ("Transfer-Encoding: gzip", b"400"),
        ("Expect: 200-ok", b"417"),
        ("Content-Encoding: identity", b"401"),
    ],
)
async def test_what_else_a_body_may_not_be(tmp_path, header, status):
    async with Runtime() as runtime, a_tenanted_gateway(runtime, write_tenants(tmp_path)) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write((head_of("/v1/chat/completions", header) + "\r\n\r\n").encode())
        line = await reader.readline()
        writer.close()

    assert line.split()[1] == status


@pytest.mark.capability("SE-9")
async def test_the_listener_hands_a_compressed_body_on_as_it_came():
    """review/control-plane.md 2: whatever a handler forgets, a gigabyte never comes out of a megabyte."""
    sizes = []

    async def count(request: web.Request) -> web.Response:
        sizes.append(len(await request.read()))
        return web.Response()

    app = web.Application()
    app.router.add_post("/", count)
    bomb = gzip.compress(bytes(1 << 20))
    listener = Listener(app, "127.0.0.1", 0, ConnectionLimits())
    async with AsyncExitStack() as stack:
        await listener.open(stack)
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        head = head_of("/", "Content-Encoding: gzip", f"Content-Length: {len(bomb)}")
        writer.write(head.encode() + b"\r\n\r\n" + bomb)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()

    assert sizes == [len(bomb)]


@pytest.mark.capability("SE-9")
@pytest.mark.parametrize(("key", "first"), [("sk-wrong", b"HTTP/1.1 401 "), (KEY, b"HTTP/1.1 100 ")])
async def test_100_continue_is_sent_only_to_a_caller_that_is_known(tmp_path, key, first):
    async with Runtime() as runtime, a_tenanted_gateway(runtime, write_tenants(tmp_path)) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        body = b'{"model": "chat", "messages": []}'
        sent = [f"Authorization: Bearer {key}", "Expect: 100-continue", f"Content-Length: {len(body)}"]
        writer.write((head_of("/v1/chat/completions", *sent) + "\r\n\r\n").encode())
        line = await reader.readline()
        assert line.startswith(first)
        if key == KEY:
            await reader.readline()
            writer.write(body)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()


@pytest.mark.capability("SE-9")
@pytest.mark.parametrize("upgrade", ["websocket", "h2c", "TLS/1.2"])
async def test_an_upgrade_header_changes_nothing(tmp_path, upgrade, read):
    async with Runtime() as runtime, a_tenanted_gateway(runtime, write_tenants(tmp_path)) as gateway:
        sent = ["Connection: Upgrade", f"Upgrade: {upgrade}", "Transfer-Encoding: chunked"]
        answer = await send_without_end(gateway.port, head_of("/v1/chat/completions", *sent))

        assert answer.startswith(b"HTTP/1.1 401")
        assert sum(read) <= UNREAD_BYTES + 2 * LARGEST_READ
