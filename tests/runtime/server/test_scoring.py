"""Scores and reranking over HTTP, in vLLM's, Jina's and Cohere's shapes, from embeddings and from a reranker."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from slipway_api.names import RERANK_PATHS, SCORE_PATHS
from slipway_api.runtime_spec import Task
from slipway_runtime.command_line import parse_arguments, serve_settings
from slipway_runtime.models.pooling import MEAN
from slipway_runtime.server import pairs, scoring
from slipway_runtime.server.prompt import ChatTemplate
from tests.runtime.engine.test_scores import tokens_of_tiny
from tests.runtime.server.serving import TINY, Running, a_replica, tiny_tokenizer

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.capability("API-25")]

QUERY = "What is a pod?"
DOCUMENTS = ["A pod is a group of containers.", "A fox counted the stars.", "What is a pod?"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embedding() -> AsyncIterator[Running]:
    async with a_replica(pooling=MEAN) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reranker() -> AsyncIterator[Running]:
    async with a_replica(pooling="auto", score_tokens=",".join(tokens_of_tiny())) as running:
        yield running


@pytest.fixture(scope="module")
def judged() -> list[float]:
    """What `transformers` makes of the documents, in Qwen3-Reranker's prompt."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    tokenizer, found = tiny_tokenizer().tokenizer, []
    ids = [tokenizer.token_to_id(token) for token in tokens_of_tiny()]
    for document in DOCUMENTS:
        prompt = tokenizer.encode(pairs.judged(QUERY, document), add_special_tokens=False).ids
        with torch.no_grad():
            found.append(float(model(torch.tensor([prompt])).logits[0, -1, ids].softmax(-1)[1]))
    return found


async def cosines(replica: Running) -> list[float]:
    answer = await replica.openai.embeddings.create(model="tiny", input=[QUERY, *DOCUMENTS])
    query, *rest = (np.array(one.embedding) for one in answer.data)
    return [float(query @ vector) for vector in rest]


def tokens_of(*texts: str) -> int:
    return sum(len(tiny_tokenizer().tokenizer.encode(text).ids) for text in texts)


@pytest.mark.parametrize("path", SCORE_PATHS)
async def test_scores_of_embeddings_are_cosines_in_vllms_shape(embedding: Running, path: str):
    answer = (await embedding.post(path, {"model": "tiny", "text_1": QUERY, "text_2": DOCUMENTS})).json()

    assert answer["object"] == "list"
    assert [(one["index"], one["object"]) for one in answer["data"]] == [(n, "score") for n in range(3)]
    np.testing.assert_allclose([one["score"] for one in answer["data"]], await cosines(embedding), atol=2e-3)
    assert answer["data"][2]["score"] == pytest.approx(1.0, abs=2e-3)
    tokens = tokens_of(QUERY, *DOCUMENTS)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


async def test_texts_are_scored_in_pairs_where_there_are_as_many(embedding: Running):
    answer = (await embedding.post("/v1/score", {"text_1": DOCUMENTS, "text_2": DOCUMENTS[::-1]})).json()

    first, middle, last = (one["score"] for one in answer["data"])
    assert middle == pytest.approx(1.0, abs=2e-3)
    assert first == pytest.approx(last, abs=2e-3)
    assert first < 0.999


@pytest.mark.parametrize("path", RERANK_PATHS)
async def test_a_reranker_sorts_documents_by_its_two_tokens(reranker: Running, judged: list[float], path: str):
    answer = (await reranker.post(path, {"model": "tiny", "query": QUERY, "documents": DOCUMENTS})).json()

    order = sorted(range(3), key=lambda index: -judged[index])
    assert [one["index"] for one in answer["results"]] == order
    np.testing.assert_allclose(
        [one["relevance_score"] for one in answer["results"]], [judged[index] for index in order], atol=5e-3
    )
    tokens = sum(
        len(tiny_tokenizer().tokenizer.encode(pairs.judged(QUERY, text), add_special_tokens=False).ids)
        for text in DOCUMENTS
    )
    assert answer["usage"]["total_tokens"] == tokens
    if path == "/v2/rerank":
        assert all("document" not in one for one in answer["results"])
        assert answer["meta"]["tokens"] == {"input_tokens": tokens, "output_tokens": 0}
    else:
        assert [one["document"]["text"] for one in answer["results"]] == [DOCUMENTS[index] for index in order]


async def test_the_most_relevant_are_returned_and_documents_may_be_objects(reranker: Running, judged: list[float]):
    body = {"query": QUERY, "documents": [{"text": text} for text in DOCUMENTS], "top_n": 1, "return_documents": False}
    answer = (await reranker.post("/v1/rerank", body)).json()

    (best,) = answer["results"]
    assert best["index"] == int(np.argmax(judged))
    assert "document" not in best


