"""The Triton kernels around attention against their definitions."""

import pytest
import torch

from slipway_runtime.kernels import kv_pages, norms, reference, store_kv
from slipway_runtime.kernels.reference_attention import HeadNorms
from tests.runtime.paging import by_slot

TOLERANCE = {
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}  # two steps of the type; the interpreter cuts a bfloat16
every_type = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def agree(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual.cpu(), expected, atol=tolerance, rtol=tolerance)


@every_type
@pytest.mark.parametrize("size", [1, 12, 64, 1000])
def test_rms_norm_equals_the_reference(size, dtype, device):
    torch.manual_seed(0)
    x, weight = torch.randn(3, size).to(dtype), torch.randn(size).to(dtype)
    agree(norms.rms_norm(x.to(device), weight.to(device), 1e-5), reference.rms_norm(x, weight, 1e-5))


def test_rms_norm_of_some_heads_of_a_wider_row_equals_the_reference(device):
    torch.manual_seed(0)
    qkv, weight = torch.randn(3, 7, 16), torch.randn(16)
    normed = norms.rms_norm(qkv.to(device)[:, 2:5], weight.to(device), 1e-6)
    agree(normed, reference.rms_norm(qkv[:, 2:5], weight, 1e-6))


@every_type
def test_adding_to_the_residual_before_a_norm_equals_doing_one_after_the_other(dtype, device):
    torch.manual_seed(0)
    x, residual, weight = torch.randn(3, 24).to(dtype), torch.randn(3, 24).to(dtype), torch.randn(24).to(dtype)
    stream = residual.to(device, copy=True)
    normed = norms.add_rms_norm(x.to(device), stream, weight.to(device), 1e-5)
    agree(stream, x + residual)
    agree(normed, reference.rms_norm(x + residual, weight, 1e-5))


@every_type
@pytest.mark.parametrize("width", [1, 24, 1030])
def test_swiglu_equals_the_reference(width, dtype, device):
    torch.manual_seed(0)
    gate_up = (torch.randn(3, 2 * width) * 4).to(dtype)
    agree(norms.swiglu(gate_up.to(device)), reference.swiglu(gate_up))


def check_rotated(
    qkv: torch.Tensor, cache: torch.Tensor, device: torch.device, groups: int, of_heads: HeadNorms
) -> None:
    """Both implementations agree on what they return, what they leave behind and what they store."""
    dtype, (num_tokens, num_heads, head_dim) = qkv.dtype, qkv.shape
    kv_heads, slots = num_heads // (groups + 2), torch.tensor([7, 2, 9])
    angles = torch.rand(num_tokens, head_dim // 2) * 6
    cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
    table = torch.stack((cos, sin), dim=1).to(dtype)  # as the layers keep it: neither is contiguous by itself
    ours, our_cache, our_table = qkv.to(device, copy=True), cache.to(device, copy=True), table.to(device)
    our_norms = of_heads and (of_heads[0].to(device), of_heads[1].to(device), of_heads[2])

    expected = reference.rope_and_store(qkv, table[:, :1], table[:, 1:], cache, slots, groups * kv_heads, of_heads)
    q = store_kv.rope_and_store(
        ours, our_table[:, :1], our_table[:, 1:], our_cache, slots.to(device), groups * kv_heads, our_norms
    )

    agree(q, expected)
    agree(ours, qkv)  # keys turned in place, values as they were
    if not kv_pages.is_quantized(cache.dtype):
        agree(our_cache, cache)
        return
    our_scales, scales = (kv_pages.scales(one, head_dim) for one in (our_cache.cpu(), cache))
    torch.testing.assert_close(our_scales, scales, atol=1e-6, rtol=TOLERANCE[dtype])
    step = 1 if cache.dtype == torch.int8 else 32  # of the largest codes: a value at the edge may fall either way
    our_codes, codes = (kv_pages.codes(one, head_dim).float() for one in (our_cache.cpu(), cache))
    if cache.dtype != torch.int8 and device.type == "cpu":  # the interpreter forgets to carry when a mantissa overflows
        carried = torch.frexp(codes).mantissa.abs() == 0.5
        our_codes[carried] = codes[carried]
    if dtype == torch.float32:
        torch.testing.assert_close(our_codes, codes, atol=step, rtol=0)
    assert codes.any(), "something was stored"


def with_head_norms(head_dim: int, dtype: torch.dtype) -> HeadNorms:
    return torch.randn(head_dim).to(dtype), torch.randn(head_dim).to(dtype), 1e-6


@every_type
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("groups", "head_dim"), [(1, 16), (5, 8), (4, 80)])
def test_rotates_and_stores_as_the_reference_does(groups, head_dim, normed, dtype, device, monkeypatch):
    torch.manual_seed(0)
    qkv = torch.randn(3, (groups + 2) * 2, head_dim).to(dtype)
    of_heads = with_head_norms(head_dim, dtype) if normed else None
    cache = torch.zeros(3, 2, 2, 4, head_dim, dtype=dtype)
    if normed and dtype != torch.float32:
        qkv *= 2.0  # not of unit size already
        monkeypatch.setitem(TOLERANCE, dtype, 4 * TOLERANCE[dtype])  # values of up to 8, rounded three times
    check_rotated(qkv, cache, device, groups, of_heads)


@every_type
@pytest.mark.parametrize("kv_dtype", kv_pages.KV_DTYPES.values(), ids=str)
def test_stores_codes_and_scales_as_the_reference_does(kv_dtype, dtype, device):
    torch.manual_seed(0)
    cache = torch.zeros(3, 2, 2, *kv_pages.page_shape(4, 16, kv_dtype), dtype=kv_dtype)
    check_rotated(torch.randn(3, 8, 16).to(dtype), cache, device, 2, None)


def test_a_token_without_a_slot_leaves_the_cache_alone(device):
    qkv = torch.randn(3, 4, 16, device=device)
    cos, sin = torch.ones(3, 1, 16, device=device), torch.zeros(3, 1, 16, device=device)
    cache = torch.full((3, 2, 1, 2, 16), 7.0, device=device)
    store_kv.rope_and_store(qkv, cos, sin, cache, torch.tensor([-1, 5, -(2**40)], device=device), 2)
    slots = by_slot(cache)
    assert (slots[:5] == 7.0).all()
    assert torch.equal(slots[5].flatten(), qkv[1, 2:].flatten())
