"""HTTP itself: content encodings, methods, paths, and the headers and lists that each API's clients read."""

import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
import pytest_asyncio

from tests.runtime.server.serving import Running, a_replica

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}).encode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica() -> AsyncIterator[Running]:
    async with a_replica() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def claude(replica: Running) -> AsyncIterator[anthropic.AsyncAnthropic]:
    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    async with anthropic.AsyncAnthropic(
        base_url=replica.url, api_key="none", max_retries=0, http_client=http
    ) as client:
        yield client


@pytest.mark.capability("API-8")
@pytest.mark.parametrize(
    ("encoding", "content"), [("gzip", gzip.compress(BODY)), ("br", BODY), ("zstd", BODY)], ids=["gzip", "br", "zstd"]
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_compressed_body_is_a_415_that_names_the_encoding(
    replica: Running, path: str, encoding: str, content: bytes
):
    headers = {"content-type": "application/json", "content-encoding": encoding}
    refused = await replica.http.post(replica.url + path, content=content, headers=headers)
    plain = await replica.http.post(
        replica.url + path, content=BODY, headers=headers | {"content-encoding": "identity"}
    )

    assert refused.status_code == 415
    assert f"the content encoding {encoding} is not supported" in refused.json()["error"]["message"]
    assert plain.status_code == 200, plain.text


@pytest.mark.capability("API-8")
async def test_a_path_with_a_slash_at_its_end_is_a_404_and_no_redirect(replica: Running):
    for path in ("/v1/chat/completions/", "/v1/models//", "/health/"):
        answer = await replica.http.get(replica.url + path, headers={"host": "elsewhere.example"})
        assert answer.status_code == 404, path
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    posted = await replica.http.post(f"{replica.url}/v1/chat/completions/", content=BODY)
    assert posted.status_code == 404
    assert "location" not in posted.headers


@pytest.mark.capability("API-1")
@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny", "/health", "/version", "/load"])
async def test_a_head_has_the_status_of_a_get_and_no_body(replica: Running, path: str):
    head, get = [await replica.http.request(method, replica.url + path) for method in ("HEAD", "GET")]

    assert head.status_code == get.status_code == 200
    assert head.headers["content-type"] == get.headers["content-type"]
    assert head.content == b""
    assert (await replica.http.head(f"{replica.admin_url}/ready")).status_code == 200
    assert (await replica.http.head(f"{replica.url}/v1/models/other")).status_code == 404


@pytest.mark.capability("API-18")
async def test_an_error_of_the_messages_api_has_the_id_of_its_request(replica: Running, claude: Any):
    with pytest.raises(anthropic.BadRequestError) as refusal:
        await claude.messages.create(model="tiny", messages=[], max_tokens=1, extra_headers={"x-request-id": "r-1"})
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await claude.messages.create(model="other", messages=[{"role": "user", "content": "Hi"}], max_tokens=1)
    answer = await claude.messages.create(model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=1)

    assert refusal.value.request_id == refusal.value.body["request_id"] == "r-1"
    assert unknown.value.request_id == unknown.value.body["request_id"]
    assert answer._request_id
    wrong_method = await replica.http.get(f"{replica.url}/v1/messages")
    assert wrong_method.json()["request_id"] == wrong_method.headers["request-id"]


@pytest.mark.capability("API-18")
async def test_the_models_are_listed_in_the_shape_of_the_client_that_asks(
    replica: Running, claude: anthropic.AsyncAnthropic
):
    listed = [model async for model in claude.models.list()]
    found = await claude.models.retrieve("tiny")

    assert [(model.id, model.type, model.display_name) for model in listed] == [("tiny", "model", "tiny")]
    assert (found.id, found.display_name, found.created_at.year) == ("tiny", "tiny", 1970)
    assert [model.object async for model in replica.openai.models.list()] == ["model"]
