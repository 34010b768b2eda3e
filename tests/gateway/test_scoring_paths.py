"""Scores and reranking through the gateway, to our runtime or to a foreign engine: routed, limited and counted."""

import aiohttp
import pytest
from aiohttp import web

from slipway_api.names import RERANK_PATHS, SCORE_PATHS
from tests.gateway.doubles import Runtime
from tests.gateway.test_tenancy import KEY, a_tenanted_gateway, write_tenants

pytestmark = pytest.mark.capability("API-25")


@pytest.mark.parametrize("path", [*SCORE_PATHS, *RERANK_PATHS])
async def test_each_path_reaches_a_replica_under_its_own_name_and_its_tokens_are_counted(path, tmp_path):
    seen = []

    async def score(runtime: Runtime, request: web.Request) -> web.Response:
        seen.append(request.path)
        usage = {"prompt_tokens": 40, "total_tokens": 40}
        return web.json_response({"id": "1", "results": [{"index": 0, "relevance_score": 0.5}], "usage": usage})

    files = write_tenants(tmp_path, requestsPerMinute=2)
    async with (
        Runtime(score) as runtime,
        a_tenanted_gateway(runtime, files) as gateway,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as session,
    ):
        url = f"http://127.0.0.1:{gateway.port}{path}"
        body = {"model": "chat", "query": "a", "documents": ["b"], "text_1": "a", "text_2": "b"}
        statuses = []
        for _ in range(3):
            async with session.post(url, json=body) as response:
                statuses.append(response.status)
                if response.status == 200:
                    assert (await response.json())["results"] == [{"index": 0, "relevance_score": 0.5}]
        async with session.get(url) as response:
            wrong = response.status
        async with session.post(url, json=body, headers={"Authorization": "Bearer nobody"}) as response:
            unknown = response.status
        page = gateway.metrics.exposition().decode()

    assert (statuses, wrong, unknown) == ([200, 200, 429], 405, 401)
    assert seen == [path, path]
    assert [sent["documents"] for sent in runtime.bodies] == [["b"], ["b"]]
    counted = [line for line in page.splitlines() if line.startswith("slipway_gateway_tokens_total{")]
    inputs = [
        float(line.rsplit(" ", 1)[1]) for line in counted if 'kind="input"' in line and 'tenant="research"' in line
    ]
    assert inputs == [80.0]
