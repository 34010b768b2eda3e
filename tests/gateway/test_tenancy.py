"""Tenants through a real gateway: keys, models, limits, what the replica is told, and what is counted."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import openai
import pytest
import yaml
from structlog.testing import capture_logs

from slipway_gateway.fleet import Fleet
from slipway_gateway.gateway import Gateway
from slipway_gateway.picker.endpoints import Adapter, Endpoint, Service
from slipway_gateway.settings import GatewaySettings
from slipway_gateway.tenants import digest_of
from tests.gateway.doubles import Runtime, a_gateway, be_full, event, events_of

KEY, OTHER, ORPHAN = "sk-research-secret", "sk-sales-secret", "sk-nobodys-secret"
PROMPT = "The code word is Quillington."


def write_tenants(directory: Path, **research: object) -> dict[str, Path]:
    """Two tenants: `research` with these fields, `sales` with another model. The settings that name the files."""
    keys = directory / "keys"
    keys.mkdir(exist_ok=True)
    for name, key in (("laptops", KEY), ("crm", OTHER), ("orphan", ORPHAN)):
        (keys / name).write_text(digest_of(key))
    tenants = [
        {"name": "research", "keys": ["laptops"], "models": ["chat"]} | research,
        {"name": "sales", "keys": ["crm"], "models": ["sales/*"]},
    ]
    (directory / "tenants.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    return {"tenants_file": directory / "tenants.yaml", "keys_directory": keys}


@asynccontextmanager
async def a_tenanted_gateway(runtime: Runtime, files: dict[str, Path], **settings: object) -> AsyncIterator[Gateway]:
    """The services team/chat and sales/forecast, both answered by this runtime."""
    fleet = Fleet()
    for key, name in (("team/chat", "chat"), ("sales/forecast", "forecast")):
        fleet.set_service(key, Service(key, name))
        fleet.set_endpoint(f"{key}-0", Endpoint(f"{key}-0", key, "r1", runtime.url))
    base = {"host": "127.0.0.1", "port": 0, "admin_port": 0, "propagation_seconds": 0}
    async with Gateway(GatewaySettings(**base | files | settings), fleet) as gateway:
        yield gateway


def a_client(gateway: Gateway, key: str = KEY) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key=key, max_retries=0)


async def ask(gateway: Gateway, key: str = KEY, model: str = "chat", **fields: object):
    messages = [{"role": "user", "content": PROMPT}]
    return await a_client(gateway, key).chat.completions.create(model=model, messages=messages, **fields)


@pytest.mark.capability("SE-1", "PL-8")
@pytest.mark.parametrize("key", ["sk-wrong", "x" * 5000, digest_of(KEY)])
async def test_a_wrong_key_is_401_and_its_body_is_not_read(tmp_path, key):
    async with Runtime() as runtime, a_tenanted_gateway(runtime, write_tenants(tmp_path)) as gateway:
        with pytest.raises(openai.AuthenticationError) as refusal:
            await ask(gateway, key)
        with pytest.raises(openai.AuthenticationError):
            await a_client(gateway, key).models.list()

    assert refusal.value.response.headers["www-authenticate"] == "Bearer"
    assert key not in refusal.value.response.text
    assert runtime.requests == 0


@pytest.mark.capability("SE-1")
async def test_without_a_key_the_answer_says_how_to_send_one(tmp_path):
    async with (
        Runtime() as runtime,
        a_tenanted_gateway(runtime, write_tenants(tmp_path)) as gateway,
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{gateway.port}/v1/chat/completions", json={"model": "chat"}) as response,
    ):
        error = (await response.json())["error"]

        assert response.status == 401
        assert "Authorization: Bearer" in error["message"]
        assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.capability("SE-1")
async def test_a_key_of_no_tenant_is_403(tmp_path):
    async with Runtime() as runtime, a_tenanted_gateway(runtime, write_tenants(tmp_path)) as gateway:
        with pytest.raises(openai.PermissionDeniedError):
            await ask(gateway, ORPHAN)


@pytest.mark.capability("RG-12", "SE-1")
async def test_another_teams_model_is_the_same_404_as_one_that_does_not_exist(tmp_path):
    async with Runtime() as runtime, a_tenanted_gateway(runtime, write_tenants(tmp_path)) as gateway:
        answers = {}
        for name in ("forecast", "sales/forecast", "nonsense", "team/chat"):
            with pytest.raises(openai.NotFoundError) as refusal:
                await ask(gateway, model=name)
            answers[name] = refusal.value.response.text.replace(name, "NAME")

        assert len(set(answers.values())) == 1
        assert [model.id for model in (await a_client(gateway).models.list()).data] == ["chat"]
        assert [model.id for model in (await a_client(gateway, OTHER).models.list()).data] == ["forecast"]
        with pytest.raises(openai.NotFoundError):
            await a_client(gateway).models.retrieve("forecast")
        assert (await ask(gateway, OTHER, "sales/forecast")).choices[0].message.content
        page = gateway.metrics.exposition().decode()

    assert runtime.requests == 1
    refused = [line for line in page.splitlines() if 'code="404"' in line]
    assert refused
    assert not any("forecast" in line for line in refused)


@pytest.mark.capability("SE-8", "MT-1")
async def test_no_prompt_of_a_team_goes_to_another_that_claims_its_full_names(tmp_path):
    """review/control-plane.md 1: `servedName: team/legal` of team-b captured the prompts for team's adapter."""
    files = write_tenants(tmp_path, models=["team/*"])
    async with Runtime() as ours, Runtime() as theirs, a_tenanted_gateway(ours, files) as gateway:
        table = gateway.fleet.table
        own = next(one for one in table.endpoints.values() if one.service == "team/chat")
        gateway.fleet.set_endpoint(own.name, replace(own, adapters=frozenset({"legal"})))
        gateway.fleet.set_adapter("team/legal", Adapter("team/legal", "legal", "team/chat"))
        for number, name in enumerate(("team/legal", "team/chat")):
            key = f"team-b/x{number}"
            gateway.fleet.set_service(key, Service(key, name, created=datetime(2020, 1, 1, tzinfo=UTC)))
            gateway.fleet.set_endpoint(f"{key}-0", Endpoint(f"{key}-0", key, "r1", theirs.url))
        for name in ("team/legal", "team/chat"):
            await ask(gateway, KEY, name)
        assert (ours.requests, theirs.requests) == (2, 0)

        gateway.fleet.set_adapter("team/legal", None)  # GitOps deletes both, and will create them again
        gateway.fleet.set_service("team/chat", None)
        for name in ("team/legal", "team/chat"):
            with pytest.raises(openai.NotFoundError):
                await ask(gateway, KEY, name)
        assert (await a_client(gateway).models.list()).data == []

    assert theirs.requests == 0


