"""How likely tokens were: the log-softmax of the raw scores, before bias, penalties, temperature and filters.

A grammar comes before: what it forbids has no probability, and the rest share what there is.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from slipway_runtime.messages import SchedulerOutput, TokenLogprobs
from slipway_runtime.worker.input_batch import InputBatch, Ints
from slipway_runtime.worker.inputs import StepInputs

_SCORES_AT_ONCE = 1 << 23  # of prompts: 32 MB of float32, whatever the prompt and the vocabulary


def score(logits: Tensor, token_ids: Ints, counts: Ints) -> list[TokenLogprobs]:
    """One for each row. logits: (R, V) raw, float32; token_ids: (R,); counts: (R,) how many of the likeliest.

    The likeliest are listed without tokens that cannot come. Of equals, each has the rank of the first.
    """
    total = logits.logsumexp(dim=-1, keepdim=True)
    own = logits.gather(1, torch.from_numpy(token_ids).to(logits.device)[:, None])
    ranks = ((logits > own).sum(dim=-1) + 1).tolist()
    values, ids = logits.topk(min(int(counts.max(initial=0)), logits.shape[1]), dim=-1)
    return [
        TokenLogprobs(
            token_id,
            logprob,
            rank,
            tuple([pair for pair in zip(top_ids[:count], top[:count], strict=True) if pair[1] != float("-inf")]),
        )
        for token_id, logprob, rank, top_ids, top, count in zip(
            token_ids.tolist(),
            (own - total).squeeze(1).tolist(),
            ranks,
            ids.tolist(),
            (values - total).tolist(),
            counts.tolist(),
            strict=True,
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
        scored += score(logits, tokens, wanted.repeat(len(tokens)))
    return tuple(scored)
