"""Every field that clients really use does what OpenAI and vLLM say it does, against the real engine."""

import json
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from slipway_runtime.server import sampling
from tests.runtime.server.serving import Running, a_replica

pytestmark = pytest.mark.asyncio(loop_scope="module")

POD = [{"role": "user", "content": "What is a pod?"}]
GREEDY: dict[str, Any] = {"messages": POD, "temperature": 0, "max_tokens": 8}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica() -> AsyncIterator[Running]:
    async with a_replica() as running:
        yield running


async def chat(replica: Running, **fields: Any) -> dict[str, Any]:
    response = await replica.post("/v1/chat/completions", GREEDY | fields)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def complete(replica: Running, **fields: Any) -> dict[str, Any]:
    response = await replica.post("/v1/completions", {"prompt": "The sea", "temperature": 0, "max_tokens": 6} | fields)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def events(replica: Running, path: str, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with replica.http.stream("POST", replica.url + path, json=body | {"stream": True}, headers=named) as stream:
        assert stream.status_code == 200, await stream.aread()
        return [json.loads(line[6:]) async for line in stream.aiter_lines() if line.startswith("data: {")]


@pytest.mark.capability("API-11")
async def test_several_answers_are_the_same_ones_whole_and_streamed(replica: Running):
    ask = {"messages": POD, "n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    whole = await chat(replica, **ask)
    alone = await chat(replica, **ask | {"n": 1, "seed": 8})
    chunks = await events(replica, "/v1/chat/completions", ask | {"stream_options": {"include_usage": True}})

    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert alone["choices"][0]["message"]["content"] == texts[1], "the second answer samples with the seed after"
    assert whole["usage"]["completion_tokens"] == 36
    assert whole["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"], "the prompt is counted once"
    streamed = ["", "", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content") or ""
    assert streamed == texts
    assert chunks[-1]["usage"]["completion_tokens"] == 36
    assert chunks[-1]["choices"] == []


@pytest.mark.capability("API-11")
async def test_one_of_several_answers_may_stop_early(replica: Running):
    ask = {"messages": POD, "n": 3, "seed": 7, "temperature": 2.0, "max_tokens": 20, "ignore_eos": True}
    texts = [choice["message"]["content"] for choice in (await chat(replica, **ask))["choices"]]
    stop = next(
        t[i : i + 5] for t in texts for i in range(4, len(t) - 9) if sum(t[i : i + 5] in other for other in texts) == 1
    )

    stopped = await chat(replica, **ask, stop=stop)

    reasons = [choice["finish_reason"] for choice in stopped["choices"]]
    assert sorted(reasons) == ["length", "length", "stop"]
    for text, choice in zip(texts, stopped["choices"], strict=True):
        assert choice["message"]["content"] == text.split(stop)[0]
    await replica.until(lambda stats: stats.running + stats.waiting + stats.blocks_live == 0)


@pytest.mark.capability("API-11")
async def test_logprobs_of_a_chat_name_the_drawn_token_and_the_likeliest(replica: Running):
    whole = await chat(replica, logprobs=True, top_logprobs=3)
    chunks = await events(replica, "/v1/chat/completions", GREEDY | {"logprobs": True, "top_logprobs": 3})

    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == whole["usage"]["completion_tokens"]
    for entry in content:
        assert len(entry["top_logprobs"]) == 3
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] <= 0, "greedy samples the likeliest"
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
    said = b"".join(bytes(entry["bytes"]) for entry in content).decode()
    text = whole["choices"][0]["message"]["content"]
    assert said.startswith(text) or text == said
    streamed = [e for c in chunks for ch in c["choices"] if ch["logprobs"] for e in ch["logprobs"]["content"]]
    assert [e["token"] for e in streamed] == [e["token"] for e in content]
    assert all(math.isclose(a["logprob"], b["logprob"], abs_tol=1e-3) for a, b in zip(streamed, content, strict=True))
    bare = await chat(replica, logprobs=True)
    assert bare["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


@pytest.mark.capability("API-11")
async def test_a_prompt_is_scored_by_echo_with_nothing_said(replica: Running):
    scored = await complete(replica, prompt="The sea is deep", echo=True, max_tokens=0, logprobs=2)

    choice = scored["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "The sea is deep"
    assert scored["usage"]["completion_tokens"] == 0
    assert len(logprobs["tokens"]) == scored["usage"]["prompt_tokens"]
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"][1:])
    again = await complete(replica, prompt="The sea is deep", echo=True, max_tokens=0, logprobs=2)
    assert again["choices"][0]["logprobs"]["tokens"] == logprobs["tokens"], "no row is lost to the prefix cache"


async def test_an_echo_comes_before_the_answer_whole_and_streamed(replica: Running):
    plain = await complete(replica, logprobs=0)
    echoed = await complete(replica, echo=True, logprobs=0)
    chunks = await events(
        replica, "/v1/completions", {"prompt": "The sea", "temperature": 0, "max_tokens": 6, "echo": True}
    )

    text = plain["choices"][0]["text"]
    assert echoed["choices"][0]["text"] == "The sea" + text
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "The sea" + text
    offsets = echoed["choices"][0]["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert len(offsets) == plain["usage"]["total_tokens"]


async def test_prompt_logprobs_have_an_entry_for_each_token_but_the_first(replica: Running):
    answer = await chat(replica, prompt_logprobs=1)
    ids = (await replica.post("/tokenize", {"messages": POD})).json()["tokens"]

    scored = answer["prompt_logprobs"]
    assert len(scored) == len(ids)
    assert scored[0] is None
    for token_id, entry in zip(ids[1:], scored[1:], strict=True):
        assert entry[str(token_id)]["logprob"] <= 0
        assert entry[str(token_id)]["rank"] >= 1
    refused = await replica.post("/v1/chat/completions", GREEDY | {"prompt_logprobs": 1, "stream": True})
    assert refused.status_code == 400


async def test_logprobs_of_a_prompt_are_bounded(replica: Running, monkeypatch: pytest.MonkeyPatch):
    """Finding 10: 20 for each token of a prompt of 100,000 were two million pairs in one body."""
    monkeypatch.setattr(sampling, "MOST_PROMPT_LOGPROBS", 30)
    long = {"prompt": "The sea and the wind and the boats and the stars", "max_tokens": 1}
    for field, ask in (("prompt_logprobs", {"prompt_logprobs": 20}), ("echo", {"echo": True, "logprobs": 5})):
        refused = await replica.post("/v1/completions", long | ask)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == field
        assert "at most 30 are computed for one prompt" in refused.text
    assert (await replica.post("/v1/completions", long | {"prompt_logprobs": 0})).status_code == 200


@pytest.mark.capability("API-6")
async def test_a_bias_decides_and_forbids(replica: Running):
    x = (await replica.post("/tokenize", {"prompt": "x", "add_special_tokens": False})).json()["tokens"][0]
    first = (await chat(replica, logprobs=True, max_tokens=1))["choices"][0]["logprobs"]["content"][0]
    free = (await chat(replica, max_tokens=1, return_token_ids=True))["choices"][0]["token_ids"][0]

    forced = await chat(replica, logit_bias={str(x): 100}, max_tokens=4, ignore_eos=True)
    forbidden = await chat(replica, logit_bias={str(free): -100}, max_tokens=1, return_token_ids=True)

    assert forced["choices"][0]["message"]["content"] == "xxxx"
    assert forbidden["choices"][0]["token_ids"] != [free]
    assert first["token"]


async def test_several_prompts_answer_each_in_their_place(replica: Running):
    prompts = ["The sea", "A pod is", "Once upon"]
    alone = [(await complete(replica, prompt=p))["choices"][0]["text"] for p in prompts]
    ids = [(await replica.post("/tokenize", {"prompt": p})).json()["tokens"] for p in prompts]

    together = await complete(replica, prompt=prompts)
    by_ids = await complete(replica, prompt=ids)
    sampled = await complete(replica, prompt=prompts[:2], n=2, temperature=1.0, seed=3, max_tokens=4, ignore_eos=True)
    chunks = await events(replica, "/v1/completions", {"prompt": prompts, "temperature": 0, "max_tokens": 6})

    assert [c["text"] for c in together["choices"]] == alone
    assert [c["text"] for c in by_ids["choices"]] == alone
    assert [c["index"] for c in sampled["choices"]] == [0, 1, 2, 3]
    assert sampled["usage"]["completion_tokens"] == 16
    texts = ["", "", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == alone


async def test_a_prompt_may_be_cut_from_the_left(replica: Running):
    cut = await complete(replica, prompt="word " * 3000, truncate_prompt_tokens=5)
    fitting = await complete(replica, prompt="word " * 3000, truncate_prompt_tokens=-1, max_tokens=1)

    assert cut["usage"]["prompt_tokens"] == 5
    assert fitting["usage"]["prompt_tokens"] == 2047


async def test_token_ids_are_given_to_who_asks(replica: Running):
    whole = await chat(replica, return_token_ids=True)
    chunks = await events(replica, "/v1/chat/completions", GREEDY | {"return_token_ids": True})
    plain = await events(replica, "/v1/chat/completions", GREEDY)

    ids = whole["choices"][0]["token_ids"]
    assert len(ids) == whole["usage"]["completion_tokens"]
    assert whole["prompt_token_ids"] == (await replica.post("/tokenize", {"messages": POD})).json()["tokens"]
    assert [i for c in chunks for ch in c["choices"] for i in ch.get("token_ids", ())] == ids
    assert all("token_ids" not in choice for chunk in plain for choice in chunk["choices"])


async def test_token_ids_of_completions_stand_in_each_choice(replica: Running):
    prompts = ["Once upon a time", "A pod"]
    ask = {"prompt": prompts, "temperature": 0, "max_tokens": 6, "return_token_ids": True, "n": 2}
    whole = (await replica.post("/v1/completions", ask)).json()
    chunks = await events(replica, "/v1/completions", ask)
    ids = [(await replica.post("/tokenize", {"prompt": prompt})).json()["tokens"] for prompt in prompts]

    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [ids[0], ids[0], ids[1], ids[1]]
    assert all(len(choice["token_ids"]) == 6 for choice in whole["choices"])
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert [c["prompt_token_ids"] for c in own if "prompt_token_ids" in c] == [choice["prompt_token_ids"]]
        assert [i for c in own for i in c["token_ids"]] == choice["token_ids"]


async def test_greedy_answers_are_all_the_same(replica: Running):
    answer = await chat(replica, n=3, temperature=0, max_tokens=8)

    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 1
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 24


async def test_the_last_message_may_be_continued(replica: Running):
    said = {"role": "assistant", "content": "A pod is a group of"}
    continued = await chat(replica, messages=[*POD, said], continue_final_message=True, return_token_ids=True)
    echoed = await chat(replica, messages=[*POD, said], continue_final_message=True, echo=True)
    ids = (await replica.post("/tokenize", {"messages": [*POD, said], "continue_final_message": True})).json()["tokens"]
    text = (await replica.post("/detokenize", {"tokens": ids})).json()["prompt"]

    assert text.endswith("A pod is a group of")
    assert continued["prompt_token_ids"] == ids
    assert echoed["choices"][0]["message"]["content"].startswith("A pod is a group of")


async def test_a_client_may_name_its_answer_but_not_the_engines_request(replica: Running):
    ask = GREEDY | {"request_id": "mine-1", "max_tokens": 3}
    one, two = await chat(replica, **ask), await chat(replica, **ask)

    assert one["id"] == two["id"] == "chatcmpl-mine-1"


async def test_a_gateway_that_asks_gets_the_load_in_a_header(replica: Running):
    text = await replica.chat(max_tokens=1, headers={"endpoint-load-metrics-format": "TEXT"})
    as_json = await replica.chat(max_tokens=1, headers={"endpoint-load-metrics-format": "json"})
    silent = await replica.chat(max_tokens=1)

    assert text.headers["endpoint-load-metrics"].startswith("TEXT named_metrics.kv_cache_usage_perc=")
    assert set(json.loads(as_json.headers["endpoint-load-metrics"][5:])["named_metrics"]) == {
        "kv_cache_usage_perc",
        "num_requests_running",
        "num_requests_waiting",
    }
    assert "endpoint-load-metrics" not in silent.headers


# --- an answer that began elsewhere


@pytest.mark.capability("API-15")
@pytest.mark.parametrize("cut", [1, 3, 7])
async def test_an_answer_goes_on_exactly_where_another_replica_left_it(replica: Running, cut: int):
    body = {"messages": POD, "seed": 11, "temperature": 0, "max_tokens": 24, "ignore_eos": True, "stop": ["never said"]}
    body |= {"return_token_ids": True}
    usage = {"stream_options": {"include_usage": True}}
    whole = await events(replica, "/v1/chat/completions", body | usage, x_slipway_token_ids="1")
    before = whole[: 1 + cut]  # the role, and a token each
    given = [i for c in before for ch in c["choices"] for i in ch.get("token_ids", ())]
    assert len(given) == cut

    resume = {"answers": [{"output_token_ids": given}], "id": whole[0]["id"], "created": whole[0]["created"]}
    rest = await events(
        replica, "/v1/chat/completions", body | usage | {"slipway_resume": resume}, x_slipway_token_ids="resume"
    )

    def said(chunks: list[dict[str, Any]]) -> str:
        return "".join(ch["delta"].get("content") or "" for c in chunks for ch in c["choices"])

    assert said(before) + said(rest) == said(whole)
    assert {chunk["id"] for chunk in rest} == {whole[0]["id"]}
    assert not any("role" in ch["delta"] for c in rest for ch in c["choices"]), "who speaks was said already"
    assert rest[-1]["usage"] == whole[-1]["usage"] | {
        "prompt_tokens_details": rest[-1]["usage"]["prompt_tokens_details"]
    }
    assert rest[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.capability("API-15")
async def test_a_stop_string_that_began_elsewhere_is_found_here(replica: Running):
    body = {"messages": POD, "temperature": 0, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    text = (await chat(replica, **body))["choices"][0]["message"]["content"]
    stop = text[12:24]
    whole = await events(replica, "/v1/chat/completions", body | {"stop": stop}, x_slipway_token_ids="1")
    expected = text[: text.index(stop)]

    for cut in range(1, len(whole) - 1):
        given = [i for c in whole[: 1 + cut] for ch in c["choices"] for i in ch.get("token_ids", ())]
        shown = "".join(ch["delta"].get("content") or "" for c in whole[: 1 + cut] for ch in c["choices"])
        resumed = body | {"stop": stop, "slipway_resume": {"answers": [{"output_token_ids": given}]}}
        rest = await events(replica, "/v1/chat/completions", resumed, x_slipway_token_ids="resume")
        more = "".join(ch["delta"].get("content") or "" for c in rest for ch in c["choices"])
        assert shown + more == expected
        assert rest[-1]["choices"][0]["finish_reason"] == "stop"
        assert rest[-1]["choices"][0]["stop_reason"] == stop


@pytest.mark.capability("API-15")
async def test_an_answer_that_was_complete_elsewhere_only_ends_here(replica: Running):
    body = GREEDY | {"ignore_eos": True, "max_tokens": 4}
    ids = (await chat(replica, **body, return_token_ids=True))["choices"][0]["token_ids"]
    before = replica.client.stats().admitted

    resume = {"slipway_resume": {"answers": [{"output_token_ids": ids}]}}
    rest = await events(replica, "/v1/chat/completions", body | resume, x_slipway_token_ids="resume")
    in_one_piece = await replica.post("/v1/chat/completions", body | resume, headers={"x-slipway-token-ids": "resume"})

    assert rest[-1]["choices"][0]["finish_reason"] == "length"
    assert in_one_piece.json()["usage"]["completion_tokens"] == 4
    assert replica.client.stats().admitted == before


async def test_only_the_gateway_may_resume(replica: Running):
    forged = GREEDY | {"slipway_resume": {"answers": [{"output_token_ids": [5]}]}}

    for header in ({}, {"x-slipway-token-ids": "1"}):  # the gateway asks for marks in the name of any client
        refused = await replica.post("/v1/chat/completions", forged, headers=header)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "slipway_resume"
