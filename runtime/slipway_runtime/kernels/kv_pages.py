"""Memory layout and quantization of the paged KV cache of one layer.

Head-major pages: a block holds, for keys and then for values, one page per KV head, so that the part of a block that a
query head reads is contiguous.

    in the model's dtype  (blocks, 2, Hkv, page, D)
    quantized             (blocks, 2, Hkv, page · (D + 4)) one-byte codes: page · D codes of the tokens, then page
                          float32 scales, one per token and head, so copying a block's bytes copies its scales too.

Latent attention (MLA) has one plane in place of the two: its keys are its values, too.

The codes are `rounding`'s, with a scale for each token and head; the dtype of the tensor is their format.
"""

import torch
from torch import Tensor

from slipway_runtime.kernels.rounding import LARGEST_CODE, quantize

KV_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
SCALE_BYTES = 4


def is_quantized(dtype: torch.dtype) -> bool:
    """Whether a cache of this type holds codes and scales."""
    return dtype in LARGEST_CODE


def largest(dtype: torch.dtype) -> float:
    """The largest code."""
    return LARGEST_CODE[dtype]


def page_shape(block_size: int, head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
    """The shape of one head's page."""
    return (block_size * (head_dim + SCALE_BYTES),) if is_quantized(dtype) else (block_size, head_dim)


def head_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of the key or the value of one token and head."""
    return head_dim * dtype.itemsize + (SCALE_BYTES if is_quantized(dtype) else 0)


def block_size_of(cache: Tensor, head_dim: int) -> int:
    """Tokens in a block."""
    return cache.shape[3] // (head_dim + SCALE_BYTES) if is_quantized(cache.dtype) else cache.shape[3]


def codes(cache: Tensor, head_dim: int) -> Tensor:
    """Keys and values, or their codes, as a view. (blocks, 2, Hkv, page, D)."""
    if not is_quantized(cache.dtype):
        return cache
    page = block_size_of(cache, head_dim)
    return cache[..., : page * head_dim].view(*cache.shape[:3], page, head_dim)


def scales(cache: Tensor, head_dim: int) -> Tensor:
    """The scales of a quantized cache, as a view. (blocks, 2, Hkv, page), float32."""
    page = block_size_of(cache, head_dim)
    return cache[..., page * head_dim :].view(torch.float32)


def store(kv: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write keys and values of T tokens, or latents.

    kv: (T, planes, Hkv, D)  slots: (T,) block * page + place in the block.
    """
    head_dim = kv.shape[-1]
    page = block_size_of(cache, head_dim)
    block, place = slots // page, slots % page
    if not is_quantized(cache.dtype):
        cache[block, :, :, place] = kv.to(cache.dtype)
        return
    code, scale = quantize(kv, cache.dtype)
    # As plain bytes: torch's assignment by index does not support float8.
    codes(cache.view(torch.int8), head_dim)[block, :, :, place] = code.view(torch.int8)
    scales(cache, head_dim)[block, :, :, place] = scale


def dequantized(pages: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Pages of a cache, (…, page · (D + 4)) -> (…, page, D) in `dtype`."""
    page = pages.shape[-1] // (head_dim + SCALE_BYTES)
    code = pages[..., : page * head_dim].view(*pages.shape[:-1], page, head_dim)
    scale = pages[..., page * head_dim :].view(torch.float32)
    return (code.to(torch.float32) * scale[..., None]).to(dtype)
