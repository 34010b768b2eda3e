"""A deterministic engine gives a request the same tokens in any company, over a preemption, and taken up elsewhere."""

import random
from pathlib import Path

import pytest

from slipway_runtime.engine.engine import Engine
from slipway_runtime.messages import Request, SamplingParams
from tests.runtime.checkpoints import a_checkpoint
from tests.runtime.engine.test_engine import PROMPTS, an_engine, run

LENGTH = 40


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    where = tmp_path_factory.mktemp("llama")
    a_checkpoint(where)
    return where


def ask(
    engine: Engine, id: str, prompt: list[int], seed: int, known: tuple[int, ...] = (), *, tokens: int = LENGTH
) -> None:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=1.0, seed=seed)
    engine.add(Request(id=id, prompt_token_ids=tuple(prompt), params=params, arrived=0.0, output_token_ids=known), 0.0)


@pytest.mark.capability("API-19")
def test_the_same_request_gives_the_same_tokens_alone_preempted_and_resumed(path):
    roomy = an_engine(path, deterministic=True)
    alone = []
    for seed, prompt in enumerate(PROMPTS):
        ask(roomy, "alone", prompt, seed)
        alone.append(run(roomy)["alone"])
    assert roomy.facts.deterministic

    tight = an_engine(path, blocks=14, seqs=6, budget=32, deterministic=True)
    for seed, prompt in enumerate(PROMPTS):
        ask(tight, f"r{seed}", prompt, seed)
    assert run(tight) == {f"r{seed}": text for seed, text in enumerate(alone)}
    assert tight.stats(0.0).preemptions > 0

    for at in range(1, LENGTH, 6):  # taken up by another replica, all at once
        for seed, (prompt, text) in enumerate(zip(PROMPTS, alone, strict=True)):
            ask(roomy, f"r{seed}", prompt, seed, tuple(text[:at]))
        assert run(roomy) == {f"r{seed}": text[at:] for seed, text in enumerate(alone)}


@pytest.mark.capability("API-19")
def test_a_thousand_answers_that_are_split_anywhere_and_resumed_are_the_undisturbed_ones(path):
    """Fifty prompts, each taken up by another engine after each of 20 tokens, in one batch of 32 rows."""
    draw = random.Random(11)
    prompts = [[draw.randrange(3, 90) for _ in range(draw.randrange(1, 40))] for _ in range(50)]
    first, other = (an_engine(path, blocks=400, seqs=32, budget=128, deterministic=True) for _ in range(2))
    for number, prompt in enumerate(prompts):
        ask(first, str(number), prompt, number, tokens=21)
    undisturbed = run(first)
    splits = [(number, at) for number in range(len(prompts)) for at in range(1, 21)]
    draw.shuffle(splits)
    assert len(splits) == 1000
    for number, at in splits:
        ask(other, f"{number}/{at}", prompts[number], number, tuple(undisturbed[str(number)][:at]), tokens=21)
    assert run(other) == {f"{number}/{at}": undisturbed[str(number)][at:] for number, at in splits}


@pytest.mark.capability("API-19")
def test_a_hundred_runs_in_company_drawn_anew_give_the_same_tokens(path):
    """Other requests, other chunks of their prompts, other rows and blocks, and preemptions when memory is short."""
    draw = random.Random(7)
    engines = [an_engine(path, deterministic=True), an_engine(path, blocks=14, seqs=6, budget=32, deterministic=True)]
    prompt = PROMPTS[0]
    ask(engines[0], "alone", prompt, 3)
    alone = run(engines[0])["alone"]
    for number in range(100):
        engine = engines[number % 2]
        company = [[draw.randrange(3, 90) for _ in range(draw.randrange(1, 60))] for _ in range(draw.randrange(5))]
        place = draw.randrange(len(company) + 1)
        for index, other in enumerate([*company[:place], prompt, *company[place:]]):
            ask(engine, "audited" if index == place else f"beside {index}", other, 3 if index == place else index)
        assert run(engine)["audited"] == alone, f"run {number}"
    assert engines[1].stats(0.0).preemptions > 0
