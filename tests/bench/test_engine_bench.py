"""What a benchmark of engines reports: prefill and decode apart, and never a batch of one alone."""

import random

import pytest
from tokenizers import Tokenizer

from bench import engine, runtime
from bench.peers import waves, with_slipway
from bench.prompts import prompt
from bench.servers import EMBEDDED_MODEL
from bench.shapes import SHAPES, linear_sizes
from bench.workload import MIXED_MIX
from slipway_runtime.engine.build import build_engine
from slipway_runtime.messages import Request, SamplingParams
from tests.runtime.checkpoints import a_checkpoint


@pytest.mark.capability("PF-27")
def test_prefill_and_decode_are_told_apart():
    """Counted on a clock of its own: 2 units a prefill, 1 a token."""
    clock = iter(range(10_000))

    def wave(prompts, max_tokens, tick):
        for _ in range(2):
            next(clock)
        for _ in range(max_tokens):
            for index in range(len(prompts)):
                tick(index)

    task = {"concurrency": 3, "prompt_tokens": 10, "max_tokens": 4, "rounds": 2}
    result = waves.drive(task, wave, clock=lambda: float(next(clock)))

    # A wave: begins at 0, two units of prefill, then a unit for each reading of the clock: 3 first tokens, 9 others.
    assert len(result["ttft"]) == 6
    assert len(result["gaps"]) == 2 * 3 * 3
    assert result["prefill_tokens_per_second"] == pytest.approx(2 * 3 * 10 / (2 * 5))
    assert result["decode_tokens_per_second"] == pytest.approx(2 * 3 * 3 / (2 * 10))
    assert result["tokens_per_second"] == pytest.approx(2 * 3 * 4 / (2 * 15))


def test_an_engine_that_stops_short_is_not_measured():
    def lazy(prompts, max_tokens, tick):
        for index in range(len(prompts)):
            tick(index)

    with pytest.raises(AssertionError, match="asked length"):
        waves.drive({"concurrency": 2, "prompt_tokens": 4, "max_tokens": 3, "rounds": 1}, lazy)


@pytest.mark.capability("PF-1")
@pytest.mark.parametrize("users", sorted({case[2] for case in engine.CASES}))
def test_the_concurrency_that_the_benchmark_names_is_the_batch_that_the_engine_computes(users, tmp_path):
    a_checkpoint(tmp_path, vocab_size=4096)
    task = {
        "checkpoint": str(tmp_path),
        "weights": "none",
        "dtype": "fp32",
        "threads": 1,
        "concurrency": users,
        "prompt_tokens": 16,
        "max_tokens": 40,
        "rounds": 1,
    }
    result = waves.drive(task, with_slipway.open_engine(task))

    assert result["at_once"] == users
    assert len(result["ttft"]) == users


def test_a_peer_that_computes_one_after_another_is_seen():
    def one_by_one(prompts, max_tokens, tick):
        for index in range(len(prompts)):
            for _ in range(max_tokens):
                tick(index)

    task = {"concurrency": 8, "prompt_tokens": 4, "max_tokens": 3, "rounds": 1}
    assert waves.drive(task, one_by_one)["at_once"] == 1


@pytest.mark.capability("PF-1")
def test_a_batch_of_one_is_always_beside_production_concurrency():
    assert max(runtime.CONCURRENCY) >= 32
    for length in {case[0] for case in engine.CASES}:
        assert max(case[2] for case in engine.CASES if case[0] == length) >= 32


def test_the_floor_multiplies_every_weight_of_the_shape():
    parameters = sum(out * size for out, size in linear_sizes("135m"))

    assert parameters == pytest.approx(134.5e6, rel=0.01)
    assert set(SHAPES) == {"135m", "0.6b"}


@pytest.mark.capability("PF-28")
def test_chats_are_answered_while_a_prompt_of_50_000_tokens_is_computed(tmp_path):
    """The benchmark's mix at its real lengths on the real engine; the model is as small as it can be."""
    a_checkpoint(
        tmp_path,
        vocab_size=3072,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=65_536,
    )
    served = build_engine(tmp_path, max_num_seqs=8, max_num_batched_tokens=2048, kv_cache_bytes=32 << 20, threads=1)
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    draw = random.Random(3)
    chat, long_prompt = MIXED_MIX
    for number, share in enumerate((long_prompt, *[chat] * 6)):
        tokens = tuple(tokenizer.encode(prompt(draw, share.words(draw))).ids)
        params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
        served.add(Request(id=f"{number}/{len(tokens)}", prompt_token_ids=tokens, params=params, arrived=0.0), 0.0)
    ended, answered, steps = [], {}, 0
    while served.has_work:
        steps += 1
        for output in served.step(0.0).outputs:
            answered.setdefault(output.request_id, steps)
            ended += [output.request_id] if output.finish_reason else []

    lengths = [int(one.partition("/")[2]) for one in ended]
    assert len(lengths) == 7
    assert max(lengths[:-1]) < 80, "the chats go on and end meanwhile"
    assert max(answered[chat] for chat in ended[:-1]) <= 3, "and none waits for the long prompt, which came first"
    assert 50_000 <= lengths[-1] <= 65_520
