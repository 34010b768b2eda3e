"""The whole engine on random models: the text is that of `transformers`, whatever shares the batch or the memory."""

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from slipway_runtime.engine.build import build_engine
from slipway_runtime.engine.engine import BLOCKS_CHECKED_WHEN_IDLE, Engine
from slipway_runtime.messages import FinishReason, Output, Request, SamplingParams
from slipway_runtime.models.config import ModelRefusedError
from slipway_runtime.scheduling.block_pool import BlockPool
from tests.runtime.checkpoints import a_checkpoint, greedy

TINY = Path(__file__).parents[3] / "models" / "tiny"
BYTES_PER_BLOCK = 2 * 2 * 2 * 12 * 4 * 16  # of the small checkpoint, 16 tokens
PROMPTS = [[5, 9, 30], [11] * 40, [3, 4, 5, 6, 7, 8] * 4, [90, 3], list(range(3, 70)), [11] * 40 + [12]]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory) -> tuple[PreTrainedModel, Path]:
    path = tmp_path_factory.mktemp("llama")
    return a_checkpoint(path), path


def an_engine(path: Path, *, blocks: int = 200, seqs: int = 8, budget: int = 64, **settings: object) -> Engine:
    return build_engine(
        path,
        kv_cache_bytes=(blocks + 1) * BYTES_PER_BLOCK,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        **settings,
    )


def ask(engine: Engine, id: str, prompt: list[int], max_tokens: int = 24, **fields: object) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **{"temperature": 0.0, **fields})
    engine.add(Request(id=id, prompt_token_ids=tuple(prompt), params=params, arrived=0.0), 0.0)


def run(engine: Engine) -> dict[str, list[int]]:
    texts: dict[str, list[int]] = {}
    for _ in range(5000):
        if not engine.has_work:
            engine.idle()
            return texts
        for output in engine.step(0.0).outputs:
            texts.setdefault(output.request_id, []).extend(output.token_ids)
    raise AssertionError("still at work")


@pytest.mark.capability("BS-1", "KV-1")
def test_greedy_text_is_that_of_transformers_alone_and_in_a_batch(oracle):
    model, path = oracle
    engine = an_engine(path)
    wanted = [greedy(model, prompt, 24) for prompt in PROMPTS]
    for prompt, text in zip(PROMPTS, wanted, strict=True):
        ask(engine, "alone", prompt)
        assert run(engine)["alone"] == text
    engine = an_engine(path)
    for index, prompt in enumerate(PROMPTS):
        ask(engine, f"r{index}", prompt)
    assert run(engine) == {f"r{index}": text for index, text in enumerate(wanted)}


@pytest.mark.capability("KV-7", "KV-6")
def test_greedy_text_survives_preemption(oracle):
    model, path = oracle
    engine = an_engine(path, blocks=14, seqs=6, budget=32)
    for index, prompt in enumerate(PROMPTS):
        ask(engine, f"r{index}", prompt, max_tokens=40)
    texts = run(engine)
    assert engine.stats(0.0).preemptions > 0
    assert texts == {f"r{index}": greedy(model, prompt, 40) for index, prompt in enumerate(PROMPTS)}


@pytest.mark.capability("BS-2")
def test_greedy_text_survives_chunks_and_prefix_hits(oracle):
    model, path = oracle
    engine = an_engine(path, budget=9)
    prompt = list(range(3, 90))
    ask(engine, "first", prompt)
    ask(engine, "beside", [7, 7])
    texts = run(engine)
    ask(engine, "again", prompt)
    ask(engine, "longer", [*prompt, 8, 9])
    texts |= run(engine)
    assert engine.stats(0.0).prefix_hits == 80 + 80
    assert texts["first"] == texts["again"] == greedy(model, prompt, 24)
    assert texts["longer"] == greedy(model, [*prompt, 8, 9], 24)
    assert texts["beside"] == greedy(model, [7, 7], 24)


@pytest.mark.capability("BS-1")
def test_sampled_text_depends_on_the_seed_and_on_nothing_beside_it(oracle):
    _, path = oracle
    how = {"temperature": 1.0, "top_p": 0.95, "frequency_penalty": 0.3}
    roomy = an_engine(path)
    alone = {}
    for index, prompt in enumerate(PROMPTS):
        ask(roomy, "alone", prompt, 40, seed=index, **how)
        alone[f"r{index}"] = run(roomy)["alone"]
    tight = an_engine(path, blocks=14, seqs=6, budget=32)
    for index, prompt in enumerate(PROMPTS):
        ask(tight, f"r{index}", prompt, 40, seed=index, **how)
    assert run(tight) == alone
    assert tight.stats(0.0).preemptions > 0
    ask(roomy, "other seed", PROMPTS[0], 40, seed=99, **how)
    assert run(roomy)["other seed"] != alone["r0"]


