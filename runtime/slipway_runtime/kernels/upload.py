"""Host-to-device and device-to-host copies of small arrays, several in one transfer through pinned memory.

A copy from pageable memory makes the host wait for the stream; one from pinned memory does not. So arrays that are
made together are packed into one pinned buffer and copied at once. The allocator of pinned memory keeps a buffer until
the stream has read it.

`download` is the only place where a step waits for the device: all results that the host needs are read at once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: kernels read 128 bits at a time where an address allows it

Arrays = Sequence[npt.NDArray[Any]]


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


def download(tensors: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
    """Each tensor of one device as an array, in one copy that the host waits for. On a CPU nothing is copied."""
    device = tensors[0].device
    if device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    bytes_of = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    packed = bytes_of[0] if len(bytes_of) == 1 else torch.cat(bytes_of)
    host = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host.copy_(packed, non_blocking=True)
    values, arrays, start = _wait_and_read(host, device), [], 0
    for tensor in tensors:
        dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
        arrays.append(np.frombuffer(values, dtype, tensor.numel(), start).reshape(tensor.shape))
        start += tensor.nbytes
    return arrays


def _wait_and_read(host: Tensor, device: torch.device) -> npt.NDArray[np.uint8]:
    """Wait for the queued copies to pinned memory, and return a copy of its bytes."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
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
