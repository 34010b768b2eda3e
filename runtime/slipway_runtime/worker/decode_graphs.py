"""CUDA graphs of decode steps: one for each of a few batch sizes, and their static inputs.

All sizes read the same static inputs, which each step overwrites in one copy: rows, positions, slots and lengths. The
rows' tokens and block tables are on the device; a graph gathers them first. A batch between two sizes uses the larger
graph; the rows beyond the batch are padding, with slot -1, length 0 and the null block.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike

from slipway_runtime.kernels.upload import Ints, static_buffer, upload, upload_into
from slipway_runtime.worker.capture import Capture, CapturedGraph, SharedBuffers, StepHidden
from slipway_runtime.worker.input_batch import InputBatch
from slipway_runtime.worker.inputs import HostInputs

Padded = npt.NDArray[Any]


class DecodeGraphs:
    """The captured decode steps of one runner, and their static inputs."""

    def __init__(self, shared: SharedBuffers, capture: Capture, sizes: tuple[int, ...]) -> None:
        """sizes: numbers of rows, ascending."""
        self._shared = shared
        self._sizes = sizes
        self._static, views = static_buffer(self._padded((), (), (), ()), shared.last_tokens.device)
        self._rows, self._positions, self._slots, self._lengths = views
        self._graphs: dict[tuple[int, bool], CapturedGraph] = {}
        for size in reversed(sizes):
            for adapted in (True, False) if shared.lora else (False,):
                self._graphs[size, adapted] = capture(self._computation(size, adapted=adapted))

    def _computation(self, size: int, *, adapted: bool) -> Callable[[], object]:
        shared = self._shared
        plan = shared.kernels.first_rows(shared.plan, size)
        lora = shared.lora[size] if adapted else None

        def step() -> None:
            rows = self._rows[:size]
            shared.kernels.update_static_inputs(plan, self._lengths[:size], shared.tables, rows)
            token_ids = shared.last_tokens.index_select(0, rows)
            shared.hidden[:size] = shared.compute(token_ids, self._positions[:size], self._slots[:size], plan, lora)

        return step

    def replay(self, inputs: HostInputs, batch: InputBatch, token_slots: Ints | None) -> StepHidden | None:
        """Replay a decode step of the batch; None: there is no graph for it. The next replay overwrites the result.

        token_slots: (R,) adapter slots; None: no row has an adapter.
        """
        num_rows = len(inputs.row_ids)
        if not inputs.is_decode or num_rows > self._sizes[-1]:
            return None
        shared, size = self._shared, next(size for size in self._sizes if size >= num_rows)
        self._upload_last_tokens(inputs, batch)
        upload_into(self._static, self._padded(inputs.row_ids, inputs.positions, inputs.slots, inputs.num_computed + 1))
        if token_slots is not None:
            shared.kernels.update_static_lora_inputs(
                shared.lora[size], np.concatenate((token_slots, np.full(size - num_rows, -1, dtype=np.int64)))
            )
        self._graphs[size, token_slots is not None].replay()
        hidden = shared.hidden[:num_rows]
        return StepHidden(hidden, hidden, self._rows[:num_rows])

    def _upload_last_tokens(self, inputs: HostInputs, batch: InputBatch) -> None:
        """Upload the tokens of rows that begin with a step of decode or had draft tokens: the device lacks them."""
        is_missing = batch.last_position[inputs.row_ids] != inputs.positions
        if is_missing.any():
            missing, positions = inputs.row_ids[is_missing], inputs.positions[is_missing]
            where, tokens = upload((missing, batch.tokens[missing, positions]), self._shared.last_tokens.device)
            self._shared.last_tokens.index_copy_(0, where, tokens)

    def _padded(self, rows: ArrayLike, positions: ArrayLike, slots: ArrayLike, lengths: ArrayLike) -> list[Padded]:
        """The static inputs on the host. Padding: the last row, position 0, no slot, length 0."""
        padded: list[Padded] = []
        for values, padding, dtype in (
            (rows, self._shared.padding_row, np.int64), (positions, 0, np.int64), (slots, -1, np.int64),
            (lengths, 0, np.int32),
        ):  # fmt: skip
            array = np.full(self._sizes[-1], padding, dtype=dtype)
            array[: len(np.asarray(values))] = values
            padded.append(array)
        return padded
