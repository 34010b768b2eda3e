"""The headers of an answer leave with its first piece; where there is none, they leave all the same."""

import asyncio

from aiohttp import web

from slipway_gateway.gateway import Gateway
from tests.gateway.doubles import Runtime, a_gateway

ASK = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
WHOLE = b'{"model":"tiny","messages":[]}'
STREAM = b'{"model":"tiny","messages":[],"stream":true}'


class Reader(asyncio.Protocol):
    """What comes, piece by piece as the socket brings it."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.some = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.pieces.append(data)
        self.some.set()


async def first_piece(gateway: Gateway, body: bytes) -> bytes:
    reader = Reader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(lambda: reader, "127.0.0.1", gateway.port)
    transport.write(ASK % (len(body), body))
    await reader.some.wait()
    transport.abort()
    return reader.pieces[0]


async def test_headers_and_the_first_piece_come_together():
    async with Runtime() as runtime, a_gateway(runtime) as gateway:
        whole = await first_piece(gateway, WHOLE)
        stream = await first_piece(gateway, STREAM)

    assert b"200 OK" in whole
    assert b"Once upon a time." in whole
    assert b"text/event-stream" in stream
    assert b"Once" in stream


async def test_an_answer_without_a_body_has_headers():
    async def say_nothing(runtime: Runtime, request: web.Request) -> web.StreamResponse:
        return web.Response(status=204)

    async with Runtime(say_nothing) as runtime, a_gateway(runtime) as gateway:
        assert b"204 No Content" in await first_piece(gateway, WHOLE)
