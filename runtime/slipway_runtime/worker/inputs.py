"""Step inputs: a scheduler output as packed tensors, the new tokens of all rows one after another without padding."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipway_runtime.kernels.upload import Ints, upload
from slipway_runtime.messages import SchedulerOutput
from slipway_runtime.worker.input_batch import InputBatch


@dataclass(frozen=True, slots=True)
class HostInputs:
    """Inputs of one step on the host: T tokens of R rows.

    D samples. A row that samples has one after its last token; with K draft tokens, also one before each of them.
    """

    token_rows: Ints  # (T,)
    positions: Ints  # (T,) within their sequences
    slots: Ints  # (T,) slot mapping: where the cache stores their keys and values
    row_ids: Ints  # (R,)
    num_computed: Ints  # (R,)
    num_new: Ints  # (R,)
    sampled_rows: Ints  # (D,)
    sampled_tokens: Ints | None  # (D,) index among T of the token before each sample; None: every token has a sample
    sampled_positions: Ints  # (D,) positions of the sampled tokens in their sequences
    has_drafts: bool

    @property
    def is_decode(self) -> bool:
        """Whether every row has one new token and samples."""
        return len(self.positions) == len(self.row_ids) and self.sampled_tokens is None


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of one step on the device, but for those that kernels plan with on the host."""

    token_ids: Tensor  # (T,)
    positions: Tensor  # (T,)
    slots: Tensor  # (T,)
    num_computed: Ints  # (R,)
    num_new: Ints  # (R,)
    block_tables: Ints  # (R, blocks of the longest)
    rows_on_device: Tensor  # (D,)
    sampled_rows: Ints  # (D,)
    sampled_tokens: Tensor | None  # (D,)
    sampled_positions: Ints  # (D,)


def pack_inputs(plan: SchedulerOutput, rows: InputBatch, block_size: int) -> HostInputs:
    """Pack a scheduler output. `InputBatch.update_states` must have seen it before."""
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
    sampled_rows, sampled_tokens, sampled_positions = row_ids, None, lengths
    if total != len(row_ids) or not all(plan.samples):
        samples = np.array(plan.samples, dtype=np.int64)
        if plan.drafts:
            samples *= np.array([1 + len(drafts) for drafts in plan.drafts], dtype=np.int64)
        sampled_rows = np.repeat(row_ids, samples)
        back = samples.cumsum().repeat(samples) - np.arange(len(sampled_rows))  # from a row's last sample, which is 1
        sampled_tokens = ends.repeat(samples) - back
        sampled_positions = lengths.repeat(samples) - back + 1
    return HostInputs(
        token_rows=token_rows,
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        row_ids=row_ids,
        num_computed=num_computed,
        num_new=num_new,
        sampled_rows=sampled_rows,
        sampled_tokens=sampled_tokens,
        sampled_positions=sampled_positions,
        has_drafts=bool(plan.drafts),
    )


def prepare_inputs(plan: SchedulerOutput, rows: InputBatch, block_size: int, device: torch.device) -> StepInputs:
    """Pack and upload a scheduler output. `InputBatch.update_states` must have seen it before."""
    return upload_inputs(pack_inputs(plan, rows, block_size), rows, block_size, device)


def upload_inputs(host: HostInputs, rows: InputBatch, block_size: int, device: torch.device) -> StepInputs:
    """Upload packed inputs. Tokens that the device sampled last are read there: the host may not know them yet."""
    is_last = rows.last_position[host.token_rows] == host.positions
    of_tokens = () if host.sampled_tokens is None else (host.sampled_tokens,)
    # In decode every token is on the device, and the rows are uploaded once.
    last = None if host.is_decode and is_last.all() else np.flatnonzero(is_last)
    of_last = () if last is None else (last, host.token_rows[last], rows.tokens[host.token_rows, host.positions])
    positions, slots, rows_on_device, *more = upload(
        (host.positions, host.slots, host.sampled_rows, *of_tokens, *of_last), device
    )
    sampled_tokens = more.pop(0) if of_tokens else None
    if last is None:
        token_ids = rows.last_tokens.index_select(0, rows_on_device)
    else:
        places, last_rows, token_ids = more
        if len(last):
            token_ids.index_copy_(0, places, rows.last_tokens.index_select(0, last_rows))
    width = -(-int((host.num_computed + host.num_new).max()) // block_size)
    return StepInputs(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        num_computed=host.num_computed,
        num_new=host.num_new,
        block_tables=rows.block_tables[host.row_ids, :width].astype(np.int64),
        rows_on_device=rows_on_device,
        sampled_rows=host.sampled_rows,
        sampled_tokens=sampled_tokens,
        sampled_positions=host.sampled_positions,
    )
