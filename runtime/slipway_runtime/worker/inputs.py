"""Step inputs: a scheduler output as packed tensors, the new tokens of all rows one after another without padding."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipway_runtime.kernels.upload import upload
from slipway_runtime.messages import SchedulerOutput
from slipway_runtime.worker.input_batch import InputBatch, Ints


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of one step: T tokens of R rows."""

    token_ids: Tensor  # (T,)
    positions: Tensor  # (T,) within their sequences
    slots: Tensor  # (T,) slot mapping: where the cache stores their keys and values
    num_computed: Ints  # (R,)
    num_new: Ints  # (R,)
    block_tables: Ints  # (R, blocks of the longest)
    # D samples. A row that samples has one after its last token; with K draft tokens, also one before each of them.
    sampled_rows: Ints  # (D,)
    rows_on_device: Tensor | None  # (D,) the same on the device; None: some row has draft tokens
    sampled_tokens: Tensor | None  # (D,) index among T of the token before each sample; None: every token has a sample
    sampled_positions: Ints  # (D,) positions of the sampled tokens in their sequences


def prepare_inputs(plan: SchedulerOutput, rows: InputBatch, block_size: int, device: torch.device) -> StepInputs:
    """Pack a scheduler output. `InputBatch.update_states` must have seen it before.

    Tokens that the device sampled last are read there: the host may not know them yet.
    """
    row_ids = np.array(plan.rows, dtype=np.int64)
    num_computed = np.array(plan.num_computed, dtype=np.int64)
    num_new = np.array(plan.num_new, dtype=np.int64)
    ends = num_new.cumsum()
    total = int(ends[-1])
    if total == len(row_ids):  # one token each
        token_rows, positions = row_ids, num_computed
    else:
        token_rows = np.repeat(row_ids, num_new)
        positions = np.arange(total) + np.repeat(num_computed - (ends - num_new), num_new)
    blocks = rows.block_tables[token_rows, positions // block_size].astype(np.int64)
    lengths = num_computed + num_new
    sampled_rows, sampled_positions = row_ids, lengths
    sampled: tuple[Ints, ...] = ()
    if total != len(row_ids) or not all(plan.samples):
        samples = np.array(plan.samples, dtype=np.int64)
        if plan.drafts:
            samples *= np.array([1 + len(drafts) for drafts in plan.drafts], dtype=np.int64)
        sampled_rows = np.repeat(row_ids, samples)
        back = samples.cumsum().repeat(samples) - np.arange(len(sampled_rows))  # from a row's last sample, which is 1
        sampled = (ends.repeat(samples) - back,)
        sampled_positions = lengths.repeat(samples) - back + 1
    slots = blocks * block_size + positions % block_size
    last = np.flatnonzero(rows.last_position[token_rows] == positions)  # tokens that are on the device
    last_rows = token_rows[last]
    whole = len(last) == total == len(sampled_rows)  # decode: the rows are uploaded once
    sent = () if whole else (last, last_rows, rows.tokens[token_rows, positions])
    positions_on_device, slots_on_device, rows_on_device, *more = upload(
        (positions, slots, sampled_rows, *sampled, *sent), device
    )
    sampled_tokens = more.pop(0) if sampled else None
    if whole:
        token_ids = rows.last_tokens.index_select(0, rows_on_device)
    else:
        places, last_rows_on_device, token_ids = more
        if len(last):
            token_ids.index_copy_(0, places, rows.last_tokens.index_select(0, last_rows_on_device))
    return StepInputs(
        token_ids=token_ids,
        positions=positions_on_device,
        slots=slots_on_device,
        num_computed=num_computed,
        num_new=num_new,
        block_tables=rows.block_tables[row_ids, : -(-int(lengths.max()) // block_size)].astype(np.int64),
        sampled_rows=sampled_rows,
        rows_on_device=None if plan.drafts else rows_on_device,
        sampled_tokens=sampled_tokens,
        sampled_positions=sampled_positions,
    )
