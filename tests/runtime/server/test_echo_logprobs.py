"""An echoed prompt has its logprobs at the right offsets, once in each answer, whole and streamed."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from slipway_runtime.server import sampling
from tests.runtime.server.serving import Running, a_replica

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.capability("API-11")]

ASK: dict[str, Any] = {"prompt": "Once upon", "echo": True, "logprobs": 1, "temperature": 0}
OFFSETS = [0, 0, 4]  # <|bos|> is not in the text; Once, upon (review/api-users.md 16)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica() -> AsyncIterator[Running]:
    async with a_replica() as running:
        yield running


async def whole(replica: Running, **fields: Any) -> list[dict[str, Any]]:
    response = await replica.post("/v1/completions", ASK | fields)
    assert response.status_code == 200, response.text
    return list(response.json()["choices"])


async def streamed(replica: Running, headers: dict[str, str] | None = None, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a stream, each put together from its pieces."""
    body = ASK | fields | {"stream": True}
    choices: dict[int, dict[str, Any]] = {}
    async with replica.http.stream("POST", f"{replica.url}/v1/completions", json=body, headers=headers) as stream:
        events = [json.loads(line[6:]) async for line in stream.aiter_lines() if line.startswith("data: {")]
    for piece in (choice for event in events for choice in event["choices"]):
        choice = choices.setdefault(piece["index"], {"text": "", "logprobs": {}})
        choice["text"] += piece["text"]
        for name, values in (piece["logprobs"] or {}).items():
            choice["logprobs"].setdefault(name, []).extend(values)
    return [choices[index] for index in sorted(choices)]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("ask", [whole, streamed])
async def test_a_scored_prompt_begins_at_the_beginning(replica: Running, ask: Any, n: int):
    choices = await ask(replica, max_tokens=0, n=n)

    assert len(choices) == n
    for choice in choices:
        logprobs = choice["logprobs"]
        assert choice["text"] == "Once upon"
        assert logprobs["text_offset"] == OFFSETS
        assert logprobs["token_logprobs"][0] is None
        assert all(logprob <= 0 for logprob in logprobs["token_logprobs"][1:])
        assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == 3


@pytest.mark.parametrize("ask", [whole, streamed])
async def test_each_of_several_answers_has_the_logprobs_of_its_echo(replica: Running, ask: Any):
    prompts = ["Once upon", "The sea"]
    first, second, third, fourth = await ask(replica, prompt=prompts, max_tokens=2, n=2, ignore_eos=True)

    for one, other, prompt in ((first, second, "Once upon"), (third, fourth, "The sea")):
        assert one["text"].startswith(prompt)
        assert one["logprobs"]["tokens"] == other["logprobs"]["tokens"], "greedy answers are the same"
        assert one["logprobs"]["text_offset"] == other["logprobs"]["text_offset"]
        assert len(other["logprobs"]["tokens"]) == len(other["logprobs"]["token_logprobs"]) == 5
    assert second["logprobs"]["text_offset"][:3] == OFFSETS


async def test_prompt_logprobs_stand_in_each_answer(replica: Running):
    first, second = await whole(replica, prompt_logprobs=1, n=2, max_tokens=1)
    messages = [{"role": "user", "content": "Hello!"}]
    chat = await replica.post("/v1/chat/completions", {"messages": messages, "n": 2, "prompt_logprobs": 0})

    assert second["prompt_logprobs"] == first["prompt_logprobs"] != []
    assert len(chat.json()["prompt_logprobs"]) == chat.json()["usage"]["prompt_tokens"]


async def test_an_answer_that_began_elsewhere_goes_on_at_its_offset(replica: Running):
    [undisturbed] = await streamed(replica, max_tokens=4, ignore_eos=True)
    ids = [choice["token_ids"] for choice in await whole(replica, max_tokens=4, ignore_eos=True, return_token_ids=True)]

    resume = {"slipway_resume": {"answers": [{"output_token_ids": ids[0][:2]}]}}
    [rest] = await streamed(replica, {"x-slipway-token-ids": "resume"}, max_tokens=4, ignore_eos=True, **resume)

    assert rest["logprobs"]["text_offset"] == undisturbed["logprobs"]["text_offset"][-2:]


async def test_an_answer_that_had_not_begun_elsewhere_has_the_logprobs_of_its_echo(replica: Running):
    ask = {"max_tokens": 4, "n": 2, "ignore_eos": True}
    undisturbed = await streamed(replica, **ask)
    ids = (await whole(replica, **ask, return_token_ids=True))[0]["token_ids"]

    resume = {"slipway_resume": {"answers": [{"output_token_ids": ids[:2]}, {"output_token_ids": []}]}}
    begun, new = await streamed(replica, {"x-slipway-token-ids": "resume"}, **ask, **resume)

    assert begun["logprobs"]["text_offset"] == undisturbed[0]["logprobs"]["text_offset"][-2:]
    assert new["logprobs"]["text_offset"] == undisturbed[1]["logprobs"]["text_offset"]


@pytest.mark.capability("SE-2")
async def test_logprobs_of_a_prompt_count_with_each_answer_that_has_them(
    replica: Running, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sampling, "MOST_LOGPROBS", 100)
    ask = {"prompt": [5] * 20, "max_tokens": 1, "echo": False, "logprobs": None, "prompt_logprobs": 1}

    assert len(await whole(replica, **ask, n=2)) == 2
    refused = await replica.post("/v1/completions", ASK | ask | {"n": 3})

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt_logprobs"
