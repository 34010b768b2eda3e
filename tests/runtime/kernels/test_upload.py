"""Arrays that travel together to a device."""

import numpy as np
import pytest
import torch

from slipway_runtime.kernels.upload import ALIGNMENT, _places, _views, upload

ARRAYS = [
    np.arange(5, dtype=np.int32), np.zeros((0, 3), dtype=np.int32), np.array([[1.5], [2.5]], dtype=np.float32),
    np.arange(3, dtype=np.int64),
]  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_arrays_arrive_as_they_were(device):
    for array, tensor in zip(ARRAYS, upload(ARRAYS, torch.device(device)), strict=True):
        assert tensor.shape == array.shape
        assert torch.equal(tensor.cpu(), torch.from_numpy(array))


def test_arrays_are_packed_into_one_buffer_each_at_an_aligned_place():
    """Finding 16: each array was a copy of its own, which the host waited for."""
    starts, size = _places(ARRAYS)
    assert all(start % ALIGNMENT == 0 for start in starts)
    buffer = torch.zeros(size, dtype=torch.uint8)
    for view, array in zip(_views(buffer, ARRAYS, starts), ARRAYS, strict=True):
        view.copy_(torch.from_numpy(array))
    for view, array in zip(_views(buffer, ARRAYS, starts), ARRAYS, strict=True):
        assert view.dtype == torch.from_numpy(array).dtype
        assert torch.equal(view, torch.from_numpy(array))
        assert view.numel() == 0 or view.untyped_storage().data_ptr() == buffer.data_ptr()
