"""Requests: what is refused and how, what is forwarded, and what the access log and the metrics say of it."""

import json
from datetime import UTC, datetime

import openai
import pytest
from structlog.testing import capture_logs

from slipway_api.names import HEADER_DEADLINE, INTERNAL_HEADERS
from slipway_gateway.fleet import Fleet
from slipway_gateway.picker.endpoints import Endpoint, Service
from tests.gateway.doubles import MODEL, Caller, Runtime, a_caller, a_gateway, be_full, die_after_two_words, events_of


async def post(caller: Caller, data: bytes, **headers: str) -> tuple[int, dict]:
    async with caller.session.post(
        f"{caller.url}/v1/chat/completions", data=data, headers={"Content-Type": "application/json"} | headers
    ) as response:
        return response.status, (await response.json())["error"]


async def test_an_unknown_model_is_404_and_names_no_other():
    async with (
        Runtime() as runtime,
        a_gateway(runtime) as gateway,
        a_caller(gateway) as caller,
        caller.chat(model="secret-project") as response,
    ):
        error = (await response.json())["error"]

        assert response.status == 404
        assert error["type"] == "NotFoundError"
        assert error["param"] == "model"
        assert "secret-project" in error["message"]
        assert MODEL not in json.dumps(error)


async def test_the_stock_client_raises_not_found_for_an_unknown_model():
    async with Runtime() as runtime, a_gateway(runtime) as gateway:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="none")
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nobody", messages=[])


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"text"', b"{}", b'{"model": 7}', b'{"model": ""}', b"\xff\xfe", b"[" * 100_000]
)
async def test_a_body_without_a_model_is_400_in_openais_shape(body):
    async with Runtime() as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        status, error = await post(caller, body)

        assert status == 400
        assert set(error) == {"message", "type", "param", "code"}
        assert runtime.requests == 0


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_beyond_the_limit_is_413(declared):
    async def pieces():
        for _ in range(20):
            yield b" " * 1000

    async with Runtime() as runtime, a_gateway(runtime, max_body_bytes=10_000) as gateway, a_caller(gateway) as caller:
        data = b" " * 20_000 if declared else pieces()
        async with caller.session.post(f"{caller.url}/v1/chat/completions", data=data) as response:
            assert response.status == 413
            assert (await response.json())["error"]["type"] == "RequestTooLargeError"


@pytest.mark.capability("BS-4")
async def test_requests_that_together_hold_too_many_bytes_are_429_with_a_time_to_come_back():
    settings = {"max_body_bytes": 10_000, "max_bodies_bytes": 10_000}
    async with Runtime() as runtime, a_gateway(runtime, **settings) as gateway, a_caller(gateway) as caller:
        async with caller.chat(padding="x" * 6000) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
        async with caller.chat(padding="x" * 4000) as response:
            assert response.status == 200, "what was refused is not counted any more"


async def test_paths_outside_the_list_are_404_and_wrong_methods_405():
    async with Runtime() as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        for method, path, status in [
            ("GET", "/v1/chat/completions", 405),
            ("POST", "/v1/models", 405),
            ("POST", "/v1/load_lora_adapter", 404),
            ("POST", "/drain", 404),
            ("GET", "/metrics", 404),
            ("GET", "/", 404),
            ("POST", "/v1/../drain", 404),
            ("POST", "/v1/chat/completions/", 404),
            ("POST", "//v1/chat/completions", 404),
        ]:
            async with caller.session.request(method, caller.url + path) as response:
                assert (method, path, response.status) == (method, path, status)
                assert "message" in (await response.json())["error"]
        assert runtime.requests == 0


async def test_what_only_the_gateway_may_say_is_removed_from_what_clients_say():
    sent = dict.fromkeys(INTERNAL_HEADERS, "forged") | {
        "Authorization": "Bearer sk-secret",
        "Cookie": "session=1",
        "x-slipway-admin-token": "guess",
        "X-Forwarded-For": "10.0.0.1",
    }
    async with Runtime() as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        async with caller.chat(headers=sent):
            pass

        assert {name.lower() for name in sent} & runtime.headers[0].keys() == {HEADER_DEADLINE}
        assert 0 < float(runtime.headers[0][HEADER_DEADLINE]) <= 600


