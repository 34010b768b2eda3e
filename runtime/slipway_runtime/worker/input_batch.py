"""Input batch: tokens, block table and sampling parameters of each running sequence, one row each.

The rows are kept in arrays, so that packing a step needs no loop over sequences.

The token that a row sampled last is also kept on the device, where the next step reads it: that step can be packed and
queued before the host knows the token. `tokens` gets it when the host has read it.
"""

import numpy as np
import torch

from slipway_runtime.kernels.reference_sampling import GREEDY_BELOW
from slipway_runtime.messages import NewSequence, SchedulerOutput

_CPU = torch.device("cpu")


class InputBatch:
    """Rows 0 … `max_num_seqs` - 1; the scheduler assigns them to sequences."""

    def __init__(self, max_num_seqs: int, max_model_len: int, max_blocks: int, device: torch.device = _CPU) -> None:
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)  # the last: padding
        self.last_position = np.full(max_num_seqs, -1, dtype=np.int64)  # of that token; -1: the device has none
        self.tokens = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.block_tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self.new_entries: list[tuple[int, int, tuple[int, ...]]] = []  # of tables, in a plan: row, place, blocks
        self.starts = np.zeros(max_num_seqs, dtype=np.int64)  # how many sequences each row was assigned to so far
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int64)
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p = np.ones(max_num_seqs, dtype=np.float32)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.repetition = np.ones(max_num_seqs, dtype=np.float32)
        self.presence = np.zeros(max_num_seqs, dtype=np.float32)
        self.frequency = np.zeros(max_num_seqs, dtype=np.float32)
        self.seed = np.zeros(max_num_seqs, dtype=np.int64)
        self.min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.logprobs = np.full(max_num_seqs, -1, dtype=np.int64)  # how many top tokens; -1: logprobs not requested
        self.prompt_logprobs = np.full(max_num_seqs, -1, dtype=np.int64)
        self.greedy = np.zeros(max_num_seqs, dtype=bool)
        self.penalized = np.zeros(max_num_seqs, dtype=bool)
        self.biased = np.zeros(max_num_seqs, dtype=bool)
        self.bound = np.zeros(max_num_seqs, dtype=bool)  # constrained by a grammar
        self.plain = np.zeros(max_num_seqs, dtype=bool)  # greedy; no grammar, bias, penalties, min_tokens, logprobs
        self.stop_token_ids: list[tuple[int, ...]] = [()] * max_num_seqs
        self.bias: list[tuple[tuple[int, float], ...]] = [()] * max_num_seqs

    def update_states(self, plan: SchedulerOutput) -> None:
        """Start the new rows of a scheduler output, append new blocks to block tables, and write draft tokens."""
        for new in plan.new_rows:
            self._start(new)
        self.new_entries.clear()
        for row, blocks in zip(plan.rows, plan.new_blocks, strict=True):
            if blocks:
                start = int(self.num_blocks[row])
                self.new_entries.append((row, start, blocks))
                self.block_tables[row, start : start + len(blocks)] = blocks
                self.num_blocks[row] = start + len(blocks)
        if plan.drafts:
            self._write_drafts(plan)

    def record_sampled(self, plan: SchedulerOutput, token_ids: tuple[tuple[int, ...], ...]) -> None:
        """Write the tokens that the rows of a plan sampled on another rank, over the row's draft tokens if any."""
        for index, kept in enumerate(token_ids):
            if kept:
                drafts = len(plan.drafts[index]) if plan.drafts else 0
                start = plan.num_computed[index] + plan.num_new[index] - drafts
                self.tokens[plan.rows[index], start : start + len(kept)] = kept

    def write_tokens(self, row: int, position: int, token_ids: tuple[int, ...]) -> None:
        """Write tokens that became known outside of this batch, over what the row sampled at their positions."""
        self.tokens[row, position : position + len(token_ids)] = token_ids
        self.last_position[row] = -1

    def _write_drafts(self, plan: SchedulerOutput) -> None:
        """Write draft tokens at the positions of sampled tokens: later positions and penalties read them there."""
        for row, computed, new, drafts in zip(plan.rows, plan.num_computed, plan.num_new, plan.drafts, strict=True):
            self.tokens[row, computed + new - len(drafts) : computed + new] = drafts

    def _start(self, new: NewSequence) -> None:
        row, params = new.row, new.params
        self.starts[row] += 1
        self.last_position[row] = -1
        self.tokens[row, : len(new.token_ids)] = new.token_ids
        self.num_blocks[row] = 0
        self.num_prompt[row] = new.num_prompt_tokens
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.repetition[row] = params.repetition_penalty
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        self.seed[row] = np.uint64(params.seed & 0xFFFF_FFFF_FFFF_FFFF).astype(np.int64)
        self.min_tokens[row] = params.min_tokens
        self.greedy[row] = params.temperature < GREEDY_BELOW
        self.penalized[row] = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        self.stop_token_ids[row] = params.stop_token_ids
        self.bias[row] = params.logit_bias
        self.biased[row] = bool(params.logit_bias)
        self.bound[row] = new.grammar
        self.logprobs[row] = -1 if params.logprobs is None else params.logprobs
        # A preempted sequence that already has output has already returned its prompt logprobs.
        is_new = len(new.token_ids) == new.num_prompt_tokens
        self.prompt_logprobs[row] = -1 if params.prompt_logprobs is None or not is_new else params.prompt_logprobs
        self.plain[row] = (
            self.greedy[row]
            and not self.penalized[row]
            and not new.grammar
            and not params.min_tokens
            and not params.logit_bias
            and params.logprobs is None
        )
