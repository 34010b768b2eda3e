"""How likely tokens were: the log-softmax of the raw scores, before bias, penalties, temperature and filters.

A grammar comes before: what it forbids has no probability, and the rest share what there is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
from torch import Tensor

from slipway_runtime.kernels.upload import download, upload
from slipway_runtime.messages import SchedulerOutput, TokenLogprobs
from slipway_runtime.worker.input_batch import InputBatch, Ints
from slipway_runtime.worker.inputs import StepInputs

_SCORES_AT_ONCE = 1 << 23  # of prompts: 32 MB of float32, whatever the prompt and the vocabulary


def score(logits: Tensor, token_ids: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities and ranks of tokens, ids and log-probabilities of the `most` likeliest; on the device.

    logits: (R, V) raw, float32; token_ids: (R,). Of equals, each has the rank of the first.
    """
    total = logits.logsumexp(dim=-1, keepdim=True)
    own = logits.gather(1, token_ids[:, None])
    values, ids = logits.topk(min(most, logits.shape[1]), dim=-1)
    return (own - total).squeeze(1), (logits > own).sum(dim=-1) + 1, ids, values - total


def as_logprobs(token_ids: Ints, scores: Sequence[npt.NDArray[Any]], counts: Ints) -> list[TokenLogprobs]:
    """One for each row, of what `score` found. counts: (R,) how many of the likeliest.

    The likeliest are listed without tokens that cannot come.
    """
    logprobs, ranks, ids, values = (array.tolist() for array in scores)
    return [
        TokenLogprobs(
            token_id,
            logprob,
            rank,
            tuple([pair for pair in zip(top_ids[:count], top[:count], strict=True) if pair[1] != float("-inf")]),
        )
        for token_id, logprob, rank, top_ids, top, count in zip(
            token_ids.tolist(), logprobs, ranks, ids, values, counts.tolist(), strict=True
        )
    ]


def score_prompts(
    plan: SchedulerOutput, inputs: StepInputs, rows: InputBatch, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]
) -> tuple[tuple[TokenLogprobs, ...], ...]:
    """For each row of the plan the tokens that follow its new prompt positions; empty when no row asked.

    hidden: (T, H). The first token of a prompt follows nothing, the first output token is not of the prompt: a chunk
    of `num_new` positions scores as many tokens, one fewer when it ends the prompt.
    """
    if rows.prompt_logprobs[list(plan.rows)].max() < 0:
        return ()
    starts = inputs.num_new.cumsum() - inputs.num_new
    return tuple(
        [
            _score_prompt(row, int(start), int(computed), int(new), rows, hidden, logits_of)
            for row, start, computed, new in zip(plan.rows, starts, inputs.num_computed, inputs.num_new, strict=True)
        ]
    )


def _score_prompt(
    row: int,
    start: int,
    computed: int,
    new: int,
    rows: InputBatch,
    hidden: Tensor,
    logits_of: Callable[[Tensor], Tensor],
) -> tuple[TokenLogprobs, ...]:
    wanted = rows.prompt_logprobs[row]
    count = min(new, int(rows.num_prompt[row]) - 1 - computed)
    if wanted < 0 or count <= 0:
        return ()
    following = rows.tokens[row, computed + 1 : computed + 1 + count].astype("int64")
    scored: list[TokenLogprobs] = []
    tile = 1  # the first row says how wide the vocabulary is
    while len(scored) < count:
        done = len(scored)
        logits = logits_of(hidden[start + done : start + min(done + tile, count)])
        tile = max(1, _SCORES_AT_ONCE // logits.shape[1])
        tokens = following[done : done + len(logits)]
        (on_device,) = upload((tokens,), logits.device)
        scores = download(score(logits, on_device, int(wanted)))
        scored += as_logprobs(tokens, scores, wanted.repeat(len(tokens)))
    return tuple(scored)