@pytest.mark.capability("API-9")
async def test_an_answer_names_model_and_revision_and_nothing_internal():
    async with Runtime() as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        async with caller.chat() as response:
            assert response.headers["x-slipway-model"] == MODEL
            assert response.headers["x-slipway-revision"] == "r1", "the runtime's word, not ours"
            assert response.headers["x-slipway-tokenizer"] == "t1"
            assert "x-secret" not in response.headers
            assert "Set-Cookie" not in response.headers
            assert response.headers["Server"] == "slipway"
        async with caller.chat(stream=True) as response:
            assert response.headers["x-slipway-revision"] == "static", "where the runtime says none, the pod's label"


async def test_a_sane_request_id_is_kept_and_any_other_replaced():
    async with Runtime() as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        async with caller.chat(headers={"X-Request-Id": "abc-123"}) as response:
            assert response.headers["X-Request-Id"] == "abc-123" == runtime.headers[-1]["x-request-id"]
        for strange in ("a b", "x" * 200, '";DROP'):
            async with caller.chat(headers={"X-Request-Id": strange}) as response:
                assert response.headers["X-Request-Id"].startswith("req-")
                assert response.headers["X-Request-Id"] == runtime.headers[-1]["x-request-id"]


async def test_the_body_arrives_byte_for_byte():
    body = b'{"model": "tiny",  "temperature": 1.10, "seed": 12345678901234567890, "messages": [] }'
    async with Runtime() as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        await caller.session.post(f"{caller.url}/v1/chat/completions", data=body)

        assert runtime.headers[-1]["content-length"] == str(len(body))
        assert runtime.bodies[-1] == json.loads(body)


def two_teams(runtime: Runtime) -> Fleet:
    fleet = Fleet()
    fleet.set_service("a/chat", Service("a/chat", "chat", created=datetime(2026, 1, 1, tzinfo=UTC), weights={"r1": 1}))
    fleet.set_service("b/chat", Service("b/chat", "chat", created=datetime(2026, 2, 1, tzinfo=UTC), weights={"r1": 1}))
    fleet.set_endpoint("b/chat-r1-0-0", Endpoint("b/chat-r1-0-0", "b/chat", "r1", runtime.url))
    return fleet


async def a_gateway_of(fleet: Fleet):
    """A gateway that serves this very fleet."""
    from slipway_gateway.gateway import Gateway
    from slipway_gateway.settings import GatewaySettings

    return Gateway(GatewaySettings(host="127.0.0.1", port=0, admin_port=0, propagation_seconds=0), fleet)


async def test_a_full_name_reaches_a_service_whose_short_name_is_taken_and_the_runtime_hears_its_own_name():
    async with Runtime() as runtime, await a_gateway_of(two_teams(runtime)) as gateway, a_caller(gateway) as caller:
        async with caller.chat(model="b/chat", temperature=0.5) as response:
            assert response.status == 200
        assert runtime.bodies[-1]["model"] == "chat"
        assert runtime.bodies[-1]["temperature"] == 0.5
        async with caller.chat(model="chat") as response:
            assert response.status == 503, "the older service owns the name and has no replica"
            assert int(response.headers["Retry-After"]) > 0


async def test_a_pinned_revision_is_served_refused_when_unknown_and_awaited_when_not_ready():
    async with Runtime() as runtime:
        fleet = two_teams(runtime)
        fleet.set_service("b/chat", Service("b/chat", "chat-b", weights={"r1": 100, "r2": 0}))
        async with await a_gateway_of(fleet) as gateway, a_caller(gateway) as caller:
            for pin, status in [("r1", 200), ("r2", 503), ("r9", 404)]:
                async with caller.chat(model="chat-b", headers={"x-slipway-pin-revision": pin}) as response:
                    assert (pin, response.status) == (pin, status)
            assert runtime.requests == 1


