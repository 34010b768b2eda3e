"""The order of sampling: grammar, bias, min_tokens, penalties, temperature and filters; and the logprobs before it."""

import math

import numpy as np
import pytest
import torch

from slipway_runtime.kernels import reference, reference_sampling
from slipway_runtime.messages import NewSequence, SamplingParams, SchedulerOutput, TokenMasks
from slipway_runtime.worker import sampler
from slipway_runtime.worker.input_batch import InputBatch
from slipway_runtime.worker.sampler import SampledTokens, Sampler

V, EOS = 40, 2


def masks(allowed: dict[int, set[int]], vocab_size: int = V) -> TokenMasks:
    """Of some samples: what each may sample."""
    words = np.zeros((len(allowed), -(-vocab_size // 32)), dtype="<u4")
    for place, tokens in enumerate(allowed.values()):
        for token in tokens:
            words[place, token // 32] |= np.uint32(1 << token % 32)
    return TokenMasks(tuple(allowed), words.tobytes())


class Draws:
    """Rows 0, 1, … with the given parameters, each with the prompt 3 4 5, sampled the token after it."""

    def __init__(self, *params: dict[str, object], grammar: tuple[int, ...] = (), output: tuple[int, ...] = ()) -> None:
        self.rows = InputBatch(max_num_seqs=8, max_model_len=30, max_blocks=2)
        self.sampler = Sampler(self.rows, (EOS,), reference)
        new = tuple(
            NewSequence(row=row, token_ids=(3, 4, 5, *output), num_prompt_tokens=3, grammar=row in grammar,
                   params=SamplingParams(**{"max_tokens": 9, "temperature": 0.0, **fields}))
            for row, fields in enumerate(params)
        )  # fmt: skip
        self.rows.update_states(SchedulerOutput(step=1, new_rows=new))
        self.row_ids = np.arange(len(params))
        self.positions = np.full(len(params), 3 + len(output))

    def __call__(self, logits: torch.Tensor, allowed: TokenMasks | None = None) -> SampledTokens:
        return self.sampler(logits.clone(), self.row_ids, self.positions, lambda: allowed).read()


def scores(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))


@pytest.mark.capability("API-6")
def test_no_bias_brings_back_what_a_grammar_forbids():
    bias = tuple((token, 100.0) for token in range(V) if token != 7)
    for temperature in (0.0, 2.0):
        samples = Draws({"temperature": temperature, "logit_bias": bias}, grammar=(0,))
        assert samples(scores(), masks({0: {7}})).token_ids.tolist() == [7]


@pytest.mark.capability("API-6")
def test_bias_is_added_before_penalties_and_temperature():
    logits = torch.zeros(1, V)
    logits[0, [10, 11]] = torch.tensor([3.0, 1.0])
    assert Draws({"logit_bias": ((11, 2.5),)})(logits).token_ids.tolist() == [11]
    assert Draws({"logit_bias": ((10, -100.0),)})(logits).token_ids.tolist() == [11]
    # 1 + 2.5, halved for having been said, is less than 3: the repetition penalty sees the biased score
    said = Draws({"logit_bias": ((11, 2.5),), "repetition_penalty": 2.0}, output=(11,))
    assert said(logits).token_ids.tolist() == [10]
    # A token with all of the mass under the bias comes at any temperature below ours.
    assert Draws({"logit_bias": ((20, 100.0),), "temperature": 2.0})(logits).token_ids.tolist() == [20]


@pytest.mark.capability("API-6")
def test_min_tokens_forbids_ends_even_against_a_bias_until_only_ends_are_left():
    logits = scores()
    logits[0, EOS] = 50.0
    held = {"min_tokens": 3, "logit_bias": ((EOS, 100.0), (30, 100.0)), "stop_token_ids": (30,)}
    assert Draws(held)(logits).token_ids[0] not in (EOS, 30)
    assert Draws(held, output=(8, 8))(logits).token_ids.tolist() == [EOS]
    assert Draws(held, grammar=(0,))(logits, masks({0: {EOS}})).token_ids.tolist() == [EOS]
    assert Draws(held, grammar=(0,))(logits, masks({0: {EOS, 9}})).token_ids.tolist() == [9]


def test_ids_beyond_the_vocabulary_do_no_harm():
    wild = {"logit_bias": ((V + 5, 100.0),), "stop_token_ids": (V + 7,), "min_tokens": 2, "frequency_penalty": 0.1}
    samples = Draws(wild, output=(V + 3,))
    assert samples(scores()).token_ids.tolist() == scores().argmax(-1).tolist()


@pytest.mark.capability("SO-1")
def test_a_bound_row_without_a_mask_may_only_end():
    samples = Draws({}, {}, {"temperature": 1.5}, grammar=(0, 1))
    sampled = samples(scores(3), masks({0: {9, 12}})).token_ids
    assert sampled[0] in (9, 12)
    assert sampled[1] == EOS
    assert samples(scores(3), None).token_ids[:2].tolist() == [EOS, EOS]


def test_masks_narrower_and_wider_than_the_scores():
    for size in (32, 33, 40, 64, 96):
        allowed = masks({0: {5, size - 1}}, size)
        sampled = Draws({"temperature": 9.0}, grammar=(0,))(scores(), allowed).token_ids[0]
        assert sampled in {5, size - 1} & set(range(V))


@pytest.mark.capability("API-6")
def test_masked_rows_draw_from_the_rest_of_the_distribution():
    logits, allowed = scores() * 2, {1, 8, 20, 33}
    counts = np.zeros(V)
    samples = Draws({"temperature": 1.3, "top_p": 0.99, "seed": 5}, grammar=(0,))
    for position in range(3, 1503):
        samples.positions[:] = position % 25
        samples.rows.seed[0] = position
        counts[samples(logits, masks({0: allowed})).token_ids[0]] += 1
    wanted = torch.full((V,), -math.inf)
    wanted[list(allowed)] = logits[0, list(allowed)] / 1.3
    assert set(np.flatnonzero(counts)) <= allowed
    assert np.abs(counts / 1500 - wanted.softmax(-1).numpy()).max() < 4 * math.sqrt(0.25 / 1500)


@pytest.mark.capability("API-11")
def test_logprobs_are_those_of_the_raw_scores():
    logits = scores(4, seed=3)
    changed = {"temperature": 3.0, "top_k": 5, "presence_penalty": 1.0, "logit_bias": ((7, 4.0),), "seed": 3}
    sampled = Draws({"logprobs": 3}, {"logprobs": 0, **changed}, {}, {"logprobs": 1, **changed})(logits)
    raw = logits.log_softmax(-1)
    for row, count in ((0, 3), (1, 0), (3, 1)):
        one = sampled.logprobs[row]
        assert one.token_id == sampled.token_ids[row]
        assert one.logprob == pytest.approx(raw[row, one.token_id].item(), abs=1e-6)
        assert one.rank == 1 + int((raw[row] > raw[row, one.token_id]).sum())
        best = raw[row].topk(count)
        assert [token for token, _ in one.top] == best.indices.tolist()
        assert [logprob for _, logprob in one.top] == pytest.approx(best.values.tolist(), abs=1e-6)
    assert sampled.logprobs[2] is None
    assert sampled.logprobs[3].top[0][0] == logits[3].argmax(), "the likeliest is there though another one was sampled"
    assert sampled.logprobs[3].rank > 1


@pytest.mark.capability("API-11")
def test_logprobs_of_a_bound_row_are_shared_among_what_is_allowed():
    logits = scores()
    one = Draws({"logprobs": 10}, grammar=(0,))(logits, masks({0: {4, 9}})).logprobs[0]
    assert {token for token, _ in one.top} == {4, 9}
    assert sum(math.exp(logprob) for _, logprob in one.top) == pytest.approx(1.0)
    assert one.rank == 1


def test_a_plain_greedy_batch_asks_for_nothing_but_the_likeliest():
    samples = Draws({}, {})
    logits = scores(2)

    def never() -> None:
        raise AssertionError("no grammar binds these rows")

    sampled = samples.sampler(logits, samples.row_ids, samples.positions, never).read()
    assert (sampled.token_ids.tolist(), sampled.logprobs) == (logits.argmax(-1).tolist(), ())


@pytest.mark.capability("API-6")
@pytest.mark.parametrize("at_once", [1, 2 * V, 100 * V])
def test_penalties_of_many_rows_in_parts_are_those_of_each_row_alone(at_once, monkeypatch):
    """Finding 16: what is needed beside the scores is bounded, however many rows are penalized."""
    monkeypatch.setattr(reference_sampling, "PENALIZED_AT_ONCE", at_once)
    monkeypatch.setattr(sampler, "PENALIZED_AT_ONCE", at_once)
    how = [{"repetition_penalty": 5.0}, {}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {}]
    logits = scores(len(how), seed=4).abs() + torch.nn.functional.one_hot(torch.tensor([3, 9, 6, 6, 5]), V) * 1.0
    together = Draws(*how, output=(6, 6, 9))(logits)
    for row, one in enumerate(how):
        alone = Draws(one, output=(6, 6, 9))(logits[row : row + 1])
        assert alone.token_ids.tolist() == together.token_ids[row : row + 1].tolist()