@pytest.mark.capability("MT-1", "SE-8")
async def test_lists_of_models_count_as_requests_of_their_tenant(tmp_path):
    """review/control-plane.md 9: a list had no limit, so one tenant could stall all others."""
    async with (
        Runtime() as runtime,
        a_tenanted_gateway(runtime, write_tenants(tmp_path, requestsPerMinute=3)) as gateway,
    ):
        client = a_client(gateway)
        for _ in range(2):
            await client.models.list()
        await client.models.retrieve("chat")
        for call in (client.models.list(), client.models.retrieve("chat"), ask(gateway)):
            with pytest.raises(openai.RateLimitError) as refusal:
                await call
            assert int(refusal.value.response.headers["retry-after"]) > 0
        assert len((await a_client(gateway, OTHER).models.list()).data) == 1, "another tenant is not concerned"
        page = gateway.metrics.exposition().decode()

    assert 'slipway_gateway_tenant_denied_total{limit="requests",tenant="research"} 3.0' in page
    assert runtime.requests == 0


@pytest.mark.capability("RG-12", "MT-1")
async def test_one_name_means_each_tenants_own_service(tmp_path):
    """The service of another team is older and has the name: it neither answers nor stands in the way."""
    files = write_tenants(tmp_path, models=["team/*"])
    async with Runtime() as ours, Runtime() as theirs, a_tenanted_gateway(ours, files) as gateway:
        gateway.fleet.set_service("sales/chat", Service("sales/chat", "chat", created=datetime(2020, 1, 1, tzinfo=UTC)))
        gateway.fleet.set_endpoint("sales/p0", Endpoint("sales/p0", "sales/chat", "r1", theirs.url))
        gateway.fleet.set_service("team/chat", Service("team/chat", "chat", created=datetime(2026, 1, 1, tzinfo=UTC)))

        await ask(gateway, KEY, "chat")
        assert (ours.requests, theirs.requests) == (1, 0)
        await ask(gateway, OTHER, "chat")
        assert (ours.requests, theirs.requests) == (1, 1)
        with pytest.raises(openai.NotFoundError):
            await ask(gateway, KEY, "sales/chat")
        assert [model.id for model in (await a_client(gateway).models.list()).data] == ["chat"]
        assert (await a_client(gateway, OTHER).models.retrieve("chat")).id == "chat"


