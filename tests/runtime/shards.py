"""Two ranks of one model in this process, each on a thread of its own, which sum over real sockets."""

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from slipway_runtime.models.sharding import Shard
from slipway_runtime.worker.collective import Collective
from tests.runtime.machine import CPU, Machine, Stretch

SIZE = 2


class Shards:
    """The same machine, cut in two."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self._threads = [ThreadPoolExecutor(1) for _ in range(SIZE)]
        with tempfile.TemporaryDirectory() as folder:

            def a_rank(rank: int) -> Machine:
                collective = Collective(rank, SIZE, CPU)
                share = Shard(rank, SIZE, collective.sum, collective.gather)
                machine = Machine(path, share=share, **settings)
                collective.join(Path(folder) / "store")
                return machine

            self.machines: list[Machine] = self._on_all(a_rank)

    def logits(self, *work: Stretch) -> dict[int, torch.Tensor]:
        """As both ranks have them: they are the same."""
        first, second = self._on_all(lambda rank: self.machines[rank].logits(*work))
        assert all(torch.equal(first[row], second[row]) for row in first)
        return first

    def _on_all(self, work: Callable[[int], Any]) -> list[Any]:
        futures = [thread.submit(work, rank) for rank, thread in enumerate(self._threads)]
        return [future.result(60) for future in futures]
