"""The stock `openai` client gets embeddings from a replica of its own kind; each kind refuses the other's requests."""

import asyncio
import base64
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
import torch
from openai import BadRequestError, NotFoundError
from transformers import AutoModelForCausalLM

from slipway_api.runtime_spec import Pooling, Task
from slipway_runtime.command_line import parse_arguments, serve_settings
from slipway_runtime.engine.client import QueueLimits
from slipway_runtime.models.pooling import LAST, MEAN
from tests.runtime.server.serving import TINY, Running, a_replica, tiny_tokenizer

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.capability("API-16")]

TEXTS = ["What is a pod?", "A fox counted the stars.", "Once upon a time there was a fox. " * 12]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica() -> AsyncIterator[Running]:
    async with a_replica(pooling=MEAN, limits=QueueLimits(max_requests=16)) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def generating() -> AsyncIterator[Running]:
    async with a_replica() as running:
        yield running


@pytest.fixture(scope="module")
def expected() -> dict[str, list[np.ndarray]]:
    """What `transformers` makes of the texts."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    found: dict[str, list[np.ndarray]] = {LAST: [], MEAN: []}
    for text in TEXTS:
        ids = tiny_tokenizer().tokenizer.encode(text).ids
        with torch.no_grad():
            hidden = model.model(torch.tensor([ids])).last_hidden_state[0]
        for pooling, pooled in ((LAST, hidden[-1]), (MEAN, hidden.mean(dim=0))):
            found[pooling].append(torch.nn.functional.normalize(pooled, dim=-1).numpy())
    return found


async def test_a_batch_of_texts_is_embedded_as_transformers_does(replica: Running, expected):
    answer = await replica.openai.embeddings.create(model="tiny", input=TEXTS)

    assert [one.index for one in answer.data] == [0, 1, 2]
    for one, vector in zip(answer.data, expected[MEAN], strict=True):
        np.testing.assert_allclose(one.embedding, vector, atol=5e-3)
        assert np.linalg.norm(one.embedding) == pytest.approx(1.0, abs=1e-5)
    tokens = sum(len(tiny_tokenizer().tokenizer.encode(text).ids) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)


async def test_floats_and_base64_say_the_same(replica: Running):
    plain = (await replica.post("/v1/embeddings", {"input": TEXTS[0], "encoding_format": "float"})).json()
    packed = (await replica.post("/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"})).json()

    raw = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), dtype="<f4")
    np.testing.assert_allclose(raw, plain["data"][0]["embedding"], atol=1e-5)


async def test_token_ids_are_an_input_too(replica: Running):
    ids = tiny_tokenizer().tokenizer.encode(TEXTS[1]).ids

    text = await replica.openai.embeddings.create(model="tiny", input=TEXTS[1])
    one = await replica.openai.embeddings.create(model="tiny", input=ids)
    two = await replica.openai.embeddings.create(model="tiny", input=[ids, ids[:3]])

    np.testing.assert_allclose(one.data[0].embedding, text.data[0].embedding, atol=1e-3)
    assert len(two.data) == 2


async def test_a_call_of_many_texts_neither_floods_the_queue_nor_loses_one(replica: Running):
    texts = [f"Story number {number} of the fox." for number in range(120)]

    answer = await replica.openai.embeddings.create(model="tiny", input=texts)
    first = await replica.openai.embeddings.create(model="tiny", input=texts[77])

    assert len(answer.data) == 120, "the queue of this replica takes 16"
    np.testing.assert_allclose(answer.data[77].embedding, first.data[0].embedding, atol=1e-3)


async def test_a_client_that_leaves_ends_its_texts(replica: Running):
    texts = ["A long story. " * 60] * 200
    call = asyncio.create_task(replica.post("/v1/embeddings", {"input": texts}))
    await replica.until(lambda stats: stats.running > 0)

    call.cancel()

    await replica.until(lambda stats: stats.running + stats.waiting == 0)
    stats = replica.client.stats()
    assert stats.admitted == stats.finished + stats.aborted
    assert stats.finished < stats.admitted or stats.admitted < 200, "the rest was not computed"


async def test_embeddings_are_counted_as_prompts_without_answers(replica: Running):
    page = (await replica.http.get(f"{replica.admin_url}/metrics")).text

    numbers = {line.split("{")[0]: float(line.split()[-1]) for line in page.splitlines() if line[:1] not in "#"}
    assert numbers["vllm:prompt_tokens_total"] > 0
    assert numbers["vllm:generation_tokens_total"] == 0


REFUSED = {
    "dimensions": ({"dimensions": 8}, "no fewer"),
    "input": ({"input": ["a", ""]}, "input"),
    "length": ({"input": "fox " * 9000}, "maximum context length"),
    "normalize": ({"normalize": False}, "normalize"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_is_not_honoured_is_refused(replica: Running, case: str):
    changed, sentence = REFUSED[case]

    with pytest.raises(BadRequestError, match=sentence):
        await replica.openai.embeddings.create(
            **{"model": "tiny", "input": "a"} | {k: v for k, v in changed.items() if k != "normalize"},
            extra_body={k: v for k, v in changed.items() if k == "normalize"},
        )


async def test_each_kind_of_replica_refuses_the_others_requests_in_one_sentence(replica: Running, generating: Running):
    messages = [{"role": "user", "content": "Hello!"}]
    asks = {
        "/v1/chat/completions": {"messages": messages},
        "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
        "/v1/messages": {"messages": messages, "max_tokens": 1},
    }

    for path, body in asks.items():
        answer = await replica.post(path, body)
        assert answer.status_code == 404, answer.text
        assert "computes embeddings" in answer.json()["error"]["message"]
    with pytest.raises(NotFoundError, match="a service of their own"):
        await generating.openai.embeddings.create(model="tiny", input="a")


async def test_a_model_with_matryoshka_embeddings_gives_fewer_dimensions(tmp_path):
    for file in TINY.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace("{", '{"matryoshka_dimensions": [16, 8],', 1))
    async with a_replica(pooling=LAST, model_path=tmp_path) as running:
        whole = (await running.openai.embeddings.create(model="tiny", input=TEXTS[0])).data[0].embedding
        short = (await running.openai.embeddings.create(model="tiny", input=TEXTS[0], dimensions=16)).data[0].embedding
        with pytest.raises(BadRequestError, match="8, 16"):
            await running.openai.embeddings.create(model="tiny", input=TEXTS[0], dimensions=12)

    assert len(short) == 16
    np.testing.assert_allclose(short, np.array(whole[:16]) / np.linalg.norm(whole[:16]), atol=1e-5)


async def test_the_command_line_says_what_a_replica_computes():
    settings = serve_settings(parse_arguments(["serve", "file:///m", "--task", "embed", "--pooling", "mean"]), {})

    assert (settings.task, settings.pooling) == (Task.EMBED, Pooling.MEAN)
    for wrong in (["--pooling", "mean"], ["--task", "embed", "--speculation", "promptLookup"]):
        with pytest.raises(ValueError, match="--task embed"):
            serve_settings(parse_arguments(["serve", "file:///m", *wrong]), {})
