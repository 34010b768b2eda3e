"""Offload of device tensors to host memory and back: frees device memory while the engine sleeps."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

_OURS = "slipway_runtime."


class HostCopy:
    """Copies tensors to the host and frees their device memory; the tensor objects stay, with empty storage.

    After `restore` every tensor, and every view of it, has the same numbers, at another address.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        memory = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors if tensor.nbytes}
        self._kept: list[tuple[Tensor, Tensor]] = []
        for tensor in memory.values():
            whole = _bytes_of(tensor)
            host = torch.empty(whole.shape, dtype=torch.uint8, pin_memory=tensor.device.type == "cuda")
            self._kept.append((whole, host.copy_(whole)))
            whole.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Allocate the device memory again and copy back. OOM raises torch's error; the call may be repeated."""
        while self._kept:
            whole, host = self._kept[-1]
            whole.untyped_storage().resize_(host.nbytes)
            whole.copy_(host)
            self._kept.pop()


def tensors_of(thing: object) -> Iterator[Tensor]:
    """Every tensor in an object of this package: its attributes, lists, tuples and dict values, at any depth."""
    seen: set[int] = set()

    def walk(thing: object) -> Iterator[Tensor]:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            yield thing
        elif isinstance(thing, list | tuple):
            for item in thing:
                yield from walk(item)
        elif isinstance(thing, dict):
            yield from walk(list(thing.values()))
        elif type(thing).__module__.startswith(_OURS):
            slots = (name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ()))
            for name in {*slots, *getattr(thing, "__dict__", ())}:
                yield from walk(getattr(thing, name, None))

    yield from walk(thing)


def _bytes_of(tensor: Tensor) -> Tensor:
    """A tensor's whole storage, of which the tensor may be a view. uint8."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
