"""Sleep mode: an idle engine frees the memory of its weights and KV cache, and restores it when it is woken.

| level | KV cache | weights                                                     |
|-------|----------|-------------------------------------------------------------|
| 1     | freed    | moved to host memory; on a CPU that is where they are       |
| 2     | freed    | dropped, and read from disk again; adapters as at level 1   |

KV blocks in host memory are freed with the others. Of an engine of several ranks all sleep and wake together
(`ranks.SharedSleeper`).
"""

import contextlib
import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from slipway_runtime.models.decoder import Decoder
from slipway_runtime.worker.capture import free_device_memory
from slipway_runtime.worker.offload import HostCopy, tensors_of
from slipway_runtime.worker.out_of_memory import oom_refused
from slipway_runtime.worker.runner import Runner


class Sleeper:
    """Frees the weights and KV cache of a runner and restores them; in between the runner must compute nothing."""

    def __init__(
        self,
        runner: Runner,
        device: torch.device,
        *,
        load_weights: Callable[[], Decoder],
        allocate_cache: Callable[[], list[Tensor]],
        capture: Callable[[], object],
    ) -> None:
        """capture: captures the CUDA graphs again, if there were any."""
        self.level = 0  # 0: awake
        self.beside: Sleeper | None = None  # of a draft model, which sleeps and wakes along
        self._runner = runner
        self._device = device
        self._load_weights = load_weights
        self._allocate_cache = allocate_cache
        self._capture = capture
        self._hooks = [adapted.lora for layer in runner.decoder.layers for adapted in layer.adapted]
        self._host: HostCopy | None = None
        self._dropped = False
        self._captured = False

    def sleep(self, level: int) -> None:
        """Free the memory. All KV is lost."""
        assert not self.level
        self._captured, self._runner.graphs = self._runner.graphs is not None, None  # graphs refer to freed memory
        if self.beside is not None:
            self.beside.sleep(level)
        self._free(level)
        self.level = level

    def wake(self) -> None:
        """Restore the memory. Raises ModelRefusedError or OSError where that fails; it may be tried again."""
        self._restore()
        if self._captured:
            self._capture()
            self._captured = False
        if self.beside is not None and self.beside.level:
            self.beside.wake()
        self.level = 0

    def _free(self, level: int) -> None:
        self._runner.caches = []
        if self._runner.host is not None:
            self._runner.host.give_back()
        self._dropped = level == 2
        if self._dropped:
            del self._runner.decoder
        if self._device.type != "cpu":
            self._host = HostCopy(tensors_of(self._hooks if self._dropped else self._runner.decoder))
            free_device_memory()
        _return_freed_memory()

    def _restore(self) -> None:
        """Restore what is not restored yet."""
        runner = self._runner
        if self._host is not None:
            with oom_refused("the weights", self._device):
                self._host.restore()
            self._host = None
        if self._dropped:
            with oom_refused("the weights", self._device):
                decoder = self._load_weights()
            places = (adapted for layer in decoder.layers for adapted in layer.adapted)
            for adapted, hook in zip(places, self._hooks, strict=True):
                adapted.lora = hook
            runner.decoder, self._dropped = decoder, False
        if not runner.caches:
            with oom_refused("the KV cache", self._device):
                runner.caches = self._allocate_cache()


def _return_freed_memory() -> None:
    """Return what malloc keeps of freed memory, up to 64 MiB between two allocations, to the operating system."""
    with contextlib.suppress(AttributeError):  # a C library that is not glibc
        ctypes.CDLL(None).malloc_trim(0)
