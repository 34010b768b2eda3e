"""The whole engine with host memory for cold prefixes: the same text with less computed, whatever else is on."""

from pathlib import Path

import pytest

from slipway_runtime.engine.engine import Engine
from slipway_runtime.messages import (
    LoadAdapter,
    Message,
    Output,
    Reply,
    Request,
    SamplingParams,
    Sleep,
    UnloadAdapter,
    WakeUp,
)
from slipway_runtime.models.adapter_weights import adapter_digest
from slipway_runtime.models.config import DoesNotFitError
from tests.runtime.adapter_folders import an_adapter
from tests.runtime.checkpoints import a_checkpoint
from tests.runtime.engine.test_engine import BYTES_PER_BLOCK, an_engine

HOST = 64 * BYTES_PER_BLOCK
SYSTEM = [7 + (i * i) % 80 for i in range(48)]  # three blocks
# The pool holds twelve: what nobody runs with is evicted each time the other one of two prompts comes.
PROMPTS = [[*SYSTEM, 5, 9], [11 + i % 60 for i in range(150)], [*SYSTEM, 5, 31], [12 + i % 60 for i in range(150)]]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[Path, Path]:
    """A checkpoint, and an adapter of it."""
    path = tmp_path_factory.mktemp("llama")
    oracle = a_checkpoint(path / "base")
    return path / "base", an_adapter(path / "a", oracle, rank=4, alpha=8, seed=1)


def ask(engine: Engine, id: str, prompt: list[int], *, adapter: str = "", max_tokens: int = 12) -> list[Output]:
    """Run one request to its end."""
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=3, ignore_eos=True)
    request = Request(id=id, prompt_token_ids=tuple(prompt), params=params, arrived=0.0, adapter=adapter)
    engine.add(request, 0.0)
    return run(engine)


def run(engine: Engine) -> list[Output]:
    outputs: list[Output] = []
    for _ in range(2000):
        if not engine.has_work:
            engine.idle()
            return outputs
        outputs += engine.step(0.0).outputs
    raise AssertionError("still at work")


def call(engine: Engine, message: Message) -> None:
    """Until it is answered: files are read on a thread of their own."""
    engine.control(message, 0.0)
    replies: list[Reply] = []
    while not replies:
        replies += engine.step(0.0).replies
    assert [reply.error for reply in replies] == [""]


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def story(engine: Engine, adapter: str = "") -> tuple[list[list[int]], list[int]]:
    """What each prompt was answered, and how much of it was found."""
    ends = [ask(engine, f"r{n}", prompt, adapter=adapter) for n, prompt in enumerate([*PROMPTS, *PROMPTS])]
    return [tokens(outputs) for outputs in ends], [outputs[0].cached_tokens for outputs in ends]


@pytest.mark.capability("KV-12")
@pytest.mark.parametrize(
    ("blocks", "settings"),
    [
        (12, {}),
        (12, {"overlap": True}),
        (12, {"deterministic": True}),
        (3, {"overlap": True, "kv_cache_dtype": "int8", "speculation": "promptLookup"}),  # three times as many in fact
    ],
)
def test_the_text_is_the_same_and_all_is_found_that_a_large_pool_would_find(model, blocks, settings):
    base, _ = model
    roomy, found_roomy = story(an_engine(base, blocks=200, **settings))
    without, found_without = story(an_engine(base, blocks=blocks, **settings))
    engine = an_engine(base, blocks=blocks, kv_cache_host_bytes=HOST, **settings)
    texts, found = story(engine)
    stats = engine.stats(0.0)

    assert texts == without == roomy
    assert found == found_roomy != found_without
    assert sum(found) - sum(found_without) <= stats.host_hits <= stats.promotions * 16
    assert 0 < stats.host_blocks <= stats.demotions
    assert stats.host_blocks <= engine.facts.host_blocks


@pytest.mark.capability("KV-12", "KV-7")
def test_under_pressure_who_was_preempted_goes_on_with_what_it_had(model):
    base, _ = model

    def texts(**settings: object) -> tuple[dict[str, list[int]], Engine]:
        engine = an_engine(base, seqs=6, budget=32, deterministic=True, **settings)
        for number in range(6):
            params = SamplingParams(max_tokens=40, temperature=1.0, seed=number, ignore_eos=True)
            prompt = (*SYSTEM[: 10 + 6 * number], number + 3)
            engine.add(Request(id=f"r{number}", prompt_token_ids=prompt, params=params, arrived=0.0), 0.0)
        told: dict[str, list[int]] = {}
        for output in run(engine):
            told.setdefault(output.request_id, []).extend(output.token_ids)
        return told, engine

    wanted, _ = texts(blocks=200)
    given, engine = texts(blocks=12, kv_cache_host_bytes=HOST)
    assert given == wanted
    stats = engine.stats(0.0)
    assert stats.preemptions > 0
    assert stats.promotions > 0


@pytest.mark.capability("KV-12", "ML-5")
def test_what_an_adapter_computed_comes_back_for_it_alone_and_leaves_with_it(model):
    base, folder = model
    digest = adapter_digest(folder)
    load = LoadAdapter(call=1, digest=digest, path=str(folder))

    def loaded(**settings: object) -> Engine:
        engine = an_engine(base, max_adapters=1, max_rank=4, **settings)
        call(engine, load)
        return engine

    wanted, _ = story(loaded(blocks=200), adapter=digest)
    engine = loaded(blocks=16, kv_cache_host_bytes=HOST)
    texts, _ = story(engine, adapter=digest)
    assert texts == wanted
    assert engine.stats(0.0).host_hits > 0
    assert ask(engine, "base", PROMPTS[0])[0].cached_tokens == 0

    held = engine.stats(0.0).host_blocks
    call(engine, UnloadAdapter(call=2, digest=digest))
    stats = engine.stats(0.0)
    assert (stats.host_blocks < held, stats.invalid_kv_blocks) == (True, 0)
    call(engine, load)
    assert ask(engine, "again", PROMPTS[0], adapter=digest)[0].cached_tokens == 0


@pytest.mark.capability("KV-12", "ST-7")
@pytest.mark.parametrize("level", [1, 2])
def test_asleep_it_holds_no_memory_and_afterwards_it_works_as_before(model, level):
    engine = an_engine(model[0], blocks=12, kv_cache_host_bytes=HOST)
    before, found = story(engine)
    arena = engine._sleeper._runner.host  # type: ignore[union-attr]
    assert arena.nbytes == HOST
    call(engine, Sleep(call=1, level=level))
    assert arena.nbytes == engine.stats(0.0).host_blocks == 0
    call(engine, WakeUp(call=2))
    assert story(engine) == (before, found)


@pytest.mark.capability("KV-12")
def test_off_unless_asked_and_a_size_that_cannot_be_is_refused(model):
    base, _ = model
    engine = an_engine(base, blocks=12)
    assert (engine.facts.host_blocks, engine.stats(0.0).host_active) == (0, False)
    with pytest.raises(DoesNotFitError, match="100 bytes of host memory hold no KV block of 6144 bytes"):
        an_engine(base, blocks=12, kv_cache_host_bytes=100)
    with pytest.raises(DoesNotFitError, match="are requested for cold KV blocks, and"):
        an_engine(base, blocks=12, kv_cache_host_bytes=1 << 60)
