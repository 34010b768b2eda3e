"""CUDA graphs of small steps with chunks: rows of several new tokens (parts of prompts, draft tokens) beside decode.

One graph is captured for each of a few numbers of tokens; a step uses the smallest that has room for it (for its
tokens, and for its programs and partial results of attention), and the tokens beyond the step are padding. The host
divides the step's attention among the programs that the graph launches (`captured_plan`): a step of more programs than
that (long contexts) is computed eagerly, and takes so long on the device that it hides its launches. Steps of more
tokens than the largest graph hide theirs too.

A token that a row sampled last is read on the device, where only the device may know it; all others come from the host.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipway_runtime.kernels.attention_plan import ChunkTile
from slipway_runtime.kernels.captured_plan import ChunkCapacity, StaticChunks
from slipway_runtime.kernels.dispatch import AttentionPlan
from slipway_runtime.kernels.upload import Ints, static_buffer, upload_into
from slipway_runtime.worker.capture import Capture, CapturedGraph, SharedBuffers, StepHidden
from slipway_runtime.worker.input_batch import InputBatch
from slipway_runtime.worker.inputs import HostInputs

Padded = npt.NDArray[Any]
_NO_INTS = np.zeros(0, dtype=np.int64)
MOST_PADDING = 3  # a graph has at most so many times the tokens of a step
_ON_DEVICE = -1  # in place of a token id: the token that the row sampled last


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """Static inputs of the captured steps of one number of tokens, T. Each step overwrites them in one copy."""

    buffer: Tensor  # all of the following
    token_ids: Tensor  # (T,) or _ON_DEVICE
    token_rows: Tensor  # (T,)
    positions: Tensor  # (T,)
    slots: Tensor  # (T,)
    sampled_tokens: Tensor  # (T,) index of the token before each sample
    sampled_rows: Tensor  # (T,)
    rows: Tensor  # (R,) of the attention plan
    lengths: Tensor  # (R,)
    plan: AttentionPlan


class ChunkGraphs:
    """The captured steps with chunks of one runner, and their static inputs."""

    def __init__(
        self, shared: SharedBuffers, capture: Capture, capacities: tuple[ChunkCapacity, ...], *, tile: ChunkTile
    ) -> None:
        """capacities: by number of tokens, ascending. tile: what a program attends."""
        self._shared = shared
        self._capacities = capacities
        self._tile = tile
        self._static = {capacity.tokens: self._static_inputs(capacity) for capacity in capacities}
        self._graphs: dict[tuple[int, bool], CapturedGraph] = {}
        for capacity in reversed(capacities):
            for adapted in (True, False) if shared.lora else (False,):
                self._graphs[capacity.tokens, adapted] = capture(self._computation(capacity.tokens, adapted=adapted))

    def _static_inputs(self, capacity: ChunkCapacity) -> StaticInputs:
        shared = self._shared
        chunks = shared.kernels.empty_chunks(capacity, shared.padding_row)
        arrays = self._padded(capacity, chunks, *(_NO_INTS,) * 6)
        buffer, views = static_buffer(arrays, shared.last_tokens.device)
        tokens, token_rows, positions, slots, sampled_tokens, sampled_rows, rows, lengths, *of_chunks = views
        starts, work, merges = of_chunks
        plan = shared.kernels.with_chunks(shared.plan, capacity, starts, work, merges)
        return StaticInputs(
            buffer, tokens, token_rows, positions, slots, sampled_tokens, sampled_rows, rows, lengths, plan
        )

    def _computation(self, size: int, *, adapted: bool) -> Callable[[], object]:
        shared, static = self._shared, self._static[size]
        lora = shared.lora[size] if adapted else None

        def step() -> None:
            shared.kernels.update_static_inputs(static.plan, static.lengths, shared.tables, static.rows)
            sampled_last = shared.last_tokens.index_select(0, static.token_rows)
            token_ids = torch.where(static.token_ids == _ON_DEVICE, sampled_last, static.token_ids)
            shared.hidden[:size] = shared.compute(token_ids, static.positions, static.slots, static.plan, lora)

        return step

    def replay(self, inputs: HostInputs, batch: InputBatch, token_slots: Ints | None) -> StepHidden | None:
        """Replay a step of the batch; None: no graph has room for it. The next replay overwrites the result.

        token_slots: (T,) adapter slots; None: no row has an adapter.
        """
        shared, num_tokens = self._shared, len(inputs.positions)
        if inputs.sampled_tokens is None or (fitting := self._smallest(inputs)) is None:
            return None
        capacity, chunks = fitting
        size, static, num_samples = capacity.tokens, self._static[capacity.tokens], len(inputs.sampled_rows)
        is_last = batch.last_position[inputs.token_rows] == inputs.positions
        token_ids = np.where(is_last, _ON_DEVICE, batch.tokens[inputs.token_rows, inputs.positions])
        upload_into(
            static.buffer,
            self._padded(
                capacity,
                chunks,
                token_ids,
                inputs.token_rows,
                inputs.positions,
                inputs.slots,
                inputs.sampled_tokens,
                inputs.sampled_rows,
            ),
        )
        if token_slots is not None:
            shared.kernels.update_static_lora_inputs(
                shared.lora[size], np.concatenate((token_slots, np.full(size - num_tokens, -1, dtype=np.int64)))
            )
        self._graphs[size, token_slots is not None].replay()
        hidden = shared.hidden[:num_tokens]
        sampled = hidden if num_samples == num_tokens else hidden.index_select(0, static.sampled_tokens[:num_samples])
        return StepHidden(hidden, sampled, static.sampled_rows[:num_samples])

    def _smallest(self, inputs: HostInputs) -> tuple[ChunkCapacity, StaticChunks] | None:
        """The smallest graph that has room for a step, and the step's chunks in it; None: none has.

        On a long context a larger graph than the tokens ask for may have the programs and partial results, up to
        MOST_PADDING times as many tokens: beyond it, padding takes longer than the launches that a graph saves.
        """
        num_tokens = len(inputs.positions)
        for capacity in self._capacities:
            if num_tokens <= capacity.tokens <= max(MOST_PADDING * num_tokens, self._capacities[0].tokens):
                chunks = self._shared.kernels.pack_chunks(
                    capacity,
                    inputs.row_ids,
                    inputs.num_computed,
                    inputs.num_new,
                    padding_row=self._shared.padding_row,
                    tile=self._tile,
                )
                if chunks is not None:
                    return capacity, chunks
        return None

    def _padded(
        self,
        capacity: ChunkCapacity,
        chunks: StaticChunks,
        token_ids: Ints,
        token_rows: Ints,
        positions: Ints,
        slots: Ints,
        sampled_tokens: Ints,
        sampled_rows: Ints,
    ) -> list[Padded]:
        """The static inputs on the host, as in `StaticInputs`. Padding: token 0 of the padding row, without a slot."""
        padding_row = self._shared.padding_row
        padded: list[Padded] = []
        for values, padding, dtype in (
            (token_ids, 0, np.int32), (token_rows, padding_row, np.int64), (positions, 0, np.int64),
            (slots, -1, np.int64), (sampled_tokens, 0, np.int64), (sampled_rows, padding_row, np.int64),
        ):  # fmt: skip
            array = np.full(capacity.tokens, padding, dtype=dtype)
            array[: len(values)] = values
            padded.append(array)
        return [*padded, *chunks]