@pytest.mark.capability("API-1")
async def test_models_come_from_the_table_and_the_stock_client_reads_them():
    async with Runtime() as runtime, await a_gateway_of(two_teams(runtime)) as gateway:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="none")
        models = await client.models.list()

        assert [model.id for model in models.data] == ["b/chat", "chat"]
        assert (await client.models.retrieve("chat")).created == 1767225600
        assert runtime.requests == 0, "no replica was called"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")


@pytest.mark.capability("OB-7")
async def test_every_request_leaves_one_line_with_ids_lengths_and_times_and_no_text():
    secret = "the quick brown secret"
    async with (
        Runtime(words=["purple", " answer"]) as runtime,
        a_gateway(runtime) as gateway,
        a_caller(gateway) as caller,
    ):
        with capture_logs() as lines:
            for fields in ({"stream": True}, {}, {"model": secret}, {"max_tokens": secret}):
                async with caller.chat(messages=[{"role": "user", "content": secret}], **fields) as response:
                    await response.read()
            await post(caller, secret.encode())

    requests = [line for line in lines if line["event"] == "request"]
    streamed = requests[0]
    assert len(requests) == 5
    assert streamed["model"] == MODEL
    assert streamed["finish"] == "stop"
    assert (streamed["prompt_tokens"], streamed["output_tokens"]) == (7, 2)
    assert streamed["request_bytes"] > 0 < streamed["response_bytes"]
    assert streamed["total_ms"] >= streamed["first_byte_ms"] > 0
    assert streamed["request_id"].startswith("req-")
    assert "secret" not in str(lines)
    assert "purple" not in str(lines)


async def test_a_broken_stream_is_logged_as_an_error_and_counted():
    async with Runtime(die_after_two_words) as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        with capture_logs() as lines:
            async with caller.chat(stream=True) as response:
                await events_of(response)
        (line,) = [line for line in lines if line["event"] == "request"]

        assert (line["finish"], line["error"]) == ("error", "connection lost")
        assert 'broken_streams_total{model="tiny",revision="static",service="static/tiny"} 1.0' in await metrics_of(
            caller
        )


async def metrics_of(caller: Caller) -> str:
    async with caller.session.get(f"{caller.admin_url}/metrics") as response:
        return await response.text()


async def test_metrics_count_requests_retries_and_endpoints_under_bounded_labels():
    async with (
        Runtime(be_full) as full,
        Runtime() as well,
        a_gateway(full, well) as gateway,
        a_caller(gateway) as caller,
    ):
        for model in (*[MODEL] * 5, "nobody-1", "nobody-2"):
            async with caller.chat(model=model):
                pass
        text = await metrics_of(caller)

    assert 'slipway_gateway_requests_total{code="200",model="tiny",revision="static",service="static/tiny"} 5.0' in text
    assert 'slipway_gateway_requests_total{code="404",model="",revision="",service=""} 2.0' in text
    assert 'slipway_gateway_endpoints_ready{model="tiny",revision="static",service="static/tiny"} 2.0' in text
    assert 'slipway_gateway_retries_total{reason="shed",service="static/tiny"}' in text
    assert "slipway_gateway_open_to_anyone 1.0" in text
    assert "slipway_gateway_open_requests 0.0" in text
    assert "nobody" not in text


async def test_an_open_gateway_says_so():
    with capture_logs() as lines:
        async with (
            Runtime() as runtime,
            a_gateway(runtime) as gateway,
            a_caller(gateway) as caller,
            caller.session.get(f"{caller.admin_url}/ready") as response,
        ):
            ready = await response.json()

    assert ready["ready"] is True
    assert "anyone" in ready["warning"]
    assert any(line["log_level"] == "warning" and "anyone" in line["event"] for line in lines)
