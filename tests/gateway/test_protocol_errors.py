"""What is not HTTP gets an answer like any other refusal, and learns nothing of the server."""

import asyncio
import json

import pytest

from tests.gateway.doubles import Runtime, a_gateway

pytestmark = pytest.mark.capability("SE-9")

BAD = {
    "no HTTP at all": b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
    "a space before the colon": b"GET /v1/models HTTP/1.1\r\nHost : x\r\n\r\n",
    "two lengths": b"POST /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx",
    "both lengths": b"POST /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    "a line that is too long": b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "a header that is too long": b"GET / HTTP/1.1\r\nHost: x\r\nx: " + b"x" * 70_000 + b"\r\n\r\n",
    "CONNECT": b"CONNECT internal:443 HTTP/1.1\r\nHost: internal:443\r\n\r\n",
    "OPTIONS *": b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "a method of its own": b"SECRET-PROMPT /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
}


async def answer_to(port: int, sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    async with asyncio.timeout(10):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        body = await reader.readexactly(int(length.split(b":")[1]))
    writer.close()
    return head + body


@pytest.mark.parametrize("name", BAD)
async def test_a_request_that_cannot_be_parsed_is_refused_like_any_other(name):
    """review/control-plane.md 16: plain text, with `Server: Python/3.11 aiohttp/3.14.5`."""
    async with Runtime() as runtime, a_gateway(runtime) as gateway:
        for port in (gateway.port, gateway.admin_port):
            answer = await answer_to(port, BAD[name])
            head, _, body = answer.partition(b"\r\n\r\n")

            assert head.split()[1][:1] == b"4", head
            assert b"aiohttp" not in answer
            assert b"Python" not in answer
            assert b"Server: slipway" in head
            if port == gateway.port:
                assert json.loads(body)["error"]["code"] == int(head.split()[1])
