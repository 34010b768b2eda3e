"""Rotation and cache write in one kernel, in Triton: a claim about `reference.rope_and_store`.

One program turns one head of one token in place and, if it is a key or a value, copies it into the token's slot. A
slot below 0 is padding: the cache is left alone. The arithmetic is float32, rounded once at the end.

The floor is bytes over bandwidth: (Hq + 2 Hkv) · D elements read a token; queries and keys written back, keys and
values written to the cache. No timing on a GPU has been made yet.
"""

# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
# Triton comes without types, and gives the arguments of a kernel its own.
# ruff: noqa: N803
# Compile-time constants of a kernel are upper case, as everywhere in Triton.

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["rope_and_store"]


def rope_and_store(qkv: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor, num_q_heads: int) -> Tensor:
    """Rotate queries and keys in place, write keys and values into their slots, return the queries.

    qkv: (T, Hq + 2 Hkv, D)  cos, sin: (T, 1, D), the first half of `sin` negated  slots: (T,).
    """
    num_tokens, num_heads, head_dim = qkv.shape
    half = head_dim // 2
    assert qkv.stride(2) == cos.stride(2) == sin.stride(2) == 1, "the elements of a head lie side by side"
    assert cache.is_contiguous(), "so do those of a head's page"
    _rope_and_store[(num_tokens, num_heads)](
        qkv, cos, sin, cache, slots,
        qkv.stride(0), qkv.stride(1), cos.stride(0), sin.stride(0), cache.stride(0),
        NUM_Q_HEADS=num_q_heads, NUM_KV_HEADS=(num_heads - num_q_heads) // 2, BLOCK_SIZE=cache.shape[3],
        HALF=half, BLOCK=triton.next_power_of_2(half), num_warps=1,
    )  # fmt: skip
    return qkv[:, :num_q_heads]


@triton.jit
def _rope_and_store(
    qkv, cos, sin, cache, slots, token_stride, head_stride, cos_stride, sin_stride, block_stride,
    NUM_Q_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (T, Hq + 2 Hkv)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    ours = d < HALF
    # Both halves of a head belong to the same thread: in place, nobody may read what another has turned already.
    first = qkv + token * token_stride + head * head_stride + d
    second = first + HALF
    a = tl.load(first, mask=ours, other=0.0)
    b = tl.load(second, mask=ours, other=0.0)
    if head < NUM_Q_HEADS + NUM_KV_HEADS:
        cos_a = tl.load(cos + token * cos_stride + d, mask=ours, other=0.0).to(tl.float32)
        cos_b = tl.load(cos + token * cos_stride + HALF + d, mask=ours, other=0.0).to(tl.float32)
        sin_a = tl.load(sin + token * sin_stride + d, mask=ours, other=0.0).to(tl.float32)
        sin_b = tl.load(sin + token * sin_stride + HALF + d, mask=ours, other=0.0).to(tl.float32)
        x, y = a.to(tl.float32), b.to(tl.float32)
        a = (x * cos_a + y * sin_a).to(qkv.dtype.element_ty)
        b = (y * cos_b + x * sin_b).to(qkv.dtype.element_ty)
        tl.store(first, a, mask=ours)
        tl.store(second, b, mask=ours)
    slot = tl.load(slots + token).to(tl.int64)
    if (head >= NUM_Q_HEADS) & (slot >= 0):
        # The pages of a block stand as the heads do in qkv: those of the keys, then those of the values.
        page = (slot // BLOCK_SIZE) * block_stride + (head - NUM_Q_HEADS) * (BLOCK_SIZE * 2 * HALF)
        place = cache + page + (slot % BLOCK_SIZE) * (2 * HALF) + d
        tl.store(place, a, mask=ours)
        tl.store(place + HALF, b, mask=ours)
