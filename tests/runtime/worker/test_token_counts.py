"""Counts of tokens for penalties: those of every sequence at every sample, and what is sent for them."""

import numpy as np
import pytest
import torch

from slipway_runtime.kernels.reference_sampling import IN_PROMPT
from slipway_runtime.messages import NewSequence, SamplingParams, SchedulerOutput
from slipway_runtime.worker import token_counts
from slipway_runtime.worker.input_batch import InputBatch
from slipway_runtime.worker.token_counts import TokenCounts

V = 50
LIKE = torch.zeros(1, V)
PARAMS = SamplingParams(max_tokens=9, repetition_penalty=1.2)


def start(rows: InputBatch, row: int, tokens: tuple[int, ...], num_prompt: int) -> None:
    new = NewSequence(row=row, token_ids=tokens, num_prompt_tokens=num_prompt, params=PARAMS)
    rows.update_states(SchedulerOutput(step=1, new_rows=(new,)))


def check(counts: TokenCounts, rows: InputBatch, samples: list[tuple[int, int]]) -> None:
    """samples: (row, position of the token to sample)."""
    row_ids, positions = (np.array(column, dtype=np.int64) for column in zip(*samples, strict=True))
    counted = counts.of(row_ids, positions, LIKE)
    for got, (row, position) in zip(counted, samples, strict=True):
        split = rows.num_prompt[row]
        prompt = np.bincount(rows.tokens[row, :split], minlength=V)[:V]
        output = np.bincount(rows.tokens[row, split:position], minlength=V)[:V]
        assert ((got >= IN_PROMPT).numpy() == (prompt > 0)).all()
        assert (got % IN_PROMPT).tolist() == output.tolist()


@pytest.mark.capability("API-6")
def test_counts_are_those_of_the_sequence_through_drafts_preemption_and_a_row_that_is_used_again():
    """Finding 16: tables over the whole vocabulary were counted anew on the host for each step."""
    rows = InputBatch(max_num_seqs=8, max_model_len=30, max_blocks=2)
    counts = TokenCounts(rows)
    start(rows, 0, (3, 4, 3), 3)
    start(rows, 5, (7, 1, 1, 49, 1), 2)  # resumed: three tokens of output; another row grows the table
    check(counts, rows, [(0, 3)])
    check(counts, rows, [(0, 3), (5, 5)])  # a sample that is repeated
    rows.tokens[0, 3], rows.tokens[5, 5] = 9, 1
    check(counts, rows, [(5, 6), (0, 4)])
    rows.tokens[0, 4:7] = 9, 8, 3  # drafts: each is judged after the ones before it
    check(counts, rows, [(0, 4), (0, 5), (0, 6), (0, 7), (5, 6)])
    rows.tokens[0, 4:7] = 9, 2, 0  # the first was accepted, the second was not
    check(counts, rows, [(0, 6)])
    start(rows, 0, (60, 2), 2)  # a token that has no score
    check(counts, rows, [(0, 2), (5, 6)])
    start(rows, 5, (7, 1, 1, 49, 1, 1), 2)  # preempted, and back
    check(counts, rows, [(5, 6)])


@pytest.mark.capability("API-6")
def test_a_step_sends_one_token_a_row(monkeypatch):
    """Finding 16: 262 MB of tables a step at 256 rows."""
    rows = InputBatch(max_num_seqs=8, max_model_len=30, max_blocks=2)
    counts = TokenCounts(rows)
    for row in range(8):
        start(rows, row, tuple(range(20)), 20)
    row_ids = np.arange(8)
    counts.of(row_ids, np.full(8, 20), LIKE)
    sent, inner = [], token_counts.upload

    def upload(arrays, device):
        sent.extend(array.nbytes for array in arrays)
        return inner(arrays, device)

    monkeypatch.setattr(token_counts, "upload", upload)
    counts.of(row_ids, np.full(8, 21), LIKE)
    assert sum(sent) == 2 * 8 * 8, "the rows and where their new tokens are counted"