@pytest.mark.capability("SE-1")
async def test_a_key_that_is_rotated_while_the_gateway_runs_is_valid_on_the_next_request(tmp_path):
    files = write_tenants(tmp_path)
    async with Runtime() as runtime, a_tenanted_gateway(runtime, files) as gateway:
        assert await ask(gateway)
        (files["keys_directory"] / "laptops").write_text(digest_of("sk-next") + "\n")

        async def status(key: str) -> int:
            try:
                await ask(gateway, key)
            except openai.APIStatusError as refusal:
                return refusal.status_code
            return 200

        while await status("sk-next") != 200:  # noqa: ASYNC110  the files are looked at once a second
            await asyncio.sleep(0.1)
        assert await status(KEY) == 401


@pytest.mark.capability("MT-1")
async def test_the_replica_is_told_tenant_and_priority_whatever_the_client_says(tmp_path):
    async with (
        Runtime() as runtime,
        a_tenanted_gateway(runtime, write_tenants(tmp_path, priority=7)) as gateway,
        aiohttp.ClientSession() as session,
        session.post(
            f"http://127.0.0.1:{gateway.port}/v1/chat/completions",
            json={"model": "chat", "messages": []},
            headers={"Authorization": f"Bearer {KEY}", "x-slipway-tenant": "sales", "x-slipway-priority": "99"},
        ) as response,
    ):
        assert response.status == 200

    (headers,) = runtime.headers
    assert (headers["x-slipway-tenant"], headers["x-slipway-priority"]) == ("research", "7")
    assert "authorization" not in headers


async def test_an_open_gateway_tells_the_replica_of_no_tenant():
    async with Runtime() as runtime, a_gateway(runtime) as gateway:
        await ask(gateway, "anything", "tiny")

    assert "x-slipway-tenant" not in runtime.headers[0]
    assert "x-slipway-priority" not in runtime.headers[0]


@pytest.mark.capability("RG-6", "MT-1")
async def test_requests_beyond_the_rate_are_429_with_the_time_to_come_back_and_never_reach_the_replica(tmp_path):
    async with (
        Runtime() as runtime,
        a_tenanted_gateway(runtime, write_tenants(tmp_path, requestsPerMinute=3)) as gateway,
    ):
        for _ in range(3):
            await ask(gateway)
        with pytest.raises(openai.RateLimitError) as refusal:
            await ask(gateway)
        await ask(gateway, OTHER, "sales/forecast")
        page = gateway.metrics.exposition().decode()

    headers = refusal.value.response.headers
    assert 1 <= int(headers["retry-after"]) <= 61
    assert headers["retry-after-ms"] == headers["retry-after"] + "000"
    assert "the limit is 3 requests a minute" in refusal.value.message
    assert runtime.requests == 4
    assert 'slipway_gateway_tenant_denied_total{limit="requests",tenant="research"} 1.0' in page


