"""The stock `openai` client works against a replica, and gets what it asked for."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from openai import BadRequestError, NotFoundError, OpenAI

from tests.runtime.server.serving import Running, a_replica

pytestmark = pytest.mark.asyncio(loop_scope="module")

POD = [{"role": "user", "content": "What is a pod?"}]
GREEDY = {"model": "tiny", "messages": POD, "temperature": 0, "max_tokens": 60}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica() -> AsyncIterator[Running]:
    async with a_replica() as running:
        yield running


@pytest.mark.capability("API-1")
async def test_a_chat_is_answered_with_readable_text(replica: Running):
    answer = await replica.openai.chat.completions.create(**GREEDY)

    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert "pod" in (answer.choices[0].message.content or "").lower()
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.capability("API-1")
async def test_the_synchronous_client_works_too(replica: Running):
    def ask() -> str:
        with OpenAI(base_url=f"{replica.url}/v1", api_key="none") as client:
            chunks = client.chat.completions.create(**GREEDY, stream=True)
            return "".join(c.choices[0].delta.content or "" for c in chunks)

    whole = await replica.openai.chat.completions.create(**GREEDY)

    assert await asyncio.to_thread(ask) == whole.choices[0].message.content


@pytest.mark.capability("API-1", "API-2")
async def test_a_stream_says_the_same_as_the_answer_in_one_piece(replica: Running):
    whole = await replica.openai.chat.completions.create(**GREEDY)

    stream = await replica.openai.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]

    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({c.id for c in chunks}) == 1


@pytest.mark.capability("API-1")
async def test_a_text_is_completed_whole_and_as_a_stream(replica: Running):
    ask = {"model": "tiny", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 24}

    whole = await replica.openai.completions.create(**ask)
    pieces = [c.choices[0].text async for c in await replica.openai.completions.create(**ask, stream=True)]

    assert "".join(pieces) == whole.choices[0].text
    assert whole.choices[0].text.startswith((" ", ",")), "the text goes on where the prompt ended"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24


async def test_a_completion_takes_token_ids(replica: Running):
    ids = (await replica.post("/tokenize", {"prompt": "Once upon a time"})).json()["tokens"]
    ask = {"model": "tiny", "temperature": 0, "max_tokens": 8}

    by_text = await replica.openai.completions.create(prompt="Once upon a time", **ask)
    by_ids = await replica.openai.completions.create(prompt=ids, **ask)
    in_a_list = await replica.openai.completions.create(prompt=["Once upon a time"], **ask)

    assert by_ids.choices[0].text == by_text.choices[0].text == in_a_list.choices[0].text


@pytest.mark.capability("API-1", "API-6")
async def test_the_model_is_listed_and_found(replica: Running):
    listed = [model async for model in await replica.openai.models.list()]
    found = await replica.openai.models.retrieve("tiny")

    assert [model.id for model in listed] == ["tiny"]
    assert found.model_extra is not None
    assert found.model_extra["max_model_len"] == 2048
    assert found.model_extra["sampling_defaults"]["temperature"] == 0.7, "generation_config.json says so"
    with pytest.raises(NotFoundError):
        await replica.openai.models.retrieve("other")


async def test_an_unknown_model_is_a_404(replica: Running):
    with pytest.raises(NotFoundError) as refusal:
        await replica.openai.chat.completions.create(**GREEDY | {"model": "gpt-9"})

    assert refusal.value.body == {
        "message": "The model `gpt-9` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }


async def test_the_model_may_be_named_with_its_namespace_or_not_at_all(replica: Running):
    for name in ("tiny", "team-a/tiny", ""):
        answer = await replica.openai.chat.completions.create(**GREEDY | {"model": name, "max_tokens": 2})
        assert answer.model == "tiny"


@pytest.mark.capability("API-8")
async def test_a_prompt_beyond_the_context_is_a_400_in_the_words_that_libraries_know(replica: Running):
    before = replica.client.stats().admitted
    for words in (3_000, 200_000):
        with pytest.raises(BadRequestError) as refusal:
            await replica.openai.completions.create(model="tiny", prompt="pod " * words)
        assert refusal.value.message.find("This model's maximum context length is 2048 tokens") >= 0
    assert replica.client.stats().admitted == before


@pytest.mark.capability("API-4")
async def test_an_answer_ends_at_max_tokens_even_beyond_the_context(replica: Running):
    answer = await replica.openai.chat.completions.create(
        model="tiny", messages=POD, max_completion_tokens=3, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


@pytest.mark.capability("API-4")
async def test_a_stop_string_ends_the_answer_before_it(replica: Running):
    whole = (await replica.openai.chat.completions.create(**GREEDY)).choices[0].message.content or ""
    stop = whole[20:27]  # somewhere inside, wherever tokens begin and end

    cut = await replica.openai.chat.completions.create(**GREEDY, stop=["never said", stop])
    stream = await replica.openai.chat.completions.create(**GREEDY, stop=stop, stream=True)
    streamed = "".join([c.choices[0].delta.content or "" async for c in stream])

    assert cut.choices[0].message.content == streamed == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].model_extra == {"stop_reason": stop}


@pytest.mark.capability("API-4")
async def test_tokens_beyond_a_stop_string_are_not_counted(replica: Running):
    whole = await replica.openai.chat.completions.create(**GREEDY)
    text = whole.choices[0].message.content or ""

    cut = await replica.openai.chat.completions.create(**GREEDY, stop=text[10:14])

    said = (await replica.post("/tokenize", {"prompt": text[:14], "add_special_tokens": False})).json()["count"]
    assert cut.usage is not None
    assert abs(cut.usage.completion_tokens - said) <= 1, "the token that completed it may reach beyond it"


@pytest.mark.capability("API-4")
async def test_stop_tokens_minimum_length_and_ignored_ends_are_honoured(replica: Running):
    full_stop = (await replica.post("/tokenize", {"prompt": ".", "add_special_tokens": False})).json()["tokens"][-1]

    by_token = await replica.openai.chat.completions.create(**GREEDY, extra_body={"stop_token_ids": [full_stop]})
    longer = await replica.openai.chat.completions.create(
        **GREEDY, extra_body={"stop_token_ids": [full_stop], "min_tokens": 40}
    )
    endless = await replica.openai.chat.completions.create(**GREEDY, extra_body={"ignore_eos": True})

    text = by_token.choices[0].message.content or ""
    assert not text.endswith(".")
    assert by_token.choices[0].finish_reason == "stop"
    assert by_token.choices[0].model_extra == {"stop_reason": full_stop}
    assert longer.usage is not None
    assert longer.usage.completion_tokens >= 40
    assert endless.usage is not None
    assert endless.usage.completion_tokens == 60


async def test_a_seed_makes_an_answer_repeatable(replica: Running):
    ask = {"model": "tiny", "messages": POD, "temperature": 1.0, "max_tokens": 30}

    texts = [
        (await replica.openai.chat.completions.create(**ask, seed=seed)).choices[0].message.content
        for seed in (7, 7, -8, -8, 2**63 - 1)
    ]
    unseeded = {
        (await replica.openai.chat.completions.create(**ask | {"temperature": 2})).choices[0].message.content
        for _ in range(4)
    }

    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    assert len({texts[0], texts[2], texts[4]}) > 1
    assert len(unseeded) > 1


@pytest.mark.capability("PF-16")
async def test_characters_of_several_tokens_arrive_whole(replica: Running):
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "🙂 日本"}], "max_tokens": 80, "seed": 1}
    ask["extra_body"] = {"structured_outputs": {"regex": "(🙂日本){3}"}}

    whole = await replica.openai.chat.completions.create(**ask)
    stream = await replica.openai.chat.completions.create(**ask, stream=True)
    pieces = [c.choices[0].delta.content or "" async for c in stream]

    assert whole.choices[0].message.content == "🙂日本" * 3
    assert whole.usage is not None
    assert whole.usage.completion_tokens > 2 * 9, "each is several tokens"
    assert [piece for piece in pieces if piece] == list("🙂日本" * 3), "and comes with the last of them"


async def test_a_repeated_prompt_is_found_in_the_cache_and_said_in_the_usage(replica: Running):
    long = [{"role": "user", "content": "Tell me about the sea and the wind and the boats. " * 5}]
    ask = {"model": "tiny", "messages": long, "max_tokens": 2}

    await replica.openai.chat.completions.create(**ask)
    again = await replica.openai.chat.completions.create(**ask)

    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) >= 16


@pytest.mark.capability("API-9")
async def test_every_answer_names_its_model_revision_and_tokenizer(replica: Running):
    sha = replica.models[0].tokenizer_sha256
    responses = [
        await replica.chat(max_tokens=1),
        await replica.post("/v1/completions", {"prompt": "x", "max_tokens": 1}),
        await replica.chat(model="nobody"),
        await replica.http.get(f"{replica.url}/v1/models"),
    ]

    for response in responses:
        assert response.headers["x-slipway-model"] == "tiny"
        assert response.headers["x-slipway-revision"] == "rev1"
        assert response.headers["x-slipway-tokenizer"] == sha
    assert responses[0].json()["system_fingerprint"] == f"tiny/rev1/{sha[:12]}"
    async with replica.streaming(max_tokens=2) as stream:
        events = [json.loads(line[6:]) async for line in stream.aiter_lines() if line.startswith("data: {")]
        assert stream.headers["x-slipway-revision"] == "rev1"
    assert {event["system_fingerprint"] for event in events} == {f"tiny/rev1/{sha[:12]}"}
    assert {event["model"] for event in events} == {"tiny"}


async def test_a_request_id_is_echoed_or_made(replica: Running):
    given = await replica.chat(headers={"x-request-id": "abc-123"}, max_tokens=1)
    strange = await replica.chat(headers={"x-request-id": "a b\tc"}, max_tokens=1)

    assert given.headers["x-request-id"] == "abc-123"
    assert len(strange.headers["x-request-id"]) == 32


@pytest.mark.capability("API-2")
async def test_streams_ask_proxies_not_to_buffer_and_end_with_done(replica: Running):
    async with replica.streaming(max_tokens=3) as stream:
        lines = [line async for line in stream.aiter_lines() if line]

    assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert stream.headers["x-accel-buffering"] == "no"
    assert "no-transform" in stream.headers["cache-control"]
    assert "content-length" not in stream.headers
    assert lines[-1] == "data: [DONE]"


async def test_text_and_tokens_translate_into_each_other(replica: Running):
    text = "Zoë 🙂 <b>"
    tokens = (await replica.post("/tokenize", {"prompt": text, "return_token_strs": True})).json()
    back = (await replica.post("/detokenize", {"tokens": tokens["tokens"]})).json()
    chat = (await replica.post("/tokenize", {"messages": POD})).json()

    assert back == {"prompt": "<|bos|>" + text}
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 2048
    assert chat["tokens"][0] == tokens["tokens"][0], "both begin with the beginning-of-sequence token, once"
    assert chat["tokens"].count(chat["tokens"][0]) == 1


async def test_health_and_version_answer(replica: Running):
    assert (await replica.http.get(f"{replica.url}/health")).status_code == 200
    assert (await replica.http.get(f"{replica.url}/version")).json() == {"version": "0.1.0"}
