"""A draft model beside a model, both random and real: no text changes, memory is accounted for, misfits are refused."""

import json
import shutil
from pathlib import Path

import pytest

from slipway_runtime.engine.build import build_engine
from slipway_runtime.engine.engine import Engine
from slipway_runtime.messages import Request, SamplingParams, Sleep, WakeUp
from slipway_runtime.models.config import ModelRefusedError
from tests.runtime.checkpoints import a_checkpoint
from tests.runtime.engine.test_engine import ask, run

# No token follows itself: prompt lookup finds little, and the draft model has work.
PROMPTS = [[5, 9, 30], list(range(3, 70)), [90, 3], [7, 11, 13, 17, 19, 23]]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    a_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """A smaller model of another family with the same vocabulary, which agrees by chance only."""
    path = tmp_path_factory.mktemp("other")
    a_checkpoint(path, "qwen3", num_hidden_layers=1, hidden_size=32, head_dim=16)
    return path


def an_engine(model: Path, draft: Path | None, **settings: object) -> Engine:
    options = {} if draft is None else {"speculation": "draft", "draft_model": str(draft), "speculation_max_tokens": 4}
    sizes = {"kv_cache_bytes": 1 << 20, "max_num_seqs": 6, "max_num_batched_tokens": 64, "deterministic": True}
    return build_engine(model, **sizes | options | settings)


def texts(engine: Engine, max_tokens: int = 40, **fields: object) -> dict[str, list[int]]:
    for index, prompt in enumerate(PROMPTS):
        ask(engine, f"r{index}", prompt, max_tokens, **fields)
    return run(engine)


def blocks_of_draft(engine: Engine) -> int:
    return engine.stats(0.0).draft_model.blocks_live


@pytest.mark.capability("SD-4", "SD-1", "SD-3")
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.5])
def test_a_draft_model_changes_no_token(model, other, temperature):
    sampled = {"temperature": temperature, "seed": 7, "top_p": 0.95}
    plain = texts(an_engine(model, None), **sampled)
    for draft in (model, other):
        engine = an_engine(model, draft)
        assert texts(engine, **sampled) == plain
        assert engine.stats(0.0).draft_model.draft_tokens > 0
        assert blocks_of_draft(engine) == 0


@pytest.mark.capability("SD-4")
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.5])
def test_a_model_that_drafts_for_itself_accepts_every_token_sampled_ones_too(model, temperature):
    engine = an_engine(model, model)
    texts(engine, temperature=temperature, seed=7, top_p=0.95)
    stats = engine.stats(0.0)
    assert stats.draft_model.accepted_tokens == stats.draft_model.draft_tokens > 50
    assert stats.steps < 30, "40 tokens an answer"


@pytest.mark.capability("SD-4", "PF-21")
def test_a_draft_model_that_is_never_right_soon_computes_nothing(model, other):
    engine = an_engine(model, other)
    for index in range(6):
        ask(engine, f"r{index}", [3 + index, 60 - index], 400)
    run(engine)
    stats = engine.stats(0.0)
    assert stats.draft_model.accepted_tokens < 0.3 * stats.draft_model.draft_tokens
    assert stats.draft_model.passes < 0.3 * stats.steps


@pytest.mark.capability("SD-4", "KV-5")
def test_the_kv_cache_of_the_draft_model_is_part_of_the_pool_s_memory(model, other):
    budget = 1 << 20
    plain, drafting = an_engine(model, None), an_engine(model, other)
    facts, of_draft = drafting.facts, drafting.stats(0.0).draft_model
    assert facts.bytes_per_token == plain.facts.bytes_per_token
    assert facts.draft_bytes_per_token == 2 * 1 * 2 * 16 * 4  # K and V, 1 layer, 2 heads of 16, float32
    assert of_draft.blocks_total == facts.num_blocks < plain.facts.num_blocks
    both = (facts.bytes_per_token + facts.draft_bytes_per_token) * facts.block_size
    assert (facts.num_blocks + 1) * both <= budget < (facts.num_blocks + 2) * both
    assert facts.draft_weight_bytes > 0


