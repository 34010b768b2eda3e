"""RMSNorm, RMSNorm with residual add, SwiGLU and GeGLU on a GPU, in Triton. Tested against `reference`.

Sums are float32; values are rounded where the reference rounds them, so that half precision agrees too.

The lower bound is bytes over bandwidth: two elements moved per element of a norm, four with the residual add, three
per output of SwiGLU. Nothing was timed on a GPU yet.
"""

# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
# Triton comes without types, and gives the arguments of a kernel its own.
# ruff: noqa: N803
# Compile-time constants of a kernel are upper case, as everywhere in Triton.

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["add_rms_norm", "clamped_swiglu", "geglu", "rms_norm", "swiglu"]

SWIGLU_BLOCK = 1024  # outputs of one program


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight. x: (…, H)  weight: (H,)."""
    return _normalize(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place, then rms_norm(residual). x, residual: (T, H)  weight: (H,)."""
    assert residual.shape == x.shape, "one residual for each value"
    assert residual.is_contiguous(), "its rows are addressed without a stride"
    return _normalize(x, residual, weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up: (T, 2I) -> (T, I)."""
    return _gate(gate_up, "swiglu")


def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, by the tanh form of GELU. gate_up: (T, 2I) -> (T, I)."""
    return _gate(gate_up, "geglu")


def clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """(up + 1) * gate * sigmoid(1.702 gate), gate at most `limit` and up within ± limit. gate_up: (T, 2I) -> (T, I)."""
    return _gate(gate_up, "clamped", limit)


def _gate(gate_up: Tensor, activation: str, limit: float = 0.0) -> Tensor:
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1, "the elements of a row lie side by side"
    out = gate_up.new_empty(num_tokens, width)
    _swiglu[(num_tokens, triton.cdiv(width, SWIGLU_BLOCK))](
        gate_up, out, gate_up.stride(0), limit, ACTIVATION=activation, WIDTH=width, BLOCK=SWIGLU_BLOCK
    )
    return out


def _normalize(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    size = x.shape[-1]
    assert x.stride(-1) == 1, "the elements of a row lie side by side"
    out = x.new_empty(x.shape)
    # The heads of a query are a slice of a wider row: two strides spare the copy.
    rows = x if x.dim() == 3 else x.reshape(-1, 1, size)
    _rms_norm[(rows.shape[0], rows.shape[1])](
        rows, rows if residual is None else residual, weight, out, rows.stride(0), rows.stride(1), eps,
        ADD=residual is not None, SIZE=size, BLOCK=triton.next_power_of_2(size),
    )  # fmt: skip
    return out


@triton.jit
def _rms_norm(
    x, residual, weight, out, outer_stride, inner_stride, eps,
    ADD: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row. Grid: (outer rows, inner rows)."""
    outer = tl.program_id(0).to(tl.int64)
    inner = tl.program_id(1)
    row = outer * tl.num_programs(1) + inner
    d = tl.arange(0, BLOCK)
    ours = d < SIZE
    dtype = out.dtype.element_ty
    values = tl.load(x + outer * outer_stride + inner * inner_stride + d, mask=ours, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + row * SIZE + d, mask=ours, other=0.0).to(tl.float32)
        total = values.to(dtype)
        tl.store(residual + row * SIZE + d, total, mask=ours)
        values = total.to(tl.float32)
    scaled = values * tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    weights = tl.load(weight + d, mask=ours, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + d, (scaled.to(dtype).to(tl.float32) * weights).to(dtype), mask=ours)


@triton.jit
def _swiglu(gate_up, out, row_stride, limit, ACTIVATION: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (T, blocks of the width)."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ours = d < WIDTH
    dtype = out.dtype.element_ty
    gate = tl.load(gate_up + row * row_stride + d, mask=ours, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + WIDTH + d, mask=ours, other=0.0).to(tl.float32)
    if ACTIVATION == "geglu":
        inner = (gate + gate * gate * gate * 0.044715) * 0.7978845608028654
        active = gate * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0))  # gate · (1 + tanh(inner)) / 2
    elif ACTIVATION == "clamped":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        active = gate / (1.0 + tl.exp(-1.702 * gate))
    else:
        active = gate / (1.0 + tl.exp(-gate))
    tl.store(out + row * WIDTH + d, (active.to(dtype).to(tl.float32) * up).to(dtype), mask=ours)
