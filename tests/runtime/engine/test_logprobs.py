"""What the engine tells about likelihoods, and seeds of several answers, from request to output."""

import pytest
import torch

from slipway_runtime.engine.engine import Engine
from slipway_runtime.messages import Output, Request, SamplingParams
from tests.runtime.checkpoints import a_checkpoint
from tests.runtime.engine.test_engine import an_engine

PROMPT = tuple(range(3, 70))


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    return a_checkpoint(path), path


def outputs(engine: Engine, *requests: Request) -> dict[tuple[str, int], list[Output]]:
    for request in requests:
        engine.add(request, 0.0)
    found: dict[tuple[str, int], list[Output]] = {}
    for _ in range(2000):
        if not engine.has_work:
            return found
        for output in engine.step(0.0).outputs:
            found.setdefault((output.request_id, output.index), []).append(output)
    raise AssertionError("still at work")


def a_request(id: str, prompt: tuple[int, ...] = PROMPT, n: int = 1, **params: object) -> Request:
    how = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **params})
    return Request(id=id, prompt_token_ids=prompt, params=how, arrived=0.0, n=n)


def tokens(answer: list[Output]) -> list[int]:
    return [token for output in answer for token in output.token_ids]


@pytest.mark.capability("API-11")
@pytest.mark.parametrize("blocks", [200, 14], ids=["roomy", "preempting"])
def test_a_prompt_is_scored_whole_though_its_prefix_is_cached_and_only_once(blocks, oracle):
    model, path = oracle
    engine = an_engine(path, budget=16, blocks=blocks, seqs=4)
    outputs(engine, a_request("before"))
    found = outputs(
        engine,
        *(a_request(f"beside {i}", (5, 6, 7, i), max_tokens=60) for i in range(2)),
        a_request("scored", prompt_logprobs=2, n=2, max_tokens=40),
    )
    assert (engine.stats(0.0).preemptions > 0) == (blocks == 14)
    first, *rest = found["scored", 0]
    with torch.no_grad():
        wanted = model(torch.tensor([PROMPT])).logits[0].float().log_softmax(-1)
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert [one.token_id for one in first.prompt_logprobs[1:]] == list(PROMPT[1:])
    for position, one in enumerate(first.prompt_logprobs[1:]):
        assert one.logprob == pytest.approx(wanted[position, one.token_id].item(), abs=1e-3)
        assert len(one.top) == 2
    assert all(output.prompt_logprobs is None for output in rest)
    told = [output.prompt_logprobs for output in found["scored", 1] if output.prompt_logprobs is not None]
    assert told in ([], [first.prompt_logprobs]), "another answer says the same, or nothing"


@pytest.mark.capability("API-11")
def test_answers_of_one_request_draw_with_seeds_that_follow_each_other(oracle):
    _, path = oracle
    engine = an_engine(path)
    found = outputs(engine, a_request("many", n=3, seed=40, temperature=1.0))
    for index in range(3):
        alone = outputs(engine, a_request("one", seed=40 + index, temperature=1.0))
        assert tokens(found["many", index]) == tokens(alone["one", 0])
    assert len({tuple(tokens(found["many", index])) for index in range(3)}) == 3


@pytest.mark.capability("API-11", "SD-3")
def test_logprobs_and_draws_are_the_same_with_prompt_lookup(oracle):
    _, path = oracle
    copying = (5, 6, 7, 8, 9, 10) * 6
    ways = {
        "greedy": {"temperature": 0.0, "logprobs": 3},
        "sampled": {"temperature": 0.4, "seed": 11, "logprobs": 0},
        "penalized": {"temperature": 0.3, "seed": 2, "frequency_penalty": 0.4, "logit_bias": ((5, 3.0),)},
    }
    plain, drafting = an_engine(path), an_engine(path, speculation="promptLookup", speculation_max_tokens=4)
    one, other = (
        outputs(engine, *(a_request(id, copying, max_tokens=40, **way) for id, way in ways.items()))
        for engine in (plain, drafting)
    )
    assert drafting.stats(0.0).draft_tokens > 0
    for id, way in ways.items():
        assert tokens(one[id, 0]) == tokens(other[id, 0])
        for answers in (one, other):
            told = [entry for output in answers[id, 0] for entry in output.logprobs]
            wanted = tokens(answers[id, 0]) if "logprobs" in way else []
            assert [entry.token_id for entry in told] == wanted
            assert all(len(entry.top) == way["logprobs"] for entry in told)