@pytest.mark.capability("RG-6", "MT-1")
async def test_requests_beyond_the_concurrency_are_429_until_one_has_ended(tmp_path):
    files = write_tenants(tmp_path, concurrency=1)
    async with Runtime().hold() as runtime, a_tenanted_gateway(runtime, files) as gateway:
        first = asyncio.create_task(ask(gateway))
        while not runtime.requests:  # noqa: ASYNC110  what is waited for happens inside sockets and has no event
            await asyncio.sleep(0.005)
        with pytest.raises(openai.RateLimitError):
            await ask(gateway)
        runtime.allow(100)
        await first
        assert await ask(gateway)


@pytest.mark.capability("RG-6")
async def test_gateways_divide_a_limit(tmp_path):
    files = write_tenants(tmp_path, requestsPerMinute=4)
    async with Runtime() as runtime, a_tenanted_gateway(runtime, files, gateways=2) as gateway:
        await ask(gateway)
        await ask(gateway)
        with pytest.raises(openai.RateLimitError, match="the limit is 4 requests a minute") as refusal:
            await ask(gateway)
        # review/shipping.md 34: the message showed internals, and the headers that OpenAI's clients read were missing.
        headers = refusal.value.response.headers
        assert "gateway" not in refusal.value.message
        assert headers["x-ratelimit-limit-requests"] == "4"
        assert headers["x-ratelimit-remaining-requests"] == "0"
        assert headers["x-ratelimit-reset-requests"] == f"{headers['Retry-After']}s"


