"""A prompt's own logprobs are those of `transformers`, in any chunks, and cost memory for a tile of rows only."""

import pytest
import torch

from slipway_runtime.messages import NewSequence, SamplingParams, SchedulerOutput, TokenLogprobs
from tests.runtime.checkpoints import a_checkpoint
from tests.runtime.models.logits import Bench, oracle, some_tokens

PROMPT = some_tokens(23, seed=1)
OTHER = some_tokens(9, seed=2)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    return a_checkpoint(path), Bench(path)


def chunks(bench: Bench, sizes: list[int], count: int, output: tuple[int, ...] = ()) -> list[tuple[TokenLogprobs, ...]]:
    """Compute the prompt in row 0 in chunks, beside a row that only samples and one that asks for nothing."""
    told, computed = [], 0
    tokens = (*PROMPT, *output)
    for size in sizes:
        rows = [2, 0, 1] if size == 1 else [2, 1, 0]
        params = {0: SamplingParams(max_tokens=3, prompt_logprobs=count), 1: SamplingParams(max_tokens=3),
                  2: SamplingParams(max_tokens=3, prompt_logprobs=0, logprobs=1)}  # fmt: skip
        text = {0: tokens, 1: tuple(OTHER), 2: tuple(OTHER)}
        start = {0: computed, 1: 0, 2: len(OTHER) - 1}
        end = {0: computed + size, 1: 4, 2: len(OTHER)}
        new = [row for row in rows if row or not computed]
        plan = SchedulerOutput(
            step=1,
            new_rows=tuple(
                NewSequence(row=row, token_ids=text[row], num_prompt_tokens=len(PROMPT) if row == 0 else len(OTHER),
                       params=params[row])
                for row in new
            ),
            rows=tuple(rows),
            num_computed=tuple(start[row] for row in rows),
            num_new=tuple(end[row] - start[row] for row in rows),
            new_blocks=tuple(tuple(range(1 + row * 20, 21 + row * 20)) if row in new else () for row in rows),
            samples=tuple(end[row] == len(text[row]) for row in rows),
        )  # fmt: skip
        result = bench.runner.execute(plan)
        scored = result.prompt_logprobs or ((),) * len(rows)
        assert scored[rows.index(1)] == scored[rows.index(2)] == ()
        assert len(result.logprobs[rows.index(2)]) == 1
        assert len(result.token_ids[rows.index(0)]) == int(end[0] == len(tokens)), "no sample before the last chunk"
        told.append(scored[rows.index(0)])
        computed += size
    return told


@pytest.mark.capability("API-11")
@pytest.mark.parametrize("sizes", [[23], [7, 1, 10, 5], [1, 21, 1], [22, 1]], ids=str)
def test_every_token_but_the_first_is_scored_once_across_chunks(sizes, models):
    model, bench = models
    told = chunks(bench, sizes, 3)
    assert [len(chunk) for chunk in told] == [*sizes[:-1], sizes[-1] - 1]
    wanted = oracle(model, PROMPT).log_softmax(-1)
    scored = [one for chunk in told for one in chunk]
    assert [one.token_id for one in scored] == PROMPT[1:]
    for position, one in enumerate(scored):
        assert one.logprob == pytest.approx(wanted[position, one.token_id].item(), abs=1e-3)
        assert one.rank == 1 + int((wanted[position] > wanted[position, one.token_id]).sum())
        assert [token for token, _ in one.top] == wanted[position].topk(3).indices.tolist()


@pytest.mark.capability("API-11")
def test_a_long_prompt_is_scored_in_tiles(models, monkeypatch):
    _, bench = models
    whole = chunks(bench, [23], 2)
    seen: list[int] = []
    logits_of = bench.decoder.logits

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden))
        return logits_of(hidden)

    monkeypatch.setattr(bench.decoder, "logits", watched)
    monkeypatch.setattr("slipway_runtime.worker.logprobs._SCORES_AT_ONCE", 5 * 97)
    tiled = chunks(bench, [23], 2)
    assert max(seen) == 5
    for one, other in zip(whole[0], tiled[0], strict=True):
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)


@pytest.mark.capability("API-11")
def test_a_sequence_that_comes_back_with_output_does_not_tell_again(models):
    _, bench = models
    told = chunks(bench, [23, 2], 3, output=(40, 41))
    assert told == [(), ()]
