"""The ranks of one model in this process, each on a thread of its own, which sum over real sockets."""

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from slipway_runtime.models.sharding import Shard
from slipway_runtime.worker.collective import Collective
from tests.runtime.machine import CPU, Machine, Stretch


class Shards:
    """The same machine, cut in `size` parts."""

    def __init__(self, path: Path, *, size: int = 2, **settings: Any) -> None:
        self._threads = [ThreadPoolExecutor(1) for _ in range(size)]
        with tempfile.TemporaryDirectory() as folder:

            def a_rank(rank: int) -> Machine:
                collective = Collective(rank, size, CPU)
                share = Shard(rank, size, collective.sum, collective.gather)
                machine = Machine(path, share=share, **settings)
                collective.join(Path(folder) / "store")
                return machine

            self.machines: list[Machine] = self._on_all(a_rank)

    def logits(self, *work: Stretch) -> dict[int, torch.Tensor]:
        """As all ranks have them: they are the same."""
        first, *others = self._on_all(lambda rank: self.machines[rank].logits(*work))
        assert all(torch.equal(first[row], other[row]) for other in others for row in first)
        return first

    def _on_all(self, work: Callable[[int], Any]) -> list[Any]:
        futures = [thread.submit(work, rank) for rank, thread in enumerate(self._threads)]
        return [future.result(60) for future in futures]
