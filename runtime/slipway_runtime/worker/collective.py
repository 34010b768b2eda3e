"""All-reduce and all-gather over the tensor-parallel ranks of a model.

gloo between CPU processes of one machine, NCCL between GPUs.

With two ranks the sum is the same bits for every batch: a + b is b + a. With more, the order of the additions depends
on a number's position in the tensor.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

_PATIENCE: Final = timedelta(minutes=5)  # for a rank that compiles its first kernels; a lost rank is noticed at once


class PeerLostError(Exception):
    """A collective operation, or joining the group, failed: another rank has exited or hangs."""


class Collective:
    """One rank's membership in the process group."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self._device = device
        self._group: Any = None  # torch's stubs have no common type for process groups

    def join(self, store: Path) -> None:
        """Join the group through a file store, whose file need not exist yet; returns when all ranks have joined."""
        meeting = dist.FileStore(str(store), self.size)  # type: ignore[attr-defined]  # not in torch's stubs
        try:
            self._group = self._nccl(meeting) if self._device.type == "cuda" else self._gloo(meeting)
        except RuntimeError as error:
            raise PeerLostError(f"the ranks could not meet: {error}") from error

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in place. Every rank must call it, for tensors of the same shape."""
        assert self._group is not None, "join() comes first"
        try:
            self._group.allreduce([x]).wait()
        except RuntimeError as error:
            raise PeerLostError(f"a sum over {self.size} ranks failed: {error}") from error
        return x

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' x side by side: (R, n) -> (R, size * n). Every rank must call it, with the same shape."""
        assert self._group is not None, "join() comes first"
        rows, columns = x.shape
        parts = x.new_empty(self.size * rows, columns)
        try:
            self._group._allgather_base(parts, x.contiguous()).wait()
        except RuntimeError as error:
            raise PeerLostError(f"gathering from {self.size} ranks failed: {error}") from error
        return parts.view(self.size, rows, columns).movedim(0, 1).reshape(rows, -1)

    def failed_ranks(self, *, failed: bool) -> list[int]:
        """The ranks that say that they failed; waits for all. failed: what this rank says."""
        flags = torch.zeros(self.size, dtype=torch.int32, device=self._device)
        flags[self.rank] = int(failed)
        return [rank for rank, flag in enumerate(self.sum(flags).tolist()) if flag]

    def _gloo(self, meeting: Any) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # its stub has another name
        options._timeout = _PATIENCE
        # Loopback only: all ranks run on this machine. By default gloo listens on the address of the host's name.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return dist.ProcessGroupGloo(meeting, self.rank, self.size, options)

    def _nccl(self, meeting: Any) -> Any:
        dist.init_process_group(
            "nccl",
            store=meeting,
            rank=self.rank,
            world_size=self.size,
            timeout=_PATIENCE,
            device_id=self._device,
        )
        return dist.group.WORLD
