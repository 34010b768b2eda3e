"""Logprobs of sampled and prompt tokens: log-softmax of the raw logits, before bias, penalties, temperature, filters.

A grammar's mask is applied before: tokens that it forbids have probability 0, and the softmax is over the rest.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
from torch import Tensor

from slipway_runtime.kernels.upload import download, upload
from slipway_runtime.messages import SchedulerOutput, TokenLogprobs
from slipway_runtime.worker.input_batch import InputBatch, Ints
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


def score_prompts(
    plan: SchedulerOutput, inputs: HostInputs, rows: InputBatch, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]
) -> tuple[tuple[TokenLogprobs, ...], ...]:
    """Prompt logprobs of each row: of the tokens after its new prompt positions. Empty: no row requested any.

    hidden: (T, H). A prompt's first token has no logprob, and the first output token is not of the prompt: a chunk
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
    tile = 1  # the first row's logits give the vocabulary size
    while len(scored) < count:
        done = len(scored)
        logits = logits_of(hidden[start + done : start + min(done + tile, count)])
        tile = max(1, _SCORES_AT_ONCE // logits.shape[1])
        tokens = following[done : done + len(logits)]
        (on_device,) = upload((tokens,), logits.device)
        scores = download(score(logits, on_device, int(wanted)))
        scored += as_logprobs(tokens, scores, wanted.repeat(len(tokens)))
    return tuple(scored)