async def test_embeddings_rerank_too(embedding: Running):
    answer = (await embedding.post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS})).json()

    assert answer["results"][0]["index"] == 2
    assert answer["usage"]["total_tokens"] == tokens_of(QUERY, *DOCUMENTS)


async def test_a_call_of_many_documents_loses_none(reranker: Running):
    texts = [f"Story number {number} of the fox." for number in range(60)]
    answer = (await reranker.post("/v1/rerank", {"query": QUERY, "documents": texts})).json()

    assert sorted(one["index"] for one in answer["results"]) == list(range(60))


REFUSED = {
    "no documents": ({"documents": []}, "documents is empty"),
    "an empty text": ({"documents": ["a", ""]}, "empty text"),
    "too many": ({"documents": ["a"] * 2049}, "at most 2048"),
    "too long": ({"documents": ["fox " * 9000]}, "maximum context length"),
    "a picture": ({"documents": [{"image": "x"}]}, "documents"),
    "an instruction": ({"instruction": "x"}, "instruction"),
    "raw logits": ({"use_activation": False}, "use_activation"),
    "a negative number": ({"top_n": -1}, "top_n"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("kind", ["embedding", "reranker"])
async def test_what_is_not_honoured_is_refused(embedding: Running, reranker: Running, kind: str, case: str):
    changed, sentence = REFUSED[case]
    replica = embedding if kind == "embedding" else reranker
    response = await replica.post("/v1/rerank", {"query": QUERY, "documents": ["a"]} | changed)

    assert response.status_code == 400
    assert sentence in response.json()["error"]["message"]
    assert replica.client.stats().waiting == 0


async def test_texts_that_make_no_pairs_are_refused(embedding: Running):
    response = await embedding.post("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]})

    assert response.status_code == 400
    assert "holds 2 texts, and text_2 holds 3" in response.json()["error"]["message"]


async def test_a_long_query_for_many_documents_is_refused_before_they_are_encoded(
    reranker: Running, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scoring, "MAX_CALL_TOKENS", 400)
    monkeypatch.setattr(pairs, "judged", lambda *_: pytest.fail("encoded"))
    admitted = reranker.client.stats().admitted
    response = await reranker.post("/v1/rerank", {"query": "fox " * 60, "documents": ["a"] * 50})

    assert response.status_code == 400
    assert "more than 400 tokens together: send fewer documents" in response.json()["error"]["message"]
    assert reranker.client.stats().admitted == admitted


async def test_each_kind_of_replica_names_what_it_has(embedding: Running, reranker: Running):
    assert "it has no embeddings" in (await reranker.post("/v1/embeddings", {"input": "a"})).json()["error"]["message"]
    for replica in (embedding, reranker):
        answer = await replica.chat()
        assert answer.status_code == 404
        assert "scores (/v1/score)" in answer.json()["error"]["message"]
    async with a_replica() as generating:
        for path in (*SCORE_PATHS, *RERANK_PATHS):
            answer = await generating.post(path, {"text_1": "a", "text_2": "b", "query": "a", "documents": ["b"]})
            assert answer.status_code == 404
            assert "need a service of their own (task: embed)" in answer.json()["error"]["message"]


async def test_a_template_with_the_roles_of_rerankers_is_used():
    source = (
        "{% for m in messages %}{% if m['role'] == 'query' %}Q:{{ m['content'] }}"
        "{% elif m['role'] == 'document' %} D:{{ m['content'] }}{% endif %}{% endfor %}"
    )
    template = ChatTemplate(source, {})
    assert template.scores_pairs
    assert template.render_pair("a", "b") == "Q:a D:b"
    assert not ChatTemplate("{{ messages[0]['content'] }} about documents and a query", {}).scores_pairs


async def test_a_reranker_of_pairs_encodes_both_texts(reranker: Running):
    prompt = await reranker.models[0].prompts.pair(QUERY, DOCUMENTS[0], judges=False)
    assert list(prompt.token_ids) == tiny_tokenizer().tokenizer.encode(QUERY, DOCUMENTS[0]).ids


async def test_the_flag_belongs_to_the_task(tmp_path: Path):
    settings = serve_settings(parse_arguments(["serve", "x", "--task", "embed", "--score-tokens", "no,yes"]), {})
    assert (settings.task, settings.score_tokens) == (Task.EMBED, "no,yes")
    with pytest.raises(ValueError, match="--score-tokens no,yes needs --task embed"):
        serve_settings(parse_arguments(["serve", "x", "--score-tokens", "no,yes"]), {})
