"""CUDA graphs of a runner's steps: which steps are replayed from a captured graph, and the memory of all graphs.

A graph replays kernel launches with the addresses and grids of the capture. So graphs are captured for a few sizes,
without adapters and, where adapters are on, also with all adapter slots:
- decode, by the number of rows: 1, 2, 4, 8, then steps of 8 (`decode_graphs`);
- steps with chunks (parts of prompts, draft tokens) of up to 256 tokens, by their number (`chunk_graphs`).

All graphs write hidden states to the same buffer: logits of a large vocabulary, kept for every size, would take
gigabytes. All other steps run eagerly: larger ones, and every step if the capture failed.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slipway_api.memory import WEIGHT_BYTES, ModelShape, Needs, activation_bytes
from slipway_runtime.kernels import ordered_plan
from slipway_runtime.kernels.attention_plan import MAX_SPLITS, SPLIT, num_splits
from slipway_runtime.kernels.captured_plan import chunk_capacity
from slipway_runtime.kernels.dispatch import CapturableKernels
from slipway_runtime.kernels.upload import Ints, upload
from slipway_runtime.worker.capture import Capture, Compute, SharedBuffers, StepHidden
from slipway_runtime.worker.chunk_graphs import ChunkGraphs
from slipway_runtime.worker.decode_graphs import DecodeGraphs
from slipway_runtime.worker.input_batch import InputBatch
from slipway_runtime.worker.inputs import HostInputs

# Numbers of tokens. Larger steps of small models wait for the host: docs/performance.md.
CHUNK_SIZES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
WORKSPACE_BYTES = 64 << 20  # of cuBLAS, on the stream that captures
LAUNCH_BYTES = 8 << 10  # driver memory per captured launch; an estimate, to be measured on a GPU
LAUNCHES_OF_A_LAYER, LAUNCHES_OF_CHUNKS = 13, 2  # attention of the chunks, and the merge of its splits
LAUNCHES_OF_ADAPTERS, LAUNCHES_IN_ONE_ORDER = 10, 11  # more, with adapters, and with `deterministic`


def batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes for which decode is captured: a few up to `max_num_seqs`, and `max_num_seqs`."""
    return (*(size for size in (1, 2, 4, *range(8, max_num_seqs, 8)) if size < max_num_seqs), max_num_seqs)


def chunk_sizes(max_num_seqs: int, max_model_len: int) -> tuple[int, ...]:
    """Numbers of tokens for which steps with chunks are captured, up to that of all rows' whole sequences."""
    return tuple(size for size in CHUNK_SIZES if size <= max_num_seqs * max_model_len)


