"""Drafts change how many steps a text takes, and nothing else: the same tokens, whatever is drafted."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from slipway_runtime.messages import NewSequence, SamplingParams, SchedulerOutput, TokenLogprobs
from slipway_runtime.worker.inputs import prepare_inputs
from slipway_runtime.worker.sampler import kept_logprobs, kept_tokens
from tests.runtime.checkpoints import a_checkpoint
from tests.runtime.models.logits import BLOCK, CPU, Bench

PROMPT = [5, 9, 30, 8, 7, 6, 11]
LENGTH = 24
WAYS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.2, "seed": 3},
    "truncated": {"temperature": 1.0, "top_p": 0.8, "top_k": 30, "seed": 4},
    "penalized": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    "held back": {"temperature": 0.7, "seed": 6, "min_tokens": 20, "stop_token_ids": tuple(range(3, 60)),
                  "logit_bias": ((70, 2.0),)},
}  # fmt: skip
Guess = Callable[[list[int]], list[int]]


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    path = tmp_path_factory.mktemp("llama")
    a_checkpoint(path)
    return Bench(path)


class InputBatch:
    """Rows of a worker that go on together, each with draft tokens of its own."""

    def __init__(self, bench: Bench, *ways: dict[str, object]) -> None:
        self.runner = bench.runner
        self.texts = [list(PROMPT) for _ in ways]
        self.logprobs: list[list[TokenLogprobs]] = [[] for _ in ways]
        self.steps = 0
        self._execute(
            SchedulerOutput(
                step=1,
                new_rows=tuple(
                    NewSequence(row=row, token_ids=tuple(PROMPT), num_prompt_tokens=len(PROMPT),
                           params=SamplingParams(max_tokens=99, **way))
                    for row, way in enumerate(ways)
                ),
                rows=tuple(range(len(ways))),
                num_computed=(0,) * len(ways),
                num_new=(len(PROMPT),) * len(ways),
                new_blocks=tuple(tuple(range(1 + row * 20, 21 + row * 20)) for row in range(len(ways))),
                samples=(True,) * len(ways),
            )
        )  # fmt: skip

    def go_on(self, *drafted: Guess) -> None:
        """Until each row has its length; a row that has it waits."""
        while rows := [row for row, text in enumerate(self.texts) if len(text) < len(PROMPT) + LENGTH]:
            drafts = {row: drafted[row](self.texts[row]) for row in rows}
            rows.sort(key=lambda row: len(drafts[row]) > 0)  # rows of one new token come first
            self._execute(
                SchedulerOutput(
                    step=1,
                    rows=tuple(rows),
                    num_computed=tuple(len(self.texts[row]) - 1 for row in rows),
                    num_new=tuple(1 + len(drafts[row]) for row in rows),
                    new_blocks=((),) * len(rows),
                    samples=(True,) * len(rows),
                    drafts=tuple(tuple(drafts[row]) for row in rows) if any(drafts.values()) else (),
                )
            )

    def _execute(self, plan: SchedulerOutput) -> None:
        self.steps += 1
        result = self.runner.execute(plan)
        for place, row in enumerate(plan.rows):
            self.texts[row] += result.token_ids[place]
            self.logprobs[row] += result.logprobs[place] if result.logprobs else ()

    def output(self, row: int = 0) -> list[int]:
        return self.texts[row][len(PROMPT) : len(PROMPT) + LENGTH]


def no_guess(text: list[int]) -> list[int]:
    return []


def oracle(right: list[int], count: int) -> Guess:
    return lambda text: right[len(text) - len(PROMPT) :][:count]


def gambler(right: list[int], seed: int) -> Guess:
    """Guesses of 0 to 5 tokens, each right three times in four."""
    random = np.random.default_rng(seed)

    def draft(text: list[int]) -> list[int]:
        ahead = oracle(right, int(random.integers(0, 6)))(text)
        return [token if random.random() < 0.75 else int(random.integers(3, 97)) for token in ahead]

    return draft


@pytest.mark.capability("SD-1", "SD-3")
def test_the_text_is_the_same_with_any_draft_tokens_row_by_row_in_one_batch(bench):
    ways = list(WAYS.values())
    plain = InputBatch(bench, *ways)
    plain.go_on(*[no_guess] * len(ways))
    assert plain.steps == LENGTH
    for seed in (1, 2):
        drafted = InputBatch(bench, *ways)
        drafted.go_on(*(gambler(plain.output(row), seed + row) for row in range(len(ways))))
        for row, name in enumerate(WAYS):
            assert drafted.output(row) == plain.output(row), name
        assert drafted.steps < LENGTH


@pytest.mark.capability("SD-1")
def test_right_draft_tokens_are_all_kept_and_wrong_ones_cost_no_token(bench):
    plain = InputBatch(bench, WAYS["greedy"])
    plain.go_on(no_guess)
    told = InputBatch(bench, WAYS["greedy"])
    told.go_on(oracle(plain.output(), 5))
    assert told.output() == plain.output()
    assert told.steps == 1 + math.ceil((LENGTH - 1) / 6)
    misled = InputBatch(bench, WAYS["greedy"])
    misled.go_on(lambda text: [(token + 1) % 97 for token in oracle(plain.output(), 4)(text)])
    assert (misled.output(), misled.steps) == (plain.output(), plain.steps)


@pytest.mark.capability("SD-1", "API-11")
def test_logprobs_of_kept_draft_tokens_are_those_of_single_steps(bench):
    way = {"temperature": 1.0, "seed": 8, "logprobs": 2}
    plain = InputBatch(bench, way, {})
    plain.go_on(no_guess, no_guess)
    drafted = InputBatch(bench, way, {})
    drafted.go_on(gambler(plain.output(), 5), gambler(plain.output(1), 6))
    assert len(drafted.logprobs[0]) == len(drafted.texts[0]) - len(PROMPT)
    assert drafted.logprobs[1] == []
    for mine, theirs in zip(drafted.logprobs[0], plain.logprobs[0], strict=False):
        assert (mine.token_id, mine.rank) == (theirs.token_id, theirs.rank)
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@pytest.mark.capability("SD-3")
def test_tokens_after_draft_tokens_have_the_distribution_of_the_model(bench):
    """Chi-square over seeds: of the token that verifies a draft token, and of the one after an accepted draft."""
    temperature, seeds, at_once = 1.5, 3000, 5
    draft = int(scores_after(bench, PROMPT).argmax())
    first, second = np.zeros(97), np.zeros(97)
    InputBatch(bench, *({},) * at_once)  # computes the prompt into the blocks of each
    for some in range(0, seeds, at_once):
        plan = SchedulerOutput(
            step=1,
            new_rows=tuple(
                NewSequence(row=row, token_ids=tuple(PROMPT), num_prompt_tokens=len(PROMPT),
                       params=SamplingParams(max_tokens=9, temperature=temperature, seed=some + row))
                for row in range(at_once)
            ),
            rows=tuple(range(at_once)),
            num_computed=(len(PROMPT) - 1,) * at_once,
            num_new=(2,) * at_once,
            new_blocks=tuple(tuple(range(1 + row * 20, 21 + row * 20)) for row in range(at_once)),
            samples=(True,) * at_once,
            drafts=((draft,),) * at_once,
        )  # fmt: skip
        for tokens in bench.runner.execute(plan).token_ids:
            assert (len(tokens) == 2) == (tokens[0] == draft)
            first[tokens[0]] += 1
            if len(tokens) == 2:
                second[tokens[1]] += 1
    assert 100 < second.sum() < seeds - 100, "both happen"
    assert_fits(first, (scores_after(bench, PROMPT) / temperature).softmax(-1))
    assert_fits(second, (scores_after(bench, [*PROMPT, draft]) / temperature).softmax(-1))


def scores_after(bench: Bench, tokens: list[int]) -> torch.Tensor:
    """Of the next token; the first row's blocks hold the prompt afterwards."""
    plan = SchedulerOutput(
        step=1,
        new_rows=(
            NewSequence(row=0, token_ids=tuple(tokens), num_prompt_tokens=1, params=SamplingParams(max_tokens=1)),
        ),
        rows=(0,),
        num_computed=(0,),
        num_new=(len(tokens),),
        new_blocks=(tuple(range(1, 21)),),
        samples=(True,),
    )
    with torch.inference_mode():
        bench.runner._rows.update_states(plan)
        return bench.runner.logits(bench.runner.hidden(prepare_inputs(plan, bench.runner._rows, BLOCK, CPU)))[-1]


def assert_fits(counts: np.ndarray, probabilities: torch.Tensor) -> None:
    """Pearson's test; tokens that are expected fewer than five times count together."""
    expected = probabilities.numpy() * counts.sum()
    common = expected >= 5
    got = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    statistic, freedom = ((got - wanted) ** 2 / wanted).sum(), len(got) - 1
    assert freedom > 3
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)  # four standard deviations


def test_what_is_kept_ends_with_the_first_draw_that_was_not_guessed():
    plan = SchedulerOutput(
        step=1, rows=(4, 2, 0, 1), samples=(True, False, True, True), drafts=((), (), (7, 8), (5, 6))
    )
    kept = kept_tokens(plan, [3, 7, 9, 1, 5, 6, 4])
    assert kept == ((3,), (), (7, 9), (5, 6, 4))
    ones = [None, *(TokenLogprobs(token, -1.0, 1) for token in (7, 9, 1)), None, None, None]
    assert kept_logprobs(plan, ones, kept) == ((), (), (ones[1], ones[2]), ())
    assert kept_logprobs(plan, (), kept) == ()
