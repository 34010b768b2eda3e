"""Rerankers: scores equal those of `transformers`, from a head with one label or from the logits of two tokens."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from slipway_runtime.engine.build import build_engine
from slipway_runtime.models.config_values import ModelRefusedError
from tests.runtime.checkpoints import SMALL, a_checkpoint
from tests.runtime.engine.test_embeddings import PROMPTS, an_engine, embed

pytestmark = pytest.mark.capability("API-25")

TINY = Path(__file__).parents[3] / "models" / "tiny"
NO_AND_YES = "no,yes"


def a_classifier(path: Path, family: str, *, labels: int = 1) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SMALL, num_labels=labels)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    model.save_pretrained(path, safe_serialization=True)
    return model


def tokens_of_tiny() -> tuple[str, str]:
    """Two tokens of the embedded model's vocabulary, in place of no and yes."""
    vocabulary = json.loads((TINY / "tokenizer.json").read_text())["model"]["vocab"]
    words = sorted(word for word in vocabulary if word.isalpha() and word.isascii() and len(word) > 1)
    return words[0], words[-1]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_head_with_one_label_scores_as_transformers_does(family: str, tmp_path: Path):
    model = a_classifier(tmp_path, family)

    engine = an_engine(tmp_path, "auto")

    assert (engine.facts.pooling, engine.facts.embedding_size, engine.facts.score_tokens) == ("score", 1, ())
    scores = [float(vector[0]) for vector in embed(engine, PROMPTS)]
    with torch.no_grad():
        expected = [float(model(torch.tensor([prompt])).logits.sigmoid()) for prompt in PROMPTS]
    np.testing.assert_allclose(scores, expected, atol=2e-5)
    assert max(scores) - min(scores) > 0.05


def test_two_ranks_score_as_one(tmp_path: Path):
    a_classifier(tmp_path, "qwen3")
    ranks = {"tensor_parallel_size": 2, "threads": 1}

    alone, shared = (embed(an_engine(tmp_path, "auto", **settings), PROMPTS) for settings in ({}, ranks))

    np.testing.assert_allclose(np.array(shared), np.array(alone), atol=1e-5)


@pytest.mark.parametrize("where", ["option", "config.json"])
def test_two_tokens_score_as_their_softmax(where: str, tmp_path: Path):
    shutil.copytree(TINY, tmp_path / "model")
    pair = tokens_of_tiny()
    if where == "config.json":
        file = tmp_path / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"classifier_from_token": list(pair)}))
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    vocabulary = json.loads((TINY / "tokenizer.json").read_text())["model"]["vocab"]

    engine = an_engine(tmp_path / "model", "auto", score_tokens=",".join(pair) if where == "option" else "")

    assert engine.facts.score_tokens == pair
    scores = [float(vector[0]) for vector in embed(engine, PROMPTS)]
    for prompt, score in zip(PROMPTS, scores, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0, -1, [vocabulary[token] for token in pair]]
        assert score == pytest.approx(float(logits.softmax(-1)[1]), abs=1e-4)


def test_a_model_of_embeddings_stays_one_and_so_does_a_classifier_that_is_asked_for_embeddings(tmp_path: Path):
    a_checkpoint(tmp_path / "embeds", "qwen3")
    a_classifier(tmp_path / "scores", "qwen3")

    assert an_engine(tmp_path / "embeds", "auto").facts.pooling == "last"
    assert an_engine(tmp_path / "scores", "mean").facts.embedding_size == SMALL["hidden_size"]


def test_heads_that_give_no_score_are_refused_in_a_sentence(tmp_path: Path):
    a_classifier(tmp_path / "classes", "qwen3", labels=3)
    shutil.copytree(TINY, tmp_path / "tiny")
    with pytest.raises(ModelRefusedError, match="classifies into 3 labels; this engine scores with one"):
        an_engine(tmp_path / "classes", "auto")
    with pytest.raises(ModelRefusedError, match="no token 'nowhere', which score_tokens names"):
        an_engine(tmp_path / "tiny", "auto", score_tokens=f"{tokens_of_tiny()[0]},nowhere")
    with pytest.raises(ModelRefusedError, match="two tokens, such as no,yes"):
        build_engine(tmp_path / "tiny", pooling="auto", kv_cache_bytes=1 << 20, score_tokens="yes")