@pytest.mark.capability("RG-6")
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_says_what_is_left_of_the_limits(tmp_path, stream):
    files = write_tenants(tmp_path, requestsPerMinute=10, tokensPerMinute=100_000)
    async with Runtime() as runtime, a_tenanted_gateway(runtime, files, gateways=2) as gateway:
        create = a_client(gateway).chat.completions.with_raw_response.create
        messages = [{"role": "user", "content": PROMPT}]
        answers = [await create(model="chat", messages=messages, stream=stream) for _ in range(2)]

    for left, answer in zip((4, 3), answers, strict=True):
        assert answer.headers["x-ratelimit-limit-requests"] == "10"
        assert answer.headers["x-ratelimit-remaining-requests"] == str(left), "of this gateway's half"
        assert 0 < int(answer.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 61
        assert answer.headers["x-ratelimit-limit-tokens"] == "100000"
        assert 0 < int(answer.headers["x-ratelimit-remaining-tokens"]) < 50_000


async def test_an_answer_to_a_tenant_without_limits_says_nothing_of_them(tmp_path):
    async with Runtime() as runtime, a_tenanted_gateway(runtime, write_tenants(tmp_path)) as gateway:
        messages = [{"role": "user", "content": PROMPT}]
        answer = await a_client(gateway).chat.completions.with_raw_response.create(model="chat", messages=messages)

    assert not [name for name in answer.headers if name.startswith("x-ratelimit-")]


@pytest.mark.capability("API-8", "MT-1")
async def test_max_tokens_has_a_cap_and_a_default(tmp_path):
    files = write_tenants(tmp_path, maxTokens=100, defaultMaxTokens=20)
    async with Runtime() as runtime, a_tenanted_gateway(runtime, files) as gateway:
        with pytest.raises(openai.BadRequestError, match="at most 100") as refusal:
            await ask(gateway, max_tokens=101)
        with pytest.raises(openai.BadRequestError):
            await ask(gateway, max_completion_tokens=5000)
        await ask(gateway, max_tokens=100)
        await ask(gateway, max_completion_tokens=99)
        await ask(gateway, temperature=0.5)
        await a_client(gateway).completions.create(model="chat", prompt="Once")

    assert refusal.value.param == "max_tokens"
    asked = [(body.get("max_tokens"), body.get("max_completion_tokens")) for body in runtime.bodies]
    assert asked == [(100, None), (None, 99), (20, None), (20, None)]
    assert runtime.bodies[2]["temperature"] == 0.5
    assert runtime.bodies[2]["messages"][0]["content"] == PROMPT


@pytest.mark.capability("API-8")
async def test_an_open_gateway_can_have_a_cap_too():
    async with Runtime() as runtime, a_gateway(runtime, max_tokens=50) as gateway:
        with pytest.raises(openai.BadRequestError):
            await ask(gateway, model="tiny", max_tokens=51)
        await ask(gateway, model="tiny")

    assert [body["max_tokens"] for body in runtime.bodies] == [50]


async def test_a_tenants_body_cap_is_413_before_the_gateways(tmp_path):
    async with Runtime() as runtime, a_tenanted_gateway(runtime, write_tenants(tmp_path, maxBodyBytes=500)) as gateway:
        with pytest.raises(openai.APIStatusError) as refusal:
            await ask(gateway, user="x" * 600)

    assert refusal.value.status_code == 413
    assert "500 bytes" in refusal.value.message


@pytest.mark.capability("CO-2")
async def test_tokens_are_counted_by_tenant_model_and_kind(tmp_path):
    async def with_cache(runtime: Runtime, request):
        from aiohttp import web

        usage = {"prompt_tokens": 70, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 48}}
        choice = {"index": 0, "message": {"role": "assistant", "content": "Yes."}, "finish_reason": "stop"}
        body = {"id": "1", "object": "chat.completion", "created": 1, "model": "chat", "choices": [choice]}
        return web.json_response(body | {"usage": usage}, headers={"x-slipway-adapter": "law"})

    async with (
        Runtime(with_cache) as runtime,
        a_tenanted_gateway(runtime, write_tenants(tmp_path, requestsPerMinute=2)) as gateway,
    ):
        for _ in range(2):
            await ask(gateway)
        with pytest.raises(openai.RateLimitError):
            await ask(gateway, max_tokens=64)
        page = gateway.metrics.exposition().decode()

    counted = {
        json.dumps(line.rsplit(" ", 1)[0]): float(line.rsplit(" ", 1)[1])
        for line in page.splitlines()
        if line.startswith("slipway_gateway_tokens_total{")
    }
    by_kind = {kind: sum(value for name, value in counted.items() if f'kind=\\"{kind}\\"' in name) for kind in (
        "input", "cached", "output", "rejected")}  # fmt: skip
    assert (by_kind["input"], by_kind["cached"], by_kind["output"]) == (140, 96, 10)
    assert by_kind["rejected"] >= 64
    assert all('tenant=\\"research\\"' in name for name in counted)
    # A request beyond the rate is refused before its body says which model it is for.
    assert all(('model=\\"chat\\"' in name) == ('kind=\\"rejected\\"' not in name) for name in counted)
    assert sum('adapter=\\"law\\"' in name for name in counted) == 3


@pytest.mark.capability("CO-2")
async def test_a_stream_without_usage_is_estimated_and_one_with_usage_is_exact(tmp_path):
    async with Runtime() as runtime, a_tenanted_gateway(runtime, write_tenants(tmp_path)) as gateway:
        with capture_logs() as logs:
            stream = await ask(gateway, stream=True)
            words = [part async for part in stream if part.choices and part.choices[0].delta.content]

    (audit,) = [entry for entry in logs if entry["event"] == "audit"]
    assert (audit["input_tokens"], audit["output_tokens"], audit["estimated"]) == (7, len(words), False)


@pytest.mark.capability("CO-2")
async def test_a_broken_off_stream_counts_what_was_delivered(tmp_path):
    async def three_words(runtime: Runtime, request):
        from tests.gateway.doubles import begin_stream, chunk

        response = await begin_stream(request)
        for word in ("a", "b", "c"):
            await response.write(event(chunk(word)))
        return response

    async with Runtime(three_words) as runtime, a_tenanted_gateway(runtime, write_tenants(tmp_path)) as gateway:
        with capture_logs() as logs:
            async with (
                aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as session,
                session.post(
                    f"http://127.0.0.1:{gateway.port}/v1/chat/completions",
                    json={"model": "chat", "messages": [], "stream": True},
                ) as response,
            ):
                assert "error" in (await events_of(response))[-1]

    (audit,) = [entry for entry in logs if entry["event"] == "audit"]
    assert audit["estimated"]
    assert 1 <= audit["output_tokens"] <= 3


