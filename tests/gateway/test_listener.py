"""Slow and numerous clients: each phase of a connection has a limit, and so has their number."""

import asyncio
import contextlib

import openai
import pytest

from tests.gateway.doubles import MODEL, Runtime, a_caller, a_gateway, begin_stream, until

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"


async def connect(gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", gateway.port)


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Whether the gateway closes; waits until it does."""
    with contextlib.suppress(ConnectionError):
        await reader.read()
    return True


async def dribble(writer: asyncio.StreamWriter) -> None:
    """One byte of a header now and then, for ever."""
    writer.write(HEAD)
    with contextlib.suppress(ConnectionError):
        while not writer.is_closing():
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_both_ports_answer_by_ipv4_and_ipv6(address):
    """review/operator-users.md 6: on a cluster of IPv6 nothing answered."""
    async with Runtime() as runtime, a_gateway(runtime, host="::") as gateway:
        for port in (gateway.port, gateway.admin_port):
            reader, writer = await asyncio.open_connection(address, port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 ")
            writer.close()


@pytest.mark.capability("SE-6")
async def test_200_clients_that_dribble_their_headers_are_closed_and_others_are_served_meanwhile():
    """Chaos C6: 200 of 200 were still open after 40 s."""
    async with Runtime() as runtime, a_gateway(runtime, header_seconds=3.0) as gateway:
        clients = [await connect(gateway) for _ in range(200)]
        dribbling = [asyncio.create_task(dribble(writer)) for _, writer in clients]
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="none", max_retries=0)
        await client.chat.completions.create(model=MODEL, messages=[])

        assert all([await is_closed(reader) for reader, _ in clients])
        for task in dribbling:
            task.cancel()
        await client.close()
        await until(lambda: not len(gateway.client_listener.connections))
        assert gateway.client_listener.connections.timed_out["headers"] == 200
        assert runtime.requests == 1


@pytest.mark.capability("SE-6")
@pytest.mark.parametrize("sent", [b"", b"POST /v1", HEAD])
async def test_a_client_that_sends_half_its_headers_or_nothing_is_closed(sent):
    """Finding 7: 50 of 50 half-open connections lived after 100 s."""
    async with Runtime() as runtime, a_gateway(runtime, header_seconds=0.2) as gateway:
        reader, writer = await connect(gateway)
        writer.write(sent)

        assert await is_closed(reader)
        writer.close()


async def test_the_second_request_of_a_connection_has_the_same_limit_and_idle_time_is_not_counted():
    async with Runtime() as runtime, a_gateway(runtime, header_seconds=1.0) as gateway:
        reader, writer = await connect(gateway)
        for _ in range(3):
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b'"parent": null}]}')
            await asyncio.sleep(1.5)  # idle for longer than headers may take
        writer.write(b"GET /v1/models HTTP/1.1\r\n")

        assert await is_closed(reader)
        writer.close()


async def test_an_idle_connection_is_closed():
    async with Runtime() as runtime, a_gateway(runtime, idle_seconds=0.2) as gateway:
        reader, writer = await connect(gateway)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")

        assert (await reader.read()).endswith(b'"parent": null}]}')
        writer.close()


async def test_a_long_answer_is_no_idle_connection():
    async with (
        Runtime().hold() as runtime,
        a_gateway(runtime, header_seconds=1.0, idle_seconds=1.0, write_stall_seconds=1.0) as gateway,
        a_caller(gateway) as caller,
    ):
        call = asyncio.create_task(caller.chat().__aenter__())
        await until(lambda: runtime.requests)
        await asyncio.sleep(2.5)
        runtime.allow(1)

        assert (await call).status == 200


@pytest.mark.capability("SE-6")
async def test_a_body_that_does_not_arrive_in_time_is_408():
    async with Runtime() as runtime, a_gateway(runtime, body_seconds=0.2) as gateway:
        reader, writer = await connect(gateway)
        writer.write(HEAD + b"Content-Length: 1000\r\n\r\n{")

        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        assert runtime.requests == 0
        writer.close()


@pytest.mark.capability("SE-6")
async def test_stalled_uploads_are_ended_when_others_need_their_memory():
    """Finding 7: 16 clients that sent all but the last byte closed the gateway for everyone."""
    size = 100_000
    async with (
        Runtime() as runtime,
        a_gateway(runtime, max_body_bytes=size, max_bodies_bytes=16 * size) as gateway,
    ):
        stalled = [await connect(gateway) for _ in range(16)]
        for _, writer in stalled:
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % size + b"x" * (size - 1))
            await writer.drain()
        await until(lambda: gateway.requests.open >= 8)
        await asyncio.sleep(1.5)  # an upload counts as stalled after a second
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="none", max_retries=0)
        large = [{"role": "user", "content": "x" * (size // 2)}]
        for _ in range(10):
            await client.chat.completions.create(model=MODEL, messages=large)

        assert runtime.requests == 10
        for _, writer in stalled:
            writer.close()


@pytest.mark.capability("SE-6")
async def test_a_client_that_does_not_read_its_answer_is_aborted_and_its_replica_released():
    async def flood(runtime, request):
        response = await begin_stream(request)
        while True:
            await response.write(b": " + b"x" * 65_536 + b"\n\n")

    async with Runtime(flood) as runtime, a_gateway(runtime, write_stall_seconds=0.3) as gateway:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
        body = b'{"model": "tiny", "stream": true}'
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)

        await asyncio.wait_for(runtime.cancelled.wait(), 30)
        await asyncio.wait_for(gateway.requests.idle.wait(), 30)
        assert gateway.client_listener.connections.timed_out["stalled"] == 1
        writer.close()


@pytest.mark.capability("SE-6")
@pytest.mark.parametrize("limit", ["max_connections", "max_connections_per_client"])
async def test_connections_beyond_the_limit_are_503_and_those_within_it_go_on(limit):
    async with Runtime() as runtime, a_gateway(runtime, **{limit: 3}) as gateway:
        open_ones = [await connect(gateway) for _ in range(3)]
        await until(lambda: len(gateway.client_listener.connections) == 3)
        reader, writer = await connect(gateway)
        refusal = await reader.read()
        writer.close()

        assert refusal.startswith(b"HTTP/1.1 503")
        assert b"Retry-After: 1" in refusal
        open_ones[0][1].write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await open_ones[0][0].readline()).startswith(b"HTTP/1.1 200")
        open_ones[1][1].close()
        await until(lambda: len(gateway.client_listener.connections) == 2)
        reader, writer = await connect(gateway)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        for _, open_writer in (*open_ones, (reader, writer)):
            open_writer.close()


async def test_the_connections_are_counted_in_the_metrics():
    async with Runtime() as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        async with caller.chat():
            pass
        async with caller.session.get(f"{caller.admin_url}/metrics") as response:
            text = await response.text()

        assert 'slipway_gateway_connections{port="clients"} 1.0' in text
        assert 'slipway_gateway_connections_refused_total{port="clients"} 0.0' in text
