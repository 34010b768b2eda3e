"""Fused q/k norm, RoPE and KV cache write on a GPU, in Triton. Tested against `reference.rope_and_store`.

One program norms and rotates one head of one token in place and, for a key or a value, writes it to the token's slot;
in a quantized cache, its codes and scale. A slot below 0 is padding: the cache is not written. The arithmetic is
float32, rounded where the reference rounds.

The lower bound is bytes over bandwidth: (Hq + 2 Hkv) · D elements read a token; queries and keys written back, keys
and values written to the cache. Nothing was timed on a GPU yet.
"""

# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
# Triton comes without types, and gives the arguments of a kernel its own.
# ruff: noqa: N803
# Compile-time constants of a kernel are upper case, as everywhere in Triton.

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipway_runtime.kernels import kv_pages
from slipway_runtime.kernels.reference_attention import HeadNorms

__all__ = ["rope_and_store"]

HALF_TO_EVEN = tl.constexpr(1.5 * 2.0**23)  # adding and subtracting it rounds to a whole number, half to even


def rope_and_store(
    qkv: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor, num_q_heads: int, norms: HeadNorms = None
) -> Tensor:
    """Norm and rotate queries and keys in place, write keys and values into their slots, return the queries.

    qkv: (T, Hq + 2 Hkv, D)  cos, sin: (T, 1, D), the first half of `sin` negated  slots: (T,)  cache: as `kv_pages`
    says.
    """
    num_tokens, num_heads, head_dim = qkv.shape
    half = head_dim // 2
    assert qkv.stride(2) == cos.stride(2) == sin.stride(2) == 1, "the elements of a head lie side by side"
    assert cache.is_contiguous(), "a head's page is contiguous only then"
    quantized = kv_pages.is_quantized(cache.dtype)
    q_weight, k_weight, eps = (qkv, qkv, 0.0) if norms is None else norms
    _rope_and_store[(num_tokens, num_heads)](
        qkv, cos, sin, cache, kv_pages.scales(cache, head_dim) if quantized else cache, slots, q_weight, k_weight,
        qkv.stride(0), qkv.stride(1), cos.stride(0), sin.stride(0), eps,
        NUM_Q_HEADS=num_q_heads, NUM_KV_HEADS=(num_heads - num_q_heads) // 2,
        BLOCK_SIZE=kv_pages.block_size_of(cache, head_dim), NORM=norms is not None, QUANTIZED=quantized,
        WHOLE=cache.dtype == torch.int8, LARGEST=kv_pages.largest(cache.dtype) if quantized else 0.0,
        HALF=half, BLOCK=triton.next_power_of_2(half), num_warps=1,
    )  # fmt: skip
    return qkv[:, :num_q_heads]


@triton.jit
def _rope_and_store(
    qkv, cos, sin, cache, scales, slots, q_weight, k_weight,
    token_stride, head_stride, cos_stride, sin_stride, eps,
    NUM_Q_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, NORM: tl.constexpr,
    QUANTIZED: tl.constexpr, WHOLE: tl.constexpr, LARGEST: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (T, Hq + 2 Hkv)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    ours = d < HALF
    dtype = qkv.dtype.element_ty
    # One thread has both halves of a head: in place, no thread may read values that another has already rotated.
    first = qkv + token * token_stride + head * head_stride + d
    second = first + HALF
    a = tl.load(first, mask=ours, other=0.0)
    b = tl.load(second, mask=ours, other=0.0)
    if head < NUM_Q_HEADS + NUM_KV_HEADS:
        x, y = a.to(tl.float32), b.to(tl.float32)
        if NORM:
            weight = q_weight if head < NUM_Q_HEADS else k_weight
            shrink = tl.rsqrt((tl.sum(x * x, 0) + tl.sum(y * y, 0)) / (2 * HALF) + eps)
            x = (x * shrink).to(dtype).to(tl.float32) * tl.load(weight + d, mask=ours, other=0.0).to(tl.float32)
            y = (y * shrink).to(dtype).to(tl.float32) * tl.load(weight + HALF + d, mask=ours, other=0.0).to(tl.float32)
            x, y = x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)
        cos_a = tl.load(cos + token * cos_stride + d, mask=ours, other=0.0).to(tl.float32)
        cos_b = tl.load(cos + token * cos_stride + HALF + d, mask=ours, other=0.0).to(tl.float32)
        sin_a = tl.load(sin + token * sin_stride + d, mask=ours, other=0.0).to(tl.float32)
        sin_b = tl.load(sin + token * sin_stride + HALF + d, mask=ours, other=0.0).to(tl.float32)
        a = (x * cos_a + y * sin_a).to(dtype)
        b = (y * cos_b + x * sin_b).to(dtype)
        tl.store(first, a, mask=ours)
        tl.store(second, b, mask=ours)
    slot = tl.load(slots + token).to(tl.int64)
    if (head >= NUM_Q_HEADS) & (slot >= 0):
        # The pages of a block are in the order of the heads in qkv: keys, then values.
        page: tl.constexpr = BLOCK_SIZE * (2 * HALF + 4) if QUANTIZED else BLOCK_SIZE * 2 * HALF
        number = (slot // BLOCK_SIZE) * (2 * NUM_KV_HEADS) + head - NUM_Q_HEADS
        if QUANTIZED:
            x, y = a.to(tl.float32), b.to(tl.float32)
            largest = tl.maximum(tl.max(tl.abs(x), 0), tl.max(tl.abs(y), 0))
            scale = tl.maximum(tl.div_rn(largest, LARGEST), 1e-12)
            tl.store(scales + number * (page // 4) + slot % BLOCK_SIZE, scale)
            x, y = tl.div_rn(x, scale), tl.div_rn(y, scale)
            if WHOLE:
                x, y = (x + HALF_TO_EVEN) - HALF_TO_EVEN, (y + HALF_TO_EVEN) - HALF_TO_EVEN
            code_a, code_b = x.to(cache.dtype.element_ty), y.to(cache.dtype.element_ty)
        else:
            code_a, code_b = a, b
        place = cache + number * page + (slot % BLOCK_SIZE) * (2 * HALF) + d
        tl.store(place, code_a, mask=ours)
        tl.store(place + HALF, code_b, mask=ours)
