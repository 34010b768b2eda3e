"""Requests beyond a tenant's rate or concurrency are refused by their headers, and logged together."""

import asyncio
import json

import aiohttp
import anthropic
import openai
import pytest
from structlog.testing import capture_logs

from slipway_gateway import requests as gateway_requests
from slipway_gateway.access_log import REFUSALS_SECONDS
from slipway_gateway.limits import Grant, Limits
from slipway_gateway.tenants import Tenant
from tests.gateway.doubles import Runtime
from tests.gateway.test_tenancy import KEY, a_client, a_tenanted_gateway, ask, write_tenants

LARGE = "Once more. " * 300_000  # 3 MB: beyond every buffer between client and gateway


@pytest.fixture
def parsed(monkeypatch):
    """The sizes of the bodies that the gateway parses."""
    sizes: list[int] = []
    parse = gateway_requests.parse

    def count(content, *arguments, **options):
        sizes.append(len(content))
        return parse(content, *arguments, **options)

    monkeypatch.setattr(gateway_requests, "parse", count)
    return sizes


@pytest.mark.capability("RG-6", "MT-1")
async def test_the_answer_to_a_request_beyond_the_rate_does_not_wait_for_its_body(tmp_path):
    files = write_tenants(tmp_path, requestsPerMinute=1)
    async with Runtime() as runtime, a_tenanted_gateway(runtime, files) as gateway:
        await ask(gateway)
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        head = f"Host: gateway\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 1000\r\n\r\n"
        writer.write(f"POST /v1/chat/completions HTTP/1.1\r\n{head}".encode())
        answer = await reader.readuntil(b"\r\n\r\n")
        writer.close()

    assert answer.startswith(b"HTTP/1.1 429 ")
    assert b"Retry-After: " in answer


@pytest.mark.capability("RG-6", "MT-1")
async def test_the_stock_client_reads_the_refusal_of_a_large_request_and_keeps_its_connection(tmp_path, parsed):
    files = write_tenants(tmp_path, requestsPerMinute=1)
    async with Runtime() as runtime, a_tenanted_gateway(runtime, files) as gateway:
        client = a_client(gateway)
        connections = gateway.client_listener.connections
        await client.chat.completions.create(model="chat", messages=[])
        for _ in range(3):
            with pytest.raises(openai.RateLimitError, match="the limit is 1 request a minute") as refusal:
                await client.chat.completions.create(model="chat", messages=[{"role": "user", "content": LARGE}])
            assert 1 <= int(refusal.value.response.headers["retry-after"]) <= 61
            assert refusal.value.response.headers["retry-after-ms"]
        with pytest.raises(openai.RateLimitError):
            await client.models.list()

        assert len(connections) == 1
    assert len(parsed) == 1, "only the body of the admitted request"
    assert runtime.requests == 1


@pytest.mark.capability("RG-6")
async def test_concurrency_is_judged_before_the_body_too_and_frees_itself(tmp_path, parsed):
    files = write_tenants(tmp_path, concurrency=1)
    async with Runtime().hold() as runtime, a_tenanted_gateway(runtime, files) as gateway:
        first = asyncio.create_task(ask(gateway))
        while not runtime.requests:  # noqa: ASYNC110  what is waited for happens inside sockets and has no event
            await asyncio.sleep(0.005)
        for _ in range(3):
            with pytest.raises(openai.RateLimitError, match="the limit is 1 concurrent request"):
                await ask(gateway)
        assert len(parsed) == 1
        runtime.allow(100)
        await first
        assert await ask(gateway)


@pytest.mark.parametrize("body", [b"no JSON", json.dumps({"model": "nonsense"}).encode(), b"x" * 2000], ids=len)
async def test_beyond_the_rate_the_answer_is_429_whatever_the_body_is(tmp_path, body):
    files = write_tenants(tmp_path, requestsPerMinute=1, maxBodyBytes=1000)
    async with (
        Runtime() as runtime,
        a_tenanted_gateway(runtime, files) as gateway,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as session,
    ):
        url = f"http://127.0.0.1:{gateway.port}/v1/chat/completions"
        async with session.post(url, data=body) as within:
            assert within.status in {400, 404, 413}, "a request that is refused for its body counts for no limit"
        await ask(gateway)
        async with session.post(url, data=body) as beyond:
            assert beyond.status == 429
        async with session.post(url, data=body, headers={"Authorization": "Bearer sk-wrong"}) as unknown:
            assert unknown.status == 401, "the key is judged first"


