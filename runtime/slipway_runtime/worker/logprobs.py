"""Logprobs of sampled and prompt tokens: log-softmax of the raw logits, before bias, penalties, temperature, filters.

A grammar's mask is applied before: tokens that it forbids have probability 0, and the softmax is over the rest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from slipway_runtime.kernels.upload import Ints, download, upload
from slipway_runtime.messages import SchedulerOutput, TokenLogprobs
from slipway_runtime.worker.input_batch import InputBatch
from slipway_runtime.worker.inputs import HostInputs

_SCORES_AT_ONCE = 1 << 23  # logits of prompt tokens: 32 MB of float32 for any prompt and vocabulary


def score(logits: Tensor, token_ids: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logprob and rank of each token, then ids and logprobs of the top `most` tokens; all on the device.

    logits: (R, V) raw, float32; token_ids: (R,). Tokens of equal logit share the best rank among them.
    """
    total = logits.logsumexp(dim=-1, keepdim=True)
    own = logits.gather(1, token_ids[:, None])
    values, ids = logits.topk(min(most, logits.shape[1]), dim=-1)
    return (own - total).squeeze(1), (logits > own).sum(dim=-1) + 1, ids, values - total


def as_logprobs(token_ids: Ints, scores: Sequence[npt.NDArray[Any]], counts: Ints) -> list[TokenLogprobs]:
    """TokenLogprobs of each row from the results of `score`. counts: (R,) how many top tokens.

    Top tokens of probability 0 are left out.
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


@dataclass(frozen=True, slots=True)
class PromptTile:
    """Prompt tokens of one row that are scored at once."""

    index: int  # of the row, in the plan
    tokens: Ints  # (n,)
    before: slice  # of the step's tokens: those that the scored ones follow
    top: int  # how many of the likeliest tokens are reported with each


def prompt_tiles(plan: SchedulerOutput, inputs: HostInputs, rows: InputBatch, vocab_size: int) -> list[PromptTile]:
    """The prompt tokens whose logprobs are requested and can be computed in this step, in tiles.

    A prompt's first token has no logprob, and the first output token is not of the prompt: a chunk of `num_new`
    positions scores as many tokens, one fewer when it ends the prompt.
    """
    if inputs.sampled_tokens is None:  # a step that samples after every token: all of its rows are past their prompts
        return []
    requested = rows.prompt_logprobs[inputs.row_ids]
    counts = np.minimum(inputs.num_new, rows.num_prompt[inputs.row_ids] - 1 - inputs.num_computed)
    starts = inputs.num_new.cumsum() - inputs.num_new
    most = max(1, _SCORES_AT_ONCE // vocab_size)
    tiles = []
    for index in np.flatnonzero((requested >= 0) & (counts > 0)).tolist():
        row, computed, start = plan.rows[index], plan.num_computed[index], int(starts[index])
        count = int(counts[index])
        following = rows.tokens[row, computed + 1 : computed + 1 + count].astype(np.int64)
        for done in range(0, count, most):
            end = min(done + most, count)
            before = slice(start + done, start + end)
            tiles.append(PromptTile(index, following[done:end], before, int(requested[index])))
    return tiles


def score_prompts(
    tiles: Sequence[PromptTile], num_rows: int, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]
) -> tuple[tuple[TokenLogprobs, ...], ...]:
    """Prompt logprobs of each row of a step. hidden: (T, H) of its tokens."""
    scored: list[list[TokenLogprobs]] = [[] for _ in range(num_rows)]
    for tile in tiles:
        logits = logits_of(hidden[tile.before])
        (on_device,) = upload((tile.tokens,), logits.device)
        scores = download(score(logits, on_device, tile.top))
        scored[tile.index] += as_logprobs(tile.tokens, scores, np.full(len(tile.tokens), tile.top))
    return tuple(map(tuple, scored))
