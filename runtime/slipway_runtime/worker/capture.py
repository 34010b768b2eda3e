"""Capture of steps as CUDA graphs: the capture itself, what all captured steps of a runner share, what a step gives."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from slipway_runtime.kernels.dispatch import AttentionPlan, CapturableKernels, LoraPlan
from slipway_runtime.worker.collective import Collective, PeerLostError
from slipway_runtime.worker.out_of_memory import is_out_of_memory

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


@cache
def _capture_stream(device: torch.device | None) -> torch.cuda.Stream:
    """The stream of all captures on a device: cuBLAS keeps a workspace of 32 MiB for each stream that it ever ran on.

    So an engine that wakes up captures again on the same stream. None: the current device.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class CudaCapture:
    """Captures CUDA graphs in one memory pool. Capture the largest first, so that smaller graphs reuse its memory."""

    def __init__(self, device: torch.device | None = None) -> None:
        """device: of the graphs; None: the current one."""
        self._pool = torch.cuda.graph_pool_handle()  # a new one: a pool whose graphs are gone cannot be used again
        self._stream = _capture_stream(device)

    def __call__(self, compute: Callable[[], object]) -> CapturedGraph:
        """Run the computation once, then capture it: kernels compile and workspaces are allocated before the capture.

        Both run on one stream, or the captured calls of cuBLAS would allocate another workspace, in the graphs' pool.
        """
        self.run(compute)
        return self.record(compute)

    def run(self, compute: Callable[[], object]) -> None:
        """Run the computation on the stream of the captures."""
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)

    def record(self, compute: Callable[[], object]) -> CapturedGraph:
        """Capture a computation that was run before: the device computes nothing.

        Graphs and the runner that has them refer to each other, so the collector frees old ones, at any moment; and
        freeing a graph while another is captured ends the capture with an error. Seen on an H100.
        """
        graph = torch.cuda.CUDAGraph()
        with (
            _no_collection(),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            compute()
        return CapturedGraph(graph.replay)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's collector of cycles does not run inside."""
    ran = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if ran:
            gc.enable()


def first_line(error: Exception) -> str:
    """The first line of an error's message: CUDA's have advice in many more."""
    return str(error).partition("\n")[0]


class TwoPhaseCapture(Protocol):
    """A capture that runs and records apart, as `CudaCapture`."""

    def run(self, compute: Callable[[], object]) -> None:
        """Run the computation once."""

    def record(self, compute: Callable[[], object]) -> CapturedGraph:
        """Capture it. Raises RuntimeError when that fails."""


class StepNotCapturedError(RuntimeError):
    """This rank could not capture a step, which all ranks know."""


class OtherRankFailedError(RuntimeError):
    """Another rank could not capture a step, and says why."""


class SharedCapture:
    """Captures on all ranks, which agree after each capture whether all have it.

    A rank that stopped alone would leave the others in the sums of their next run, until these time out after minutes.
    A failed run is no failed capture: the others are inside of its sums, so its rank must end, and they with it.
    """

    def __init__(self, inner: TwoPhaseCapture, collective: Collective) -> None:
        self._inner = inner
        self._collective = collective

    def __call__(self, compute: Callable[[], object]) -> CapturedGraph:
        """Raises StepNotCapturedError on the ranks that failed, OtherRankFailedError on the others."""
        ranks = self._collective
        self._inner.run(compute)
        error = graph = None
        try:
            graph = self._inner.record(compute)
        except (RuntimeError, PeerLostError) as refused:  # PeerLostError: a sum that cannot be captured
            if is_out_of_memory(refused):  # the engine ends
                raise
            error = StepNotCapturedError(f"on rank {ranks.rank} of {ranks.size}: {first_line(refused)}")
        failed = ranks.failed_ranks(failed=error is not None)
        if error is not None:
            raise error
        if failed:
            raise OtherRankFailedError(f"a step could not be captured on rank {failed[0]} of {ranks.size}")
        assert graph is not None
        return graph


def free_device_memory() -> None:
    """Return cached device memory to the driver: unused blocks, and the workspaces of cuBLAS.

    Graphs that were captured must not be replayed any more: they have the addresses of the workspaces.
    """
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


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
