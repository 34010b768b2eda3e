"""Host-to-device and device-to-host copies of small arrays, several in one transfer through pinned memory.

A copy from pageable memory makes the host wait for the stream; one from pinned memory does not. So arrays that are
made together are packed into one pinned buffer and copied at once. The allocator of pinned memory keeps a buffer until
the stream has read it.

`Download` is the only place where the host waits for the device: all results of a step that the host needs are copied
at once. The copy is queued behind the step, and the host waits for it when it reads the arrays; by then the next step
is queued too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: kernels read 128 bits at a time where an address allows it

Arrays = Sequence[npt.NDArray[Any]]
Ints = npt.NDArray[np.int64]


def upload(arrays: Arrays, device: torch.device) -> list[Tensor]:
    """Each array as a tensor on the device, in one copy that the host does not wait for. On a CPU nothing is copied."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts, size = _places(arrays)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    views = _views(host, arrays, starts)
    for view, array in zip(views, arrays, strict=True):
        view.copy_(torch.from_numpy(array))
    return _views(host.to(device, non_blocking=True), arrays, starts)


def upload_into(buffer: Tensor, arrays: Arrays) -> None:
    """Write arrays one after another into a buffer of bytes on a device, in one copy that the host does not wait for.

    The arrays have the shapes and types of those that `static_buffer` made the buffer for.
    """
    device = buffer.device
    starts, size = _places(arrays)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for view, array in zip(_views(host, arrays, starts), arrays, strict=True):
        view.copy_(torch.from_numpy(array))
    buffer.copy_(host, non_blocking=True)


def static_buffer(arrays: Arrays, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """A buffer for `upload_into` that holds these arrays, and a view of it for each."""
    starts, size = _places(arrays)
    buffer = torch.zeros(size, dtype=torch.uint8, device=device)
    upload_into(buffer, arrays)
    return buffer, _views(buffer, arrays, starts)


class Download:
    """A copy of tensors to the host, queued behind what the device was asked for before. On a CPU nothing is copied."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """Queue the copy. No tensors: `arrays` waits for the device only, so that the host does not run ahead."""
        self._tensors = tensors
        self._host: Tensor | None = None
        self._wait: Callable[[], object] | None = None
        if device.type == "cpu":
            return
        if tensors:
            bytes_of = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
            packed = bytes_of[0] if len(bytes_of) == 1 else torch.cat(bytes_of)
            self._host = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
            self._host.copy_(packed, non_blocking=True)
        self._wait = queue_event(device)

    def arrays(self) -> list[npt.NDArray[Any]]:
        """Wait for the copy; each tensor as an array. Any thread may call it, once."""
        tensors, self._tensors = self._tensors, ()
        if self._wait is None:
            return [tensor.numpy() for tensor in tensors]
        self._wait()
        if self._host is None:
            return []
        values, arrays, start = _bytes_of(self._host), [], 0
        for tensor in tensors:
            dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
            arrays.append(np.frombuffer(values, dtype, tensor.numel(), start).reshape(tensor.shape))
            start += tensor.nbytes
        return arrays


def download(tensors: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
    """Each tensor of one device as an array, in one copy that the host waits for."""
    return Download(tensors, tensors[0].device).arrays()


def queue_event(device: torch.device) -> Callable[[], object]:
    """Queue an event; the returned function waits until the device has reached it."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.current_stream(device).record_event()
    wait: Callable[[], object] = event.synchronize
    return wait


def _bytes_of(host: Tensor) -> npt.NDArray[np.uint8]:
    """A copy of the bytes of pinned memory, which may be used again."""
    array: npt.NDArray[np.uint8] = host.numpy().copy()
    return array


def _places(arrays: Arrays) -> tuple[list[int], int]:
    """Where each array begins in the buffer, and the buffer's size, in bytes."""
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return starts, size


def _views(buffer: Tensor, arrays: Arrays, starts: list[int]) -> list[Tensor]:
    return [
        buffer[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]