@pytest.mark.capability("API-4")
def test_ends_where_the_checkpoint_says_and_not_before_min_tokens(oracle):
    model, path = oracle
    text = greedy(model, PROMPTS[0], 30)
    eos = next(token for token in text[3:] if token not in text[:3])
    engine = an_engine(path, extra_eos_token_ids=(eos,))
    assert engine.facts.eos_token_ids == tuple(sorted({2, eos}))

    def outputs(**fields: object) -> list[Output]:
        params = SamplingParams(max_tokens=30, temperature=0.0, **fields)
        engine.add(Request(id="a", prompt_token_ids=tuple(PROMPTS[0]), params=params, arrived=0.0), 0.0)
        found = []
        while engine.has_work:
            found += engine.step(0.0).outputs
        return found

    first = text.index(eos) + 1
    plain = outputs()
    assert [t for o in plain for t in o.token_ids] == text[:first]
    assert (plain[-1].finish_reason, plain[-1].stop_token_id) == (FinishReason.STOP, eos)
    held_back = outputs(min_tokens=first + 2)
    assert len(held_back) >= first + 2
    assert all(eos not in o.token_ids and 2 not in o.token_ids for o in held_back[: first + 1])


@pytest.mark.capability("KV-4")
def test_a_new_engine_is_warm_and_empty(oracle):
    engine = an_engine(oracle[1])
    stats = engine.stats(0.0)
    assert engine.facts.warmup_seconds > 0
    assert (stats.blocks_live, stats.blocks_cached, stats.admitted, stats.steps) == (0, 0, 0, 0)


@pytest.mark.capability("KV-6")
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_model_len": 513}, "max_model_len is 513; this model takes at most 512"),
        ({"blocks": 4, "max_model_len": 200}, "max_model_len is 200, and the KV cache holds 64 tokens"),
        ({"blocks": 1}, "hold 1 blocks of 16 tokens at 384 bytes a token; at least 2"),
        ({"seqs": 9, "budget": 8}, r"max_num_batched_tokens \(8\) is smaller than max_num_seqs \(9\)"),
        ({"dtype": "int3"}, "dtype is 'int3'"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_arithmetic(settings, sentence, oracle):
    with pytest.raises(ModelRefusedError, match=sentence):
        an_engine(oracle[1], **settings)


def test_a_small_pool_shortens_the_context_rather_than_losing_requests(oracle):
    engine = an_engine(oracle[1], blocks=4)
    assert engine.facts.max_model_len == 64
    ask(engine, "a", [5] * 60, max_tokens=100)
    assert len(run(engine)["a"]) == 4


def test_a_sliding_window_forgets_what_lies_before_it(tmp_path):
    model = a_checkpoint(tmp_path, "mistral", sliding_window=24)
    engine = an_engine(tmp_path)
    ask(engine, "a", [5, 6, 7], max_tokens=60)
    ask(engine, "b", [9] * 40, max_tokens=5)
    answers = run(engine)
    assert answers["a"] == greedy(model, [5, 6, 7], 60)
    assert answers["b"] == greedy(model, [9] * 40, 5)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_generates(dtype, oracle):
    engine = an_engine(oracle[1], dtype=dtype)
    ask(engine, "a", PROMPTS[2])
    assert len(run(engine)["a"]) == 24


def test_the_tiny_model_of_the_project_agrees_with_transformers():
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY, dtype="float32").eval()
    engine = build_engine(TINY, kv_cache_bytes=4 << 20)
    prompt = [1, 1146, 1134, 264, 467]
    ask(engine, "a", prompt, max_tokens=40)
    assert run(engine)["a"] == greedy(model, prompt, 40)


@pytest.mark.capability("SE-2")
def test_an_idle_moment_checks_a_part_of_the_pool_and_never_all_of_it(oracle, monkeypatch: pytest.MonkeyPatch):
    """With a large pool, a check of all blocks after each lone request would be a pause of many milliseconds."""
    _, path = oracle
    engine = an_engine(path)
    checked: list[int] = []
    check_next = BlockPool.check_next

    def count(pool: BlockPool, most: int) -> None:
        checked.append(most)
        check_next(pool, most)

    monkeypatch.setattr(BlockPool, "check_next", count)
    monkeypatch.setattr(BlockPool, "check", lambda _: pytest.fail("all blocks were checked"))
    for number in range(3):
        ask(engine, f"r{number}", PROMPTS[0], 2)
        run(engine)

    assert checked == [BLOCKS_CHECKED_WHEN_IDLE] * 3