@pytest.mark.capability("SE-1", "OB-7")
async def test_neither_keys_nor_prompts_are_in_logs_or_metrics(tmp_path):
    async with Runtime() as runtime, a_tenanted_gateway(runtime, write_tenants(tmp_path)) as gateway:
        with capture_logs() as logs:
            await ask(gateway)
            for key in ("sk-mistyped-secret", ORPHAN):
                with pytest.raises(openai.APIStatusError):
                    await ask(gateway, key)
        page = gateway.metrics.exposition().decode()

    written = json.dumps(logs, default=str) + page
    assert not any(secret in written for secret in (KEY, ORPHAN, "sk-mistyped-secret", "Quillington"))
    audits = [entry for entry in logs if entry["event"] == "audit"]
    assert [(entry["tenant"], entry["key"], entry["status"]) for entry in audits] == [
        ("research", "laptops", 200),
        ("", "", 401),
        ("", "", 403),
    ]
    assert len(audits[0]["body_sha256"]) == 64
    requests = [entry for entry in logs if entry["event"] == "request"]
    assert [entry["tenant"] for entry in requests] == ["research", "", ""]


@pytest.mark.capability("SE-1")
async def test_a_gateway_whose_tenants_cannot_be_read_lets_nobody_in_and_is_not_ready(tmp_path):
    files = write_tenants(tmp_path)
    good = files["tenants_file"].read_text()
    files["tenants_file"].write_text("tenants: nonsense")
    async with (
        Runtime() as runtime,
        a_tenanted_gateway(runtime, files) as gateway,
        aiohttp.ClientSession() as session,
    ):
        with pytest.raises(openai.InternalServerError) as refusal:
            await ask(gateway)
        async with session.get(f"http://127.0.0.1:{gateway.admin_port}/ready") as response:
            ready = response.status, (await response.json())["reason"]
        page = gateway.metrics.exposition().decode()
        files["tenants_file"].write_text(good)
        await asyncio.sleep(1.1)  # the files are looked at once a second
        assert await ask(gateway)

    assert refusal.value.status_code == 503
    assert ready == (503, "TenantsInvalid")
    assert "slipway_gateway_tenants_valid 0.0" in page
    assert runtime.requests == 1


async def test_series_of_tenants_that_are_gone_are_removed(tmp_path):
    files = write_tenants(tmp_path)
    async with Runtime() as runtime, a_tenanted_gateway(runtime, files) as gateway:
        await ask(gateway)
        assert 'tenant="research"' in gateway.metrics.exposition().decode()
        tenants = [{"name": "sales", "keys": ["crm"], "models": ["*"]}]
        files["tenants_file"].write_text(yaml.safe_dump({"tenants": tenants}))
        await asyncio.sleep(1.1)  # the files are looked at once a second

        assert 'tenant="research"' not in gateway.metrics.exposition().decode()


async def test_what_a_full_replica_refused_costs_the_tenant_no_tokens(tmp_path):
    files = write_tenants(tmp_path, tokensPerMinute=1000)
    async with Runtime(be_full) as runtime, a_tenanted_gateway(runtime, files) as gateway:
        for _ in range(4):
            with pytest.raises(openai.RateLimitError, match="queue is full"):
                await ask(gateway, max_tokens=400)

    assert runtime.requests == 4


@pytest.mark.parametrize("given", [{"tenants_file": "/a"}, {"keys_directory": "/b"}])
def test_tenants_and_keys_are_configured_together(given):
    with pytest.raises(ValueError, match="belong together"):
        GatewaySettings(**given)