@pytest.mark.capability("SD-4", "KV-6", "KV-7")
def test_text_survives_preemption_with_a_draft_model(model):
    wanted = texts(an_engine(model, None), max_tokens=90)
    both = 2 * 2 * 2 * 2 * 12 * 4 * 16
    engine = an_engine(model, model, kv_cache_bytes=15 * both, max_num_batched_tokens=32)
    assert texts(engine, max_tokens=90) == wanted
    assert engine.stats(0.0).preemptions > 0
    assert engine.stats(0.0).draft_model.draft_tokens > 0
    assert blocks_of_draft(engine) == 0


@pytest.mark.capability("SD-4", "API-3")
def test_an_answer_that_another_replica_began_is_continued_with_drafts(model):
    wanted = texts(an_engine(model, None))["r1"]
    engine = an_engine(model, model)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    begun = Request(
        id="r1", prompt_token_ids=tuple(PROMPTS[1]), output_token_ids=tuple(wanted[:17]), params=params, arrived=0.0
    )
    engine.add(begun, 0.0)
    assert run(engine)["r1"] == wanted[17:]
    assert engine.stats(0.0).draft_model.accepted_tokens > 10


@pytest.mark.capability("SD-4", "WP-2")
@pytest.mark.parametrize("level", [1, 2])
def test_a_draft_model_sleeps_and_wakes_with_the_model(model, level):
    engine = an_engine(model, model)
    wanted = texts(engine)
    engine.control(Sleep(call=1, level=level), 0.0)
    assert [reply.error for reply in engine.step(0.0).replies] == [""]
    draft = engine._sleeper.beside._runner
    assert draft.caches == []
    assert hasattr(draft, "decoder") == (level == 1)
    engine.control(WakeUp(call=2), 0.0)
    assert [reply.error for reply in engine.step(0.0).replies] == [""]
    before = engine.stats(0.0).draft_model
    assert texts(engine) == wanted
    after = engine.stats(0.0).draft_model
    assert after.accepted_tokens - before.accepted_tokens == after.draft_tokens - before.draft_tokens > 50


def with_tokenizer(source: Path, folder: Path, **changes: int) -> Path:
    """A copy of a checkpoint with a tokenizer of 97 words, some of them with other ids."""
    shutil.copytree(source, folder)
    vocab = {f"w{index}": index for index in range(97)} | changes
    (folder / "tokenizer.json").write_text(
        json.dumps({
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "post_processor": None, "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                                                "use_regex": True},
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        })
    )  # fmt: skip
    return folder


@pytest.mark.capability("SD-4", "PF-25")
def test_a_draft_model_that_does_not_suit_is_refused_in_a_sentence(model, other, tmp_path):
    wide = tmp_path / "wide"
    a_checkpoint(wide, vocab_size=113)
    target = with_tokenizer(model, tmp_path / "target")
    swapped = with_tokenizer(other, tmp_path / "swapped", w3=4, w4=3)
    narrow = tmp_path / "narrow"
    a_checkpoint(narrow, vocab_size=64)
    narrow = with_tokenizer(narrow, tmp_path / "narrow with a tokenizer")
    for of, draft, sentence in [
        (model, wide, "a vocabulary of 113 tokens, and the model one of 97: choose a draft model"),
        (target, other, "the draft model has no tokenizer.json"),
        (target, swapped, "the draft model has another tokenizer: 2 tokens have other ids or are missing, the first"),
        (target, narrow, "the draft model embeds 64 tokens, and its tokenizer has ids up to 96"),
        (model, tmp_path / "nothing", "the draft model cannot be used: .*config.json"),
    ]:
        with pytest.raises(ModelRefusedError, match=sentence):
            an_engine(of, draft)
    with pytest.raises(ModelRefusedError, match="speculation draft needs a draft model: set --draft-model"):
        build_engine(model, speculation="draft")


@pytest.mark.capability("SD-4")
def test_a_draft_model_with_less_padding_drafts_for_prompts_with_ids_of_the_padding(model, tmp_path):
    padded = tmp_path / "padded"
    a_checkpoint(padded, vocab_size=113)
    target, draft = with_tokenizer(padded, tmp_path / "target"), with_tokenizer(model, tmp_path / "draft")
    prompts = [[5, 110, 30], [112, 3, 4]]
    answers = []
    for engine in (an_engine(target, None), an_engine(target, draft)):
        for index, prompt in enumerate(prompts):
            ask(engine, f"r{index}", prompt, 30)
        answers.append(run(engine))
    assert answers[0] == answers[1]
    assert engine.stats(0.0).draft_model.draft_tokens > 0
