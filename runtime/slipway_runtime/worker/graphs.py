"""CUDA graphs of decode steps: which steps are replayed from a captured graph, and the static input buffers.

A graph replays kernel launches with the addresses and grids of the capture. So one graph is captured for each of a few
batch sizes (1, 2, 4, 8, then steps of 8), without adapters and, where adapters are on, also with all adapter slots.
All graphs read the same static inputs, into which each step is copied, and write hidden states to the same buffer:
logits of a large vocabulary, kept for every size, would take gigabytes. A batch between two sizes uses the larger
graph; the rows beyond the batch are padding, with slot -1, length 0 and the null block. All other steps run eagerly:
prefill, drafts, batches beyond the largest size, and every step if the capture failed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from slipway_api.memory import WEIGHT_BYTES, ModelShape, Needs, activation_bytes
from slipway_runtime.kernels.dispatch import AttentionPlan, CapturableKernels, LoraPlan
from slipway_runtime.worker.input_batch import Ints
from slipway_runtime.worker.inputs import StepInputs

WORKSPACE_BYTES = 64 << 20  # of cuBLAS, on the stream that captures
LAUNCH_BYTES = 8 << 10  # driver memory per captured launch; an estimate, to be measured on a GPU
LAUNCHES_OF_A_LAYER = 13
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
    static = rows * (4 * -(-max_model_len // block_size) + 4 + 20 + shape.hidden * WEIGHT_BYTES[dtype])
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
        device: torch.device,
    ) -> None:
        """num_slots: adapter slots; 0: adapters are off."""
        self.sizes = batch_sizes(max_num_seqs)
        self._kernels = kernels
        largest, like = self.sizes[-1], torch.empty(0, device=device)
        self._token_ids = torch.zeros(largest, dtype=torch.int32, device=device)
        self._positions = torch.zeros(largest, dtype=torch.int64, device=device)
        self._slots = torch.full((largest,), -1, dtype=torch.int64, device=device)
        whole = kernels.plan_for_capture(largest, max_model_len, block_size, like)
        self._plans = {size: kernels.first_rows(whole, size) for size in self.sizes}
        self._lora = {size: kernels.plan_lora_for_capture(size, num_slots, like) for size in self.sizes if num_slots}
        first = self.sizes[0]
        hidden = compute(
            self._token_ids[:first], self._positions[:first], self._slots[:first], self._plans[first], None
        )
        self._hidden = hidden.new_empty(largest, hidden.shape[1])
        self._graphs: dict[tuple[int, bool], CapturedGraph] = {}
        for size in reversed(self.sizes):
            for adapted in (True, False) if num_slots else (False,):
                self._graphs[size, adapted] = capture(self._computation(compute, size, adapted=adapted))

    def _computation(self, compute: Compute, size: int, *, adapted: bool) -> Callable[[], object]:
        lora = self._lora[size] if adapted else None

        def step() -> None:
            self._hidden[:size] = compute(
                self._token_ids[:size], self._positions[:size], self._slots[:size], self._plans[size], lora
            )

        return step

    def hidden(self, inputs: StepInputs, token_slots: Ints | None) -> Tensor | None:
        """Replay a decode step, one new token a row, all sampled: hidden states (R, H). None: no graph, run eagerly.

        token_slots: (R,) adapter slots; None: no row has an adapter. The next replay overwrites the result.
        """
        rows = len(inputs.num_new)
        if inputs.sampled_tokens is not None or rows > self.sizes[-1]:
            return None
        size = next(size for size in self.sizes if size >= rows)
        for buffer, values, padding in (
            (self._token_ids, inputs.token_ids, 0),
            (self._positions, inputs.positions, 0),
            (self._slots, inputs.slots, -1),
        ):
            buffer[:rows].copy_(values)
            buffer[rows:size].fill_(padding)
        self._kernels.update_static_inputs(self._plans[size], inputs.num_computed, inputs.block_tables)
        if token_slots is not None:
            self._kernels.update_static_lora_inputs(
                self._lora[size], np.concatenate((token_slots, np.full(size - rows, -1, dtype=np.int64)))
            )
        self._graphs[size, token_slots is not None].replay()
        return self._hidden[:rows]
