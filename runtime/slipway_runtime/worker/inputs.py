"""A plan as packed tensors: the new tokens of all rows one after another, without padding."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipway_runtime.kernels.upload import upload
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
    # D draws. A row that samples draws after its last token; with K drafts also before each of them.
    drawing_rows: Ints  # (D,)
    drawing_tokens: Tensor | None  # (D,) among T, after which of them; None: after each
    drawing_positions: Ints  # (D,) where the drawn tokens stand in their sequences


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
    lengths = num_computed + num_new
    drawing_rows, drawing_positions = row_ids, lengths
    drawing: list[Ints] = []
    if total != len(row_ids) or not all(plan.samples):
        draws = np.array(plan.samples, dtype=np.int64)
        if plan.drafts:
            draws *= np.array([1 + len(drafts) for drafts in plan.drafts], dtype=np.int64)
        drawing_rows = np.repeat(row_ids, draws)
        back = draws.cumsum().repeat(draws) - np.arange(len(drawing_rows))  # draws, 1 for the last one of a row
        drawing = [ends.repeat(draws) - back]
        drawing_positions = lengths.repeat(draws) - back + 1
    slots = blocks * block_size + positions % block_size
    token_ids, positions_on_device, slots_on_device, *drawing_tokens = upload(
        (rows.tokens[token_rows, positions], positions, slots, *drawing), device
    )
    return StepInputs(
        token_ids=token_ids,
        positions=positions_on_device,
        slots=slots_on_device,
        num_computed=num_computed,
        num_new=num_new,
        block_tables=rows.block_tables[row_ids, : -(-int(lengths.max()) // block_size)].astype(np.int64),
        drawing_rows=drawing_rows,
        drawing_tokens=drawing_tokens[0] if drawing else None,
        drawing_positions=drawing_positions,
    )