@pytest.mark.capability("RG-6")
async def test_anthropics_client_gets_the_refusal_in_its_own_shape(tmp_path):
    files = write_tenants(tmp_path, requestsPerMinute=1)
    async with Runtime() as runtime, a_tenanted_gateway(runtime, files) as gateway:
        await ask(gateway)
        client = anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{gateway.port}", api_key=KEY, max_retries=0)
        with pytest.raises(anthropic.RateLimitError) as refusal:
            await client.messages.create(model="chat", max_tokens=1, messages=[{"role": "user", "content": "Hi."}])

    assert refusal.value.body["error"]["type"] == "rate_limit_error"


@pytest.mark.capability("RG-6")
async def test_a_token_limit_is_judged_by_the_body(tmp_path, parsed):
    files = write_tenants(tmp_path, tokensPerMinute=500)
    async with Runtime() as runtime, a_tenanted_gateway(runtime, files) as gateway:
        with pytest.raises(openai.BadRequestError, match="the limit is 500 tokens"):
            await ask(gateway, max_tokens=1000)

    assert len(parsed) == 1


@pytest.mark.capability("OB-7")
async def test_a_flood_is_logged_once_a_second_and_audited_request_by_request(tmp_path):
    files = write_tenants(tmp_path, requestsPerMinute=1)
    async with Runtime() as runtime, a_tenanted_gateway(runtime, files) as gateway:
        await ask(gateway)
        with capture_logs() as logs:
            answers = await asyncio.gather(*(ask(gateway) for _ in range(20)), return_exceptions=True)
            await asyncio.sleep(REFUSALS_SECONDS + 0.1)
            with pytest.raises(openai.RateLimitError):
                await ask(gateway)
        page = gateway.metrics.exposition().decode()

    assert all(isinstance(answer, openai.RateLimitError) for answer in answers)
    lines = [entry for entry in logs if entry["event"] == "request"]
    counts = [entry for entry in logs if entry["event"] == "more requests refused"]
    assert len(lines) + sum(entry["requests"] for entry in counts) == 21
    assert len(lines) <= 4, "one for each second that the 21 requests took"
    assert {(entry["tenant"], entry["limit"]) for entry in counts} == {("research", "requests")}
    assert all(entry["error"] == "RateLimitError" and entry["request_id"] for entry in lines)
    audits = [entry for entry in logs if entry["event"] == "audit"]
    assert [entry["status"] for entry in audits] == [429] * 21
    assert 'slipway_gateway_tenant_denied_total{limit="requests",tenant="research"} 21.0' in page


async def test_what_was_refused_in_the_last_second_is_logged_before_the_gateway_ends(tmp_path):
    files = write_tenants(tmp_path, requestsPerMinute=1)
    with capture_logs() as logs:
        async with Runtime() as runtime, a_tenanted_gateway(runtime, files) as gateway:
            await ask(gateway)
            await asyncio.gather(*(ask(gateway) for _ in range(5)), return_exceptions=True)

    refused = [entry for entry in logs if entry["event"] == "request" and entry["status"] == 429]
    counts = [entry["requests"] for entry in logs if entry["event"] == "more requests refused"]
    assert len(refused) + sum(counts) == 5
    assert counts


def test_asking_whether_a_limit_is_reached_reserves_nothing():
    limits, tenant = Limits(), Tenant(name="research", models=("*",), requests_per_minute=1, concurrency=1)

    assert [limits.over_requests(tenant, 0.0) for _ in range(3)] == [None] * 3
    assert isinstance(limits.admit(tenant, 1, 0.0), Grant)
    denied = limits.over_requests(tenant, 0.0)
    assert denied is not None
    assert denied.limit == "concurrency"


@pytest.mark.capability("MT-1", "RG-6")
async def test_a_prompt_that_was_sent_counts_although_its_client_left(tmp_path):
    """review/control-plane.md 11: 30 of 30 prompts of 1,500 tokens reached a replica within 2,000 tokens a minute."""
    files = write_tenants(tmp_path, tokensPerMinute=2000)
    prompt = [{"role": "user", "content": "Once more. " * 600}]
    async with Runtime().hold() as runtime, a_tenanted_gateway(runtime, files) as gateway:
        client = a_client(gateway)
        for _ in range(6):
            asked = asyncio.create_task(client.chat.completions.create(model="chat", messages=prompt, max_tokens=1))
            reached = runtime.requests
            while runtime.requests == reached and not asked.done():  # noqa: ASYNC110  as above
                await asyncio.sleep(0.005)
            asked.cancel()
            answer = await asyncio.gather(asked, return_exceptions=True)
            while gateway.requests.open:  # noqa: ASYNC110  as above
                await asyncio.sleep(0.005)

        assert isinstance(answer[0], openai.RateLimitError)
        assert runtime.requests == 1