def reserve_bytes(
    shape: ModelShape,
    *,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
    dtype: str,
    with_adapters: bool,
    deterministic: bool = False,
) -> int:
    """Device memory of a runner's graphs: static inputs, hidden states, activations, driver and cuBLAS memory."""
    decodes = batch_sizes(max_num_seqs)
    chunks = [chunk_capacity(size, max_num_seqs) for size in chunk_sizes(max_num_seqs, max_model_len)]
    rows = max(decodes[-1], *(one.rows for one in chunks), 0)
    tokens = max(decodes[-1], *(one.tokens for one in chunks), 0)
    tables = (max_num_seqs + 1 + rows) * 4 * -(-max_model_len // block_size)
    inputs = 32 * decodes[-1] + sum(56 * one.tokens + 16 * (one.rows + one.programs) + 160 for one in chunks)
    hidden = tokens * shape.hidden * WEIGHT_BYTES[dtype]
    splits = int(num_splits(np.array(max_model_len), SPLIT, MAX_SPLITS))
    in_order = min(decodes[-1] * -(-max_model_len // ordered_plan.SPLIT), ordered_plan.MOST_SLOTS)  # `deterministic`
    partial_results = max(decodes[-1] * splits, *(one.decodes * splits + one.slots for one in chunks), in_order)
    attention = partial_results * shape.heads * (shape.head_dim + 2) * 4  # float32, with a maximum and a sum
    step = Needs(dtype=dtype, max_model_len=tokens, max_num_seqs=0, max_num_batched_tokens=tokens)
    of_a_layer = LAUNCHES_OF_A_LAYER + (LAUNCHES_IN_ONE_ORDER if deterministic else 0)
    launches = (len(decodes) + len(chunks)) * of_a_layer + len(chunks) * LAUNCHES_OF_CHUNKS
    if with_adapters:  # a second graph of each size
        launches += launches + (len(decodes) + len(chunks)) * LAUNCHES_OF_ADAPTERS
    driver = shape.layers * launches * LAUNCH_BYTES
    return tables + inputs + hidden + attention + activation_bytes(shape, step) + driver + WORKSPACE_BYTES


class StepGraphs:
    """The captured steps of one runner, and the block tables that they read."""

    def __init__(
        self,
        compute: Compute,
        kernels: CapturableKernels,
        capture: Capture,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_slots: int,
        last_tokens: Tensor,
        cache: Tensor,
        query_heads: tuple[int, int],
    ) -> None:
        """num_slots: adapter slots; 0: adapters are off. last_tokens: (max_num_seqs + 1,) of each row, then padding.

        cache: of any layer. query_heads: their number and size.
        """
        decodes = batch_sizes(max_num_seqs)
        chunks = [kernels.chunk_capacity(size, max_num_seqs) for size in chunk_sizes(max_num_seqs, max_model_len)]
        most_rows = max(decodes[-1], *(one.rows for one in chunks), 0)
        most_tokens = max(decodes[-1], *(one.tokens for one in chunks), 0)
        device, like = last_tokens.device, torch.empty(0, device=last_tokens.device)
        self._tables = torch.zeros(
            max_num_seqs + 1, -(-max_model_len // block_size), dtype=torch.int32, device=device
        )  # of each row, then padding
        plan = kernels.plan_for_capture(most_rows, max_model_len, block_size, like)
        nothing = torch.full((1,), -1, dtype=torch.int64, device=device)
        hidden = compute(last_tokens[-1:], nothing + 1, nothing, kernels.first_rows(plan, 1), None)
        shared = SharedBuffers(
            compute,
            kernels,
            last_tokens,
            self._tables,
            plan,
            hidden.new_empty(most_tokens, hidden.shape[1]),
            {
                size: kernels.plan_lora_for_capture(size, num_slots, like)
                for size in {*decodes, *(one.tokens for one in chunks)}
                if num_slots
            },
        )
        tile = kernels.chunk_tile(hidden.new_empty(0, *query_heads), cache, block_size)
        self._chunks = ChunkGraphs(shared, capture, tuple(chunks), tile=tile)
        self._decodes = DecodeGraphs(shared, capture, decodes)

    def replay(self, inputs: HostInputs, batch: InputBatch, token_slots: Ints | None) -> StepHidden | None:
        """Replay a step of the batch; None: no graph is for it. The next replay overwrites the result.

        token_slots: (T,) adapter slots; None: no row has an adapter.
        """
        graphs = self._decodes if inputs.is_decode else self._chunks
        return graphs.replay(inputs, batch, token_slots)

    def update_tables(self, entries: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Write new entries of block tables: row, first place, blocks."""
        if not entries:
            return
        width = self._tables.shape[1]
        counts = np.array([len(blocks) for _, _, blocks in entries], dtype=np.int64)
        firsts = np.array([row * width + place for row, place, _ in entries], dtype=np.int64)
        within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        blocks = np.array([block for _, _, blocks in entries for block in blocks], dtype=np.int32)
        places, blocks_on_device = upload((np.repeat(firsts, counts) + within, blocks), self._tables.device)
        self._tables.view(-1).index_copy_(0, places, blocks_on_device)
