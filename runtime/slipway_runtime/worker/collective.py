"""Sums over the ranks that share a model: gloo between processes of one machine's CPUs, NCCL between its GPUs.

Two ranks sum exactly alike, whatever the batch: a + b is b + a. More of them add in an order that depends on where in
the tensor a number stands.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

_PATIENCE: Final = timedelta(minutes=5)  # for a rank that compiles its first kernels; one that is gone is seen at once


class PeerLostError(Exception):
    """A sum could not be made: another rank is gone, or hangs."""


class Collective:
    """One rank's end of a group."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self._rank = rank
        self._size = size
        self._device = device
        self._group: Any = None  # torch's stubs do not know what all of them have in common

    def join(self, store: Path) -> None:
        """Meet the others, at a file that need not be there yet; returns when all have come."""
        meeting = dist.FileStore(str(store), self._size)  # type: ignore[attr-defined]  # nor what it exports
        try:
            self._group = self._nccl(meeting) if self._device.type == "cuda" else self._gloo(meeting)
        except RuntimeError as error:
            raise PeerLostError(f"the ranks could not meet: {error}") from error

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in place. Every rank must call it, for tensors of the same shape."""
        assert self._group is not None, "nobody computes before all have joined"
        try:
            self._group.allreduce([x]).wait()
        except RuntimeError as error:
            raise PeerLostError(f"a sum over {self._size} ranks failed: {error}") from error
        return x

    def _gloo(self, meeting: Any) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # its stub has another name
        options._timeout = _PATIENCE
        # No other machine has a reason to come; without this, gloo listens where the host's name points.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return dist.ProcessGroupGloo(meeting, self._rank, self._size, options)

    def _nccl(self, meeting: Any) -> Any:
        dist.init_process_group(
            "nccl",
            store=meeting,
            rank=self._rank,
            world_size=self._size,
            timeout=_PATIENCE,
            device_id=self._device,
        )
        return dist.group.WORLD
