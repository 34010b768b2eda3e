"""Embeddings equal those of `transformers`, whatever the chunks and the batch mates, and follow the checkpoint."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from slipway_runtime.engine.build import build_engine
from slipway_runtime.engine.engine import Engine
from slipway_runtime.messages import FinishReason, Request, SamplingParams
from slipway_runtime.models.config_values import ModelRefusedError
from slipway_runtime.models.pooling import LAST, MEAN, read_embedding_config
from tests.runtime.checkpoints import a_checkpoint

pytestmark = pytest.mark.capability("API-16")

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]


def an_engine(path: Path, pooling: str, **options: object) -> Engine:
    small = {"device": "cpu", "dtype": "fp32", "kv_cache_bytes": 1 << 20, "max_num_seqs": 3}
    return build_engine(path, pooling=pooling, **(small | {"max_num_batched_tokens": 16} | options))


def embed(engine: Engine, prompts: list[list[int]], adapter: str = "") -> list[np.ndarray]:
    pools_all = engine.facts.pooling == MEAN
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=1, temperature=0.0, pools_all=pools_all)
        request = Request(id=str(index), prompt_token_ids=tuple(prompt), params=params, arrived=0.0, adapter=adapter)
        engine.add(request, 0.0)
    found: dict[int, np.ndarray] = {}
    while engine.has_work:
        for output in engine.step(0.0).outputs:
            assert output.finish_reason in {FinishReason.LENGTH, FinishReason.STOP}
            assert output.token_ids == ()
            found[int(output.request_id)] = np.frombuffer(output.embedding, dtype="<f4")
    return [found[index] for index in range(len(prompts))]


def expected(model: PreTrainedModel, prompt: list[int], pooling: str) -> np.ndarray:
    with torch.no_grad():
        hidden = model.model(torch.tensor([prompt])).last_hidden_state[0]
    pooled = hidden[-1] if pooling == LAST else hidden.mean(dim=0)
    return torch.nn.functional.normalize(pooled, dim=-1).numpy()


PROMPTS = [[5, 6, 7] * 9, [9], [3, 4, 5, 6, 7, 8] * 7, [11, 12], [5, 6, 7] * 9, [13] * 17]


@pytest.mark.parametrize("pooling", [LAST, MEAN])
@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_are_those_of_transformers(tmp_path: Path, family: str, pooling: str):
    model = a_checkpoint(tmp_path, family)
    engine = an_engine(tmp_path, pooling)

    vectors = embed(engine, PROMPTS)

    for prompt, vector in zip(PROMPTS, vectors, strict=True):
        np.testing.assert_allclose(vector, expected(model, prompt, pooling), atol=2e-5)
    stats = engine.stats(0.0)
    assert (stats.generated_tokens, stats.finished, stats.blocks_live) == (0, len(PROMPTS), 0)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, dict[str, Engine]]:
    path = tmp_path_factory.mktemp("checkpoint")
    model = a_checkpoint(path, "qwen3", num_hidden_layers=1)
    # Room for a few blocks only: some requests wait for those of others.
    return model, {
        pooling: an_engine(path, pooling, kv_cache_bytes=256 * 1024, max_model_len=48) for pooling in (LAST, MEAN)
    }


@given(
    prompts=st.lists(st.lists(st.integers(3, 96), min_size=1, max_size=40), min_size=1, max_size=6),
    pooling=st.sampled_from([LAST, MEAN]),
)
def test_any_batch_in_any_chunks_gives_the_same(
    small: tuple[PreTrainedModel, dict[str, Engine]], prompts: list[list[int]], pooling: str
):
    model, engines = small

    for prompt, vector in zip(prompts, embed(engines[pooling], prompts), strict=True):
        np.testing.assert_allclose(vector, expected(model, prompt, pooling), atol=2e-5)


def test_a_cached_prefix_is_read_for_the_last_token_and_never_for_the_mean(tmp_path: Path):
    model = a_checkpoint(tmp_path)
    prompt = [5, 6, 7, 8] * 10
    hits = {}

    for pooling in (LAST, MEAN):
        engine = an_engine(tmp_path, pooling)
        embed(engine, [prompt])
        [again] = embed(engine, [prompt])
        hits[pooling] = engine.stats(0.0).prefix_hits
        np.testing.assert_allclose(again, expected(model, prompt, pooling), atol=2e-5)

    assert hits[LAST] >= 32
    assert hits[MEAN] == 0


@pytest.mark.parametrize("changed", [{"overlap": True}, {"deterministic": True}, {"quantization": "int8"}])
def test_embeddings_come_under_every_way_to_compute(tmp_path: Path, changed: dict[str, object]):
    model = a_checkpoint(tmp_path)

    vectors = embed(an_engine(tmp_path, MEAN, **changed), PROMPTS)

    for prompt, vector in zip(PROMPTS, vectors, strict=True):
        assert vector @ expected(model, prompt, MEAN) > (0.99 if "quantization" in changed else 0.99999)


def test_a_model_saved_without_its_head_loads(tmp_path: Path):
    model = a_checkpoint(tmp_path / "whole")
    model.model.save_pretrained(tmp_path / "bare", safe_serialization=True)  # as embedding models are published

    vectors = embed(an_engine(tmp_path / "bare", LAST), PROMPTS)

    for prompt, vector in zip(PROMPTS, vectors, strict=True):
        np.testing.assert_allclose(vector, expected(model, prompt, LAST), atol=2e-5)


@pytest.mark.parametrize(
    ("said", "pooling"),
    [
        (None, LAST),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, LAST),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, MEAN),
        ({"pooling_mode": "mean"}, MEAN),
    ],
)
@pytest.mark.parametrize("name", ["1_Pooling/config.json", "1_Pooling.config.json"])
def test_auto_pools_as_the_checkpoint_says(tmp_path: Path, said: object, pooling: str, name: str):
    (tmp_path / "config.json").write_text("{}")
    if said is not None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(said))

    assert read_embedding_config(tmp_path, "auto", 8).pooling == pooling


@pytest.mark.parametrize("said", [{"pooling_mode_cls_token": True}, {"pooling_mode": "max"}, {}])
def test_another_kind_of_pooling_is_refused_in_a_sentence(tmp_path: Path, said: dict[str, object]):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(said))

    with pytest.raises(ModelRefusedError, match="last token or the mean"):
        read_embedding_config(tmp_path, "auto", 8)


@pytest.mark.parametrize(
    ("config", "is_matryoshka", "dimensions"),
    [({}, False, ()), ({"is_matryoshka": True}, True, ()), ({"matryoshka_dimensions": [8, 4]}, True, (4, 8))],
)
def test_smaller_sizes_are_the_checkpoints_to_allow(
    tmp_path: Path, config: dict[str, object], is_matryoshka: bool, dimensions: tuple[int, ...]
):
    (tmp_path / "config.json").write_text(json.dumps(config))

    found = read_embedding_config(tmp_path, MEAN, 16)

    assert (found.is_matryoshka, found.dimensions) == (is_matryoshka, dimensions)
