"""Copies of small arrays from the host to a device, several in one transfer.

A copy from pageable memory makes the host wait for the stream; one from pinned memory does not. So arrays that are
made together are packed into one pinned buffer and travel at once. The allocator of pinned memory keeps a buffer until
the stream has read it.
"""

from collections.abc import Sequence
from typing import Any

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
