"""An upstream that speaks as vLLM's server does, of which the gateway knows nothing else: no header or path of ours."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest
from aiohttp import web

from slipway_api.names import PATH_TEXT_BLOCKS
from slipway_gateway.first_token_times import LEAST_SAMPLES
from slipway_gateway.fleet import Fleet
from slipway_gateway.gateway import Gateway
from slipway_gateway.load_reports import LOAD_HEADER
from slipway_gateway.picker.endpoints import Endpoint, Service
from slipway_gateway.settings import GatewaySettings
from tests.gateway.doubles import Runtime, until

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
MESSAGES = [{"role": "user", "content": "Tell me a story of a bear and a fox. " * 20}]
WORDS = ["Once", " upon", " a", " time", "."]
USAGE = {"prompt_tokens": 21, "total_tokens": 26, "completion_tokens": 5, "prompt_tokens_details": None}
DEAD = {
    "error": {
        "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
}
LOAD = "TEXT named_metrics.kv_cache_usage_perc=0.5, named_metrics.num_requests_waiting=2"


class Vllm(Runtime):
    """vLLM's `/v1/chat/completions`: its chunks, its errors, its headers; every other path is FastAPI's 404."""

    def __init__(self, *, words_until_it_dies: int = 100, reports: bool = False) -> None:
        """`reports`: its computing process dies and its server reports that, as recorded from vLLM 0.32.0."""
        super().__init__(self._complete, words=WORDS)
        self.lives = words_until_it_dies
        self.reports = reports
        self.missing: list[str] = []

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path != "/v1/chat/completions":
            self.missing.append(request.path)
            return web.json_response({"detail": "Not Found"}, status=404)
        return await super()._answer(request)

    async def _complete(self, runtime: Runtime, request: web.Request) -> web.StreamResponse:
        body = self.bodies[-1]
        if body["model"] != MODEL:
            error = {"message": f"The model `{body['model']}` does not exist.", "type": "NotFoundError"}
            return web.json_response({"error": error | {"param": "model", "code": 404}}, status=404)
        await self.allowed.acquire()
        headers = {LOAD_HEADER: LOAD, "server": "uvicorn"}
        if self.reports and not body.get("stream"):
            return web.json_response(DEAD, status=500, headers=headers)
        if not body.get("stream"):
            message = {"role": "assistant", "content": "".join(WORDS), "refusal": None, "tool_calls": []}
            choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
            whole = {"id": "chatcmpl-v", "object": "chat.completion", "created": 1, "model": MODEL}
            return web.json_response(whole | {"choices": [choice], "usage": USAGE}, headers=headers)
        response = web.StreamResponse(headers=headers | {"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await self._send(response, {"role": "assistant", "content": ""})
        for number, word in enumerate(WORDS):
            if number == self.lives and self.reports:
                await response.write(b"data: " + json.dumps(DEAD).encode() + b"\n\ndata: [DONE]\n\n")
                return response
            if number == self.lives:
                assert request.transport is not None
                request.transport.abort()
                return response
            await self._send(response, {"content": word})
        await self._send(response, {"content": ""}, finish_reason="stop", stop_reason=None)
        if (body.get("stream_options") or {}).get("include_usage"):
            await self._send(response, None, usage=USAGE)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _send(self, response: web.StreamResponse, delta: dict | None, **more: object) -> None:
        usage = {"usage": more.pop("usage")} if "usage" in more else {}
        choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} | more] if delta else []
        chunk = {"id": "chatcmpl-v", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
        await response.write(b"data: " + json.dumps(chunk | {"choices": choices} | usage).encode() + b"\n\n")


@asynccontextmanager
async def a_gateway_before(*servers: Vllm) -> AsyncIterator[tuple[Gateway, openai.AsyncOpenAI]]:
    """Everything that asks more of a replica is on: KV events, hedging, handover."""
    fleet = Fleet()
    fleet.set_service("ns/chat", Service("ns/chat", "chat", hedged_prompt_tokens=1024))
    for number, server in enumerate(servers):
        name = f"ns/chat-{number}"
        fleet.set_endpoint(name, Endpoint(name, "ns/chat", "r1", server.url, served_name=MODEL))
    settings = GatewaySettings(host="127.0.0.1", port=0, admin_port=0, propagation_seconds=0, kv_events=True)
    async with Gateway(settings, fleet) as gateway:
        url = f"http://127.0.0.1:{gateway.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield gateway, client


@pytest.mark.capability("API-1", "API-9", "RG-3")
async def test_the_stock_client_is_answered_whole_and_streamed():
    async with Vllm() as server, a_gateway_before(server) as (gateway, client):
        raw = await client.chat.completions.with_raw_response.create(model="chat", messages=MESSAGES)
        whole = raw.parse()
        stream = await client.chat.completions.create(
            model="chat", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        parts = [part async for part in stream]

        assert gateway.fleet.waiting("ns/chat") == [2], "what it reports of its load is used"
    assert whole.choices[0].message.content == "".join(WORDS)
    assert (raw.headers["x-slipway-model"], raw.headers["x-slipway-revision"]) == (MODEL, "r1")
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == "".join(WORDS)
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == 5
    assert [body["model"] for body in server.bodies] == [MODEL, MODEL], "it hears its own name"
    assert set(server.missing) == {PATH_TEXT_BLOCKS}


@pytest.mark.capability("RD-4")
async def test_a_stream_that_it_breaks_off_ends_with_an_error_and_is_not_continued_by_another():
    async with (
        Vllm(words_until_it_dies=2) as one,
        Vllm(words_until_it_dies=2) as two,
        a_gateway_before(one, two) as (_, client),
    ):
        stream = await client.chat.completions.create(model="chat", messages=MESSAGES, stream=True)
        parts = []
        with pytest.raises(openai.APIError, match="broke off"):
            await _read(stream, parts)

    assert "".join(part.choices[0].delta.content or "" for part in parts) == "Once upon"
    assert one.requests + two.requests == 1


@pytest.mark.capability("RD-4", "EV-1")
async def test_an_error_that_it_reports_within_a_stream_counts_against_its_revision():
    """vLLM ends such a stream with [DONE]; a canary whose engine dies must not count as healthy."""
    async with Vllm(words_until_it_dies=2, reports=True) as server, a_gateway_before(server) as (gateway, client):
        stream = await client.chat.completions.create(model="chat", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="EngineCore encountered an issue"):
            await _read(stream, [])
        await until(lambda: gateway.requests.outcomes.report().revisions)
        (found,) = gateway.requests.outcomes.report().revisions

    assert (found.requests, found.errors) == (1, 1)


@pytest.mark.capability("RG-3")
async def test_a_whole_answer_of_a_dead_engine_is_made_by_another_replica():
    async with Vllm(reports=True) as dead, Vllm() as well, a_gateway_before(dead, well) as (_, client):
        answers = [await client.chat.completions.create(model="chat", messages=MESSAGES) for _ in range(4)]

    assert {answer.choices[0].message.content for answer in answers} == {"".join(WORDS)}
    assert dead.requests > 0, "it was asked, and another one has answered"


@pytest.mark.capability("RG-5")
async def test_a_late_first_token_is_hedged_and_the_loser_is_cancelled():
    async with Vllm() as one, Vllm() as two, a_gateway_before(one, two) as (gateway, client):
        times = gateway.fleet.destination("ns/chat").first_token_times
        for _ in range(LEAST_SAMPLES):
            times.record(0.0)
        one.hold()
        two.hold()

        async def ask() -> str:
            stream = await client.chat.completions.create(model="chat", messages=MESSAGES, stream=True)
            return "".join([part.choices[0].delta.content or "" async for part in stream])

        asking = asyncio.create_task(ask())
        await until(lambda: one.requests and two.requests)
        two.allow(100)
        assert await asking == "".join(WORDS)
        await asyncio.wait_for(one.cancelled.wait(), 5)


async def _read(stream: openai.AsyncStream, parts: list) -> None:
    async for part in stream:
        parts.append(part)
