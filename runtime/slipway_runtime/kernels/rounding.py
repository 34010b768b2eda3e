"""Rounding to 8-bit codes with one scale for each row: of weights, of a linear's inputs, and of keys and values.

    code = round(x / scale), scale = max |x| of the row / largest code, so x ≈ code · scale

A row's largest value becomes the largest code, and its scale depends on no other row.
"""

from typing import Final

import torch
from torch import Tensor

LARGEST_CODE: Final = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
SMALLEST_SCALE: Final = 1e-12  # of a row of zeros


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x: (…, D) -> codes (…, D) and scales (…), float32."""
    x = x.float()
    scale = (x.abs().amax(-1) / LARGEST_CODE[dtype]).clamp_min_(SMALLEST_SCALE)
    code = x / scale[..., None]
    return (code.round_() if dtype == torch.int8 else code).to(dtype), scale
