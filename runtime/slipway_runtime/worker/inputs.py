"""A plan as packed tensors: the new tokens of all rows one after another, without padding."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipway_runtime.messages import StepPlan
from slipway_runtime.worker.rows import Ints, Rows


@dataclass(frozen=True, slots=True)
class StepInputs:
    """T tokens of R rows."""

    token_ids: Tensor  # (T,)
    positions: Tensor  # (T,) within their sequences
    slots: Tensor  # (T,) of the cache, where their keys and values go
    num_computed: Ints  # (R,)
    num_new: Ints  # (R,)
    block_tables: Ints  # (R, blocks of the longest)
    drawing_rows: Ints  # rows that draw a token
    drawing_tokens: Tensor | None  # the last token of each of those among T; None: all T, in order
    drawing_positions: Ints  # where the drawn tokens will stand in their sequences


def pack(plan: StepPlan, rows: Rows, block_size: int, device: torch.device) -> StepInputs:
    """Pack a plan whose rows have been taken in."""
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
    draws = np.array(plan.samples, dtype=bool)
    everything = total == len(row_ids) and bool(draws.all())
    longest = int((num_computed + num_new).max())
    return StepInputs(
        token_ids=torch.from_numpy(rows.tokens[token_rows, positions]).to(device),
        positions=torch.from_numpy(positions).to(device),
        slots=torch.from_numpy(blocks * block_size + positions % block_size).to(device),
        num_computed=num_computed,
        num_new=num_new,
        block_tables=rows.block_tables[row_ids, : -(-longest // block_size)].astype(np.int64),
        drawing_rows=row_ids[draws],
        drawing_tokens=None if everything else torch.from_numpy(ends[draws] - 1).to(device),
        drawing_positions=(num_computed + num_new)[draws],
    )
