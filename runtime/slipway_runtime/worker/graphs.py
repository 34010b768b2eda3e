"""CUDA graphs of decode steps: which steps are replayed from a captured graph, and the static input buffers.

A graph replays kernel launches with the addresses and grids of the capture. So one graph is captured for each of a few
batch sizes (1, 2, 4, 8, then steps of 8), without adapters and, where adapters are on, also with all adapter slots.
All graphs read the same static inputs, which each step overwrites in one copy: rows, positions, slots and lengths. The
rows' tokens and block tables are on the device; a graph gathers them first. All graphs write hidden states to the same
buffer: logits of a large vocabulary, kept for every size, would take gigabytes. A batch between two sizes uses the
larger graph; the rows beyond the batch are padding, with slot -1, length 0 and the null block. All other steps run
eagerly: prefill, drafts, batches beyond the largest size, and every step if the capture failed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from slipway_api.memory import WEIGHT_BYTES, ModelShape, Needs, activation_bytes
from slipway_runtime.kernels.dispatch import AttentionPlan, CapturableKernels, LoraPlan
from slipway_runtime.kernels.upload import static_buffer, upload, upload_into
from slipway_runtime.worker.input_batch import Ints
from slipway_runtime.worker.inputs import HostInputs

WORKSPACE_BYTES = 64 << 20  # of cuBLAS, on the stream that captures
LAUNCH_BYTES = 8 << 10  # driver memory per captured launch; an estimate, to be measured on a GPU
LAUNCHES_OF_A_LAYER = 13
Padded = npt.NDArray[Any]
# token_ids, positions, slots (T,), the attention and the adapters of the step -> hidden states (T, H)
Compute = Callable[[Tensor, Tensor, Tensor, AttentionPlan, LoraPlan | None], Tensor]


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A captured step that can be replayed."""

    replay: Callable[[], object]


class Capture(Protocol):
    """Captures a computation as a graph."""

    def __call__(self, compute: Callable[[], object]) -> CapturedGraph:
        """Raises RuntimeError when the capture fails."""


class CudaCapture:
    """Captures CUDA graphs in one memory pool. Capture the largest first, so that smaller graphs reuse its memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, compute: Callable[[], object]) -> CapturedGraph:
        """Run the computation once, then capture it: kernels compile and workspaces are allocated before the capture.

        Always on the same stream: cuBLAS keeps a workspace of 32 MiB for each stream that it ever ran on.
        """
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            compute()
        return CapturedGraph(graph.replay)


def batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes for which graphs are captured, up to `max_num_seqs`."""
    return tuple(size for size in (1, 2, 4, *range(8, max_num_seqs + 1, 8)) if size <= max_num_seqs)


def reserve_bytes(
    shape: ModelShape, *, max_num_seqs: int, max_model_len: int, block_size: int, dtype: str, with_adapters: bool
) -> int:
    """Device memory of a runner's graphs: static inputs, hidden states, activations, driver and cuBLAS memory."""
    rows = batch_sizes(max_num_seqs)[-1]
    tables = (max_num_seqs + 1 + rows) * 4 * -(-max_model_len // block_size)
    static = tables + rows * (4 + 28 + shape.hidden * WEIGHT_BYTES[dtype])
    step = Needs(dtype=dtype, max_model_len=rows, max_num_seqs=0, max_num_batched_tokens=rows)
    graphs = len(batch_sizes(max_num_seqs)) * (2 if with_adapters else 1)
    launches = graphs * shape.layers * LAUNCHES_OF_A_LAYER
    return static + activation_bytes(shape, step) + launches * LAUNCH_BYTES + WORKSPACE_BYTES


class DecodeGraphs:
    """The captured decode graphs of one runner, and their static inputs."""

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
    ) -> None:
        """num_slots: adapter slots; 0: adapters are off. last_tokens: (max_num_seqs + 1,) of each row, then padding."""
        self.sizes = batch_sizes(max_num_seqs)
        self._kernels = kernels
        self._padding = max_num_seqs
        device, largest, like = last_tokens.device, self.sizes[-1], torch.empty(0, device=last_tokens.device)
        self._last_tokens = last_tokens
        self._tables = torch.zeros(
            max_num_seqs + 1, -(-max_model_len // block_size), dtype=torch.int32, device=device
        )  # of each row, then padding
        self._static, views = static_buffer(self._padded((), (), (), ()), device)
        self._rows, self._positions, self._slots, self._lengths = views
        whole = kernels.plan_for_capture(largest, max_model_len, block_size, like)
        self._plans = {size: kernels.first_rows(whole, size) for size in self.sizes}
        self._lora = {size: kernels.plan_lora_for_capture(size, num_slots, like) for size in self.sizes if num_slots}
        first = self.sizes[0]
        hidden = compute(last_tokens[:first], self._positions[:first], self._slots[:first], self._plans[first], None)
        self._hidden = hidden.new_empty(largest, hidden.shape[1])
        self._graphs: dict[tuple[int, bool], CapturedGraph] = {}
        for size in reversed(self.sizes):
            for adapted in (True, False) if num_slots else (False,):
                self._graphs[size, adapted] = capture(self._computation(compute, size, adapted=adapted))

    def _computation(self, compute: Compute, size: int, *, adapted: bool) -> Callable[[], object]:
        lora = self._lora[size] if adapted else None

        def step() -> None:
            rows, plan = self._rows[:size], self._plans[size]
            self._kernels.update_static_inputs(plan, self._lengths[:size], self._tables, rows)
            token_ids = self._last_tokens.index_select(0, rows)
            self._hidden[:size] = compute(token_ids, self._positions[:size], self._slots[:size], plan, lora)

        return step

    def has(self, inputs: HostInputs) -> bool:
        """Whether there is a graph for a step: decode, of not too many rows."""
        return inputs.is_decode and len(inputs.row_ids) <= self.sizes[-1]

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

    def replay(self, inputs: HostInputs, token_slots: Ints | None) -> tuple[Tensor, Tensor]:
        """Replay a decode step: hidden states (R, H), and its rows on the device (R,). The next replay overwrites them.

        token_slots: (R,) adapter slots; None: no row has an adapter.
        """
        rows = len(inputs.row_ids)
        size = next(size for size in self.sizes if size >= rows)
        upload_into(self._static, self._padded(inputs.row_ids, inputs.positions, inputs.slots, inputs.num_computed + 1))
        if token_slots is not None:
            self._kernels.update_static_lora_inputs(
                self._lora[size], np.concatenate((token_slots, np.full(size - rows, -1, dtype=np.int64)))
            )
        self._graphs[size, token_slots is not None].replay()
        return self._hidden[:rows], self._rows[:rows]

    def _padded(self, rows: ArrayLike, positions: ArrayLike, slots: ArrayLike, lengths: ArrayLike) -> list[Padded]:
        """The static inputs on the host. Padding: the last row, position 0, no slot, length 0."""
        padded: list[Padded] = []
        for values, padding, dtype in (
            (rows, self._padding, np.int64), (positions, 0, np.int64), (slots, -1, np.int64), (lengths, 0, np.int32),
        ):  # fmt: skip
            array = np.full(self.sizes[-1], padding, dtype=dtype)
            array[: len(np.asarray(values))] = values
            padded.append(array)
        return padded
