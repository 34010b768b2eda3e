"""CUDA graphs of decode steps: which step may be replayed from a captured graph, and what its static inputs hold.

A graph replays launches with the addresses and grids that they had. So there is one for each of a few batch sizes
(1, 2, 4, 8, then steps of 8), without adapters and, where adapters are on, with as many as there may be; it reads
buffers that stay, and a step is written into them. A batch between two sizes takes the larger: the rows behind it are
padding, with slot -1, length 0 and the null block. Everything else is computed as it is planned: prompts, drafts,
batches beyond the largest size, and everything where the capture failed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from slipway_runtime.kernels.dispatch import AttentionPlan, CapturableKernels, LoraPlan
from slipway_runtime.worker.input_batch import Ints
from slipway_runtime.worker.inputs import StepInputs

# token_ids, positions, slots (T,), the attention and the adapters of the step -> scores (T, V)
Compute = Callable[[Tensor, Tensor, Tensor, AttentionPlan, LoraPlan | None], Tensor]


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A step that can be replayed. What it computes is in `scores` afterwards."""

    replay: Callable[[], object]
    scores: Tensor


class Capture(Protocol):
    """How a computation is captured."""

    def __call__(self, compute: Callable[[], Tensor]) -> CapturedGraph:
        """Raises RuntimeError where it cannot be."""


class CudaCapture:
    """As CUDA graphs, which share one pool of memory: the largest first, so that the others fit into what it took."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, compute: Callable[[], Tensor]) -> CapturedGraph:
        """Compute once beforehand: compiling and workspaces have no place in a capture.

        Always on the same stream: cuBLAS keeps a workspace of 32 MiB for each stream that it ever ran on.
        """
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            scores = compute()
        return CapturedGraph(graph.replay, scores)


def batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The sizes that are captured, up to that of the largest batch."""
    return tuple(size for size in (1, 2, 4, *range(8, max_num_seqs + 1, 8)) if size <= max_num_seqs)


class DecodeGraphs:
    """The captured graphs of one runner, and the buffers that they read."""

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
        """num_slots: of adapters; 0: they are off."""
        self.sizes = batch_sizes(max_num_seqs)
        self._kernels = kernels
        largest, like = self.sizes[-1], torch.empty(0, device=device)
        self._token_ids = torch.zeros(largest, dtype=torch.int32, device=device)
        self._positions = torch.zeros(largest, dtype=torch.int64, device=device)
        self._slots = torch.full((largest,), -1, dtype=torch.int64, device=device)
        self._plans = {size: kernels.plan_for_capture(size, max_model_len, block_size, like) for size in self.sizes}
        self._lora = {size: kernels.plan_lora_for_capture(size, num_slots, like) for size in self.sizes if num_slots}
        self._graphs: dict[tuple[int, bool], CapturedGraph] = {}
        for size in reversed(self.sizes):
            for adapted in (True, False) if num_slots else (False,):
                self._graphs[size, adapted] = capture(self._computation(compute, size, adapted=adapted))

    def _computation(self, compute: Compute, size: int, *, adapted: bool) -> Callable[[], Tensor]:
        lora = self._lora[size] if adapted else None

        def step() -> Tensor:
            return compute(self._token_ids[:size], self._positions[:size], self._slots[:size], self._plans[size], lora)

        return step

    def scores(self, inputs: StepInputs, token_slots: Ints | None) -> Tensor | None:
        """Those of a step of one new token a row, each of which samples (R, V); None: compute the step as planned.

        token_slots: (R,) of adapters; None: no row has one. The scores are written over by the next step.
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
        graph = self._graphs[size, token_slots is not None]
        graph.replay()
        return graph.scores[:rows]
