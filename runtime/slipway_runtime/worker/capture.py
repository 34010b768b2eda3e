"""Capture of steps as CUDA graphs: the capture itself, what all captured steps of a runner share, what a step gives."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipway_runtime.kernels.dispatch import AttentionPlan, CapturableKernels, LoraPlan

# token_ids, positions, slots (T,), the attention and the adapters of the step -> hidden states (T, H)
Compute = Callable[[Tensor, Tensor, Tensor, AttentionPlan, LoraPlan | None], Tensor]


@dataclass(frozen=True, slots=True)
class StepHidden:
    """Hidden states of a step of T tokens and D samples."""

    tokens: Tensor  # (T, H)
    sampled: Tensor  # (D, H) of the token before each sample
    rows_on_device: Tensor  # (D,) the row of each sample


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


@dataclass(frozen=True, slots=True)
class SharedBuffers:
    """What all captured steps of a runner read and write. Steps run one after the other, so each may overwrite it."""

    compute: Compute
    kernels: CapturableKernels
    last_tokens: Tensor  # (rows + 1,) the token that each row sampled last, then one for padding
    tables: Tensor  # (rows + 1, blocks) block tables of all rows, then one for padding
    plan: AttentionPlan  # of the most rows; smaller steps have its first ones
    hidden: Tensor  # (most tokens, H), of the last replay
    lora: dict[int, LoraPlan]  # by number of tokens; empty: adapters are off

    @property
    def padding_row(self) -> int:
        """The row that stands for none."""
        return len(self.last_tokens) - 1
