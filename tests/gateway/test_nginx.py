"""nginx, as its package configures it, in front of the gateway: events pass one by one, and errors as they are."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

import aiohttp
import openai
import pytest

from bench.nginx import an_nginx
from bench.packages import NoProgramError
from bench.servers import MODEL_NAME, Server, a_gateway, a_runtime
from slipway_gateway.gateway import Gateway
from tests.gateway import doubles
from tests.gateway.doubles import MODEL, WORDS, Runtime, be_full, die_after_two_words, events_of, text_of, until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(180)]

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me a story."}], "stream": True}
HELD_BACK_SECONDS = 1.0  # a control only: without buffering the same event arrives within milliseconds


@contextmanager
def nginx(upstream: str, *directives: str) -> Iterator[Server]:
    with ExitStack() as stack:
        try:
            server = stack.enter_context(an_nginx(upstream, *directives))
        except NoProgramError as missing:
            pytest.skip(str(missing))
        yield server


@asynccontextmanager
async def behind_nginx(runtime: Runtime, *directives: str) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession]]:
    """A gateway in front of `runtime`, and a session whose requests go through nginx to that gateway."""
    async with doubles.a_gateway(runtime) as gateway:
        with nginx(f"http://127.0.0.1:{gateway.port}", *directives) as server:
            async with aiohttp.ClientSession(base_url=server.url) as session:
                yield gateway, session


@pytest.mark.capability("PF-15", "API-2")
@pytest.mark.parametrize(
    "directives",
    [(), ("proxy_http_version 1.0",), ("gzip on", "gzip_proxied any")],
    ids=["as documented", "HTTP/1.0 to the gateway", "with compression"],
)
async def test_each_event_passes_nginx_before_the_next_one_is_generated(directives: tuple[str, ...]):
    async with Runtime() as runtime:
        runtime.hold()
        async with behind_nginx(runtime, *directives) as (_, session):
            runtime.allow(1)
            async with session.post("/v1/chat/completions", json=BODY) as response:
                read = b""
                for number, word in enumerate(WORDS, 1):
                    while read.count(b"\n\n") < number:
                        read += await response.content.readany()
                    assert runtime.said == number, "the replica has not said more than the client has read"
                    assert word.encode() in read
                    runtime.allow(1)
                while piece := await response.content.readany():
                    read += piece
            assert response.headers["X-Slipway-Revision"] == "static"
            assert read.endswith(b"data: [DONE]\n\n")


async def test_nginx_holds_events_back_where_it_ignores_the_header():
    """The control: nginx buffers, at least in front of HTTP/1.0, and the gateway's header is what stops it."""
    directives = ("proxy_http_version 1.0", "proxy_ignore_headers X-Accel-Buffering")
    async with Runtime() as runtime:
        runtime.hold()
        async with behind_nginx(runtime, *directives) as (_, session):
            runtime.allow(2)
            asking = asyncio.create_task(session.post("/v1/chat/completions", json=BODY))
            await until(lambda: runtime.said == 2)
            done, _ = await asyncio.wait({asking}, timeout=HELD_BACK_SECONDS)
            assert not done, "not even the headers have passed"
            runtime.allow(100)
            async with await asking as response:
                assert text_of(await events_of(response)) == "".join(WORDS)


@pytest.mark.capability("PF-15", "API-7")
async def test_a_client_that_leaves_nginx_frees_the_replica():
    async with Runtime() as runtime:
        runtime.hold()
        async with behind_nginx(runtime) as (gateway, session):
            runtime.allow(1)
            response = await session.post("/v1/chat/completions", json=BODY)
            await response.content.readany()
            response.close()
            await runtime.cancelled.wait()
            await until(lambda: not gateway.requests.open)


@pytest.mark.capability("PF-15")
async def test_refusals_and_error_events_pass_nginx_as_the_gateway_wrote_them():
    async with Runtime(be_full) as runtime, behind_nginx(runtime) as (_, session):
        response = await session.post("/v1/chat/completions", json=BODY)
        assert (response.status, response.headers["Retry-After"]) == (429, "7")
        assert (await response.json())["error"]["type"] == "RateLimitError"
    async with Runtime(die_after_two_words) as runtime, behind_nginx(runtime) as (_, session):
        async with session.post("/v1/chat/completions", json=BODY) as response:
            events = await events_of(response)
        assert text_of(events) == "Once upon"
        assert "broke off" in events[-1]["error"]["message"]


@pytest.mark.capability("PF-15", "API-1")
async def test_the_stock_client_reads_a_real_runtime_through_nginx_while_it_generates():
    with (
        a_runtime() as runtime,
        a_gateway((MODEL_NAME, runtime.url)) as gateway,
        nginx(gateway.url) as server,
    ):
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        stream = await client.chat.completions.create(
            model=MODEL_NAME,
            messages=[{"role": "user", "content": "Tell me a story."}],
            max_tokens=300,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for part in stream:
            if part.choices and part.choices[0].delta.content:
                break
        async with aiohttp.ClientSession() as session, session.get(f"{runtime.admin_url}/signals") as response:
            assert (await response.json())["running"] == 1, "the first text is here while the answer is generated"
        rest = [part async for part in stream]
    assert rest[-1].choices[0].finish_reason == "length"
