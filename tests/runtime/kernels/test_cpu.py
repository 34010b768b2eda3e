"""The compiled kernels: claims about the reference, of which the plainest are in test_reference; and a row's result
depends on its own sequence alone, bit for bit.
"""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import slipway_runtime.kernels.native
from slipway_runtime.kernels import fixed_order, kv_pages, reference
from slipway_runtime.kernels.dispatch import Kernels, kernels_for
from slipway_runtime.kernels.native import Native
from slipway_runtime.kernels.native.compile import build
from slipway_runtime.layers.matmul_cpu import LARGEST_ROW, NativeBf16, NativeInt8, NativePacked
from slipway_runtime.layers.matmul_quantized import WeightOnly

CPU = torch.device("cpu")
SHARED = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def a_matrix(out_size: int, in_size: int) -> torch.Tensor:
    torch.manual_seed(out_size * 1000 + in_size)
    return torch.randn(out_size, in_size) * torch.rand(out_size, 1)


# --- matrices


@SHARED
@given(rows=st.integers(1, 40), out_size=st.integers(1, 200), in_size=st.integers(1, 70))
def test_packed_weights_multiply_as_plain_ones(library: Native, rows: int, out_size: int, in_size: int) -> None:
    weight, x = a_matrix(out_size, in_size), torch.randn(rows, in_size)
    torch.testing.assert_close(NativePacked(weight, library)(x), F.linear(x, weight), atol=1e-5, rtol=1e-5)


def test_a_matrix_deeper_than_a_panel_keeps_its_sum(library):
    weight, x = a_matrix(50, 2500), torch.randn(11, 2500)
    torch.testing.assert_close(NativePacked(weight, library)(x), F.linear(x, weight), atol=2e-4, rtol=1e-4)


@SHARED
@given(rows=st.integers(1, 20), out_size=st.integers(1, 200), in_size=st.sampled_from([1, 2, 33, 70, 1023, 1025, 2500]))
def test_weights_that_are_bfloat16_numbers_take_half_the_bytes_and_give_the_same_bits(
    library: Native, rows: int, out_size: int, in_size: int
) -> None:
    weight, x = a_matrix(out_size, in_size).bfloat16().float(), torch.randn(rows, in_size)
    widened = NativePacked(weight, library)
    weight_and_one = torch.cat((weight, torch.full((1, in_size), 1 + 2**-20)))  # the last row is no bfloat16 number
    plain = NativePacked(weight_and_one, library)
    assert widened.is_widened
    assert not plain.is_widened
    assert widened.packed.element_size() * 2 == plain.packed.element_size()
    assert torch.equal(widened(x), plain(x)[:, :out_size])


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_kept(library: Native, odd: float) -> None:
    weight = a_matrix(60, 33).bfloat16().float()
    weight[7, 5] = odd
    y = NativePacked(weight, library)(torch.ones(2, 33))
    assert not y[:, 7].isfinite().any()
    assert y[:, torch.arange(60) != 7].isfinite().all()


@SHARED
@given(rows=st.integers(1, 70), out_size=st.integers(1, 200), in_size=st.integers(1, 150))
def test_bfloat16_weights_multiply_within_the_error_of_a_float32_sum(
    library: Native, rows: int, out_size: int, in_size: int
) -> None:
    """Products of bfloat16 numbers are exact in float32; each of the `in_size` additions rounds by at most 2⁻²⁴."""
    weight, x = a_matrix(out_size, in_size), torch.randn(rows, in_size)
    rounded = x.bfloat16() if library.rounds_to_bf16 else x
    exact = rounded.double() @ weight.bfloat16().double().T
    most = (in_size + 1) * 2**-24 * 1.01 * (rounded.double().abs() @ weight.bfloat16().double().abs().T)
    y = NativeBf16(weight, library)(x)
    assert ((y.double() - exact).abs() <= most + 1e-30).all()
    assert torch.equal(NativeBf16(weight.bfloat16(), library)(x), y)


@pytest.mark.capability("QZ-1")
@SHARED
@given(rows=st.integers(1, 40), out_size=st.integers(1, 200), in_size=st.integers(1, 70))
def test_bytes_times_bytes_equal_their_definition(library: Native, rows: int, out_size: int, in_size: int) -> None:
    weight = a_matrix(out_size, in_size)
    if not NativeInt8.fits(weight, library):
        pytest.skip("this processor does not multiply bytes")
    ours, plain = NativeInt8(weight, library), WeightOnly(weight, torch.int8)
    x = torch.randn(rows, in_size) * torch.logspace(-3, 3, rows)[:, None]
    scale = (x.abs().amax(1, keepdim=True) / 127).clamp_min(1e-12)
    codes = (x * (1 / scale)).round()
    torch.testing.assert_close(ours(x) / scale, plain(codes), atol=1e-2, rtol=1e-5)  # sums up to 10⁴


def test_the_largest_sum_of_bytes_fits(library):
    if not library.multiplies_bytes:
        pytest.skip("this processor does not multiply bytes")
    weight = torch.ones(3, LARGEST_ROW)
    assert NativeInt8.fits(weight, library)
    assert not NativeInt8.fits(torch.ones(1, LARGEST_ROW + 1), library)
    x = torch.ones(1, LARGEST_ROW)
    torch.testing.assert_close(NativeInt8(weight, library)(x), F.linear(x, weight))
    torch.testing.assert_close(NativeInt8(-weight, library)(x), F.linear(x, -weight))


@pytest.mark.capability("API-19")
@pytest.mark.parametrize("make", [NativePacked, NativeBf16, NativeInt8])
@pytest.mark.parametrize("published", [False, True], ids=["float32 numbers", "bfloat16 numbers"])
def test_the_product_of_a_row_depends_on_no_other(library, make, published):
    weight = a_matrix(130, 1100)
    if published:
        weight = weight.bfloat16().float()
    if make is NativeInt8 and not NativeInt8.fits(weight, library):
        pytest.skip("this processor does not multiply bytes")
    matmul, x = make(weight, library), torch.randn(161, 1100)
    assert matmul.rows_are_independent
    whole = matmul(x)
    for start, count in ((0, 1), (3, 2), (5, 8), (7, 9), (1, 40), (40, 1), (2, 16), (9, 17), (128, 33), (160, 1)):
        assert torch.equal(matmul(x[start : start + count]), whole[start : start + count])
    library.set_threads(2)
    try:
        assert torch.equal(matmul(x), whole)
    finally:
        library.set_threads(1)


@pytest.mark.parametrize("make", [NativePacked, NativeBf16, NativeInt8])
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_row_that_overflowed_says_so_and_harms_no_other(library, make, odd):
    weight = a_matrix(60, 33)
    if make is NativeInt8 and not NativeInt8.fits(weight, library):
        pytest.skip("this processor does not multiply bytes")
    matmul, x = make(weight, library), torch.randn(12, 33)
    fine = matmul(x)
    x[5, 32] = odd
    y = matmul(x)
    assert not y[5].isfinite().any()
    others = torch.arange(12) != 5
    assert torch.equal(y[others], fine[others])


# --- rows


def test_the_activation_ends_well_at_both_ends(kernels):
    gate = torch.tensor([[-math.inf, -1e4, -200.0, -88.0, -1.0, 0.0, 1.0, 200.0, 1e4, math.nan]])
    y = kernels.swiglu(torch.cat((gate, torch.ones_like(gate)), -1))
    expected = F.silu(gate.double()).float()
    assert torch.equal(y[0, -1:].isnan(), torch.tensor([True]))
    torch.testing.assert_close(y[0, 1:-1], expected[0, 1:-1], atol=1e-30, rtol=3e-7)


@pytest.mark.capability("API-19")
def test_the_norm_and_the_activation_of_a_row_depend_on_no_other(compiled):
    x, weight = torch.randn(41, 70), torch.randn(70)
    normed, active = compiled.rms_norm(x, weight, 1e-5), compiled.swiglu(x)
    for start, count in ((0, 1), (3, 2), (5, 8), (1, 40)):
        some = slice(start, start + count)
        assert torch.equal(compiled.rms_norm(x[some], weight, 1e-5), normed[some])
        assert torch.equal(compiled.swiglu(x[some]), active[some])


@pytest.mark.parametrize("head_dim", [8, 36, 64])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_normed_rotated_and_stored_as_by_the_reference(compiled, head_dim, kv_dtype, normed):
    torch.manual_seed(0)
    tokens, q_heads, kv_heads, page = 5, 6, 2, 4
    qkv = torch.randn(tokens, q_heads + 2 * kv_heads, head_dim)
    table = torch.randn(tokens, 2, head_dim)
    norms = (torch.randn(head_dim), torch.randn(head_dim), 1e-5) if normed else None
    slots = torch.tensor([3, 9, 4, 17, 16])
    shape = (5, 2, kv_heads, *kv_pages.page_shape(page, head_dim, kv_dtype))
    results = []
    for each in (reference, compiled):
        own, cache = qkv.clone(), torch.zeros(shape, dtype=kv_dtype)
        q = each.rope_and_store(own, table[:, :1], table[:, 1:], cache, slots, q_heads, norms)
        results.append((q, own, kv_pages.codes(cache, head_dim).float()))
    for ours, expected in zip(results[1], results[0], strict=True):
        step = 1.0 if kv_dtype == torch.int8 else 0.13  # a code may fall on the other side of a half
        close = torch.isclose(ours, expected, atol=1e-5, rtol=1e-4)
        assert close.float().mean() > 0.99
        torch.testing.assert_close(ours, expected, atol=1.0 if kv_dtype == torch.int8 else 1e-5, rtol=step)


def test_a_bfloat16_cache_stores_what_torch_rounds_to(compiled):
    tokens, kv_heads, page, head_dim = 4, 2, 4, 20
    qkv = torch.randn(tokens, 3 * kv_heads, head_dim)
    odd = torch.tensor([math.nan, math.inf, -math.inf, 3.4e38, 1e-45, -0.0, 1 + 2**-8, 1 + 3 * 2**-8])
    qkv[1, -1, : len(odd)] = odd  # a value, which is not rotated
    cos, sin = torch.ones(tokens, 1, head_dim), torch.zeros(tokens, 1, head_dim)
    caches = [torch.zeros(3, 2, kv_heads, page, head_dim, dtype=torch.bfloat16) for _ in range(2)]
    for each, cache in zip((reference, compiled), caches, strict=True):
        each.rope_and_store(qkv.clone(), cos, sin, cache, torch.tensor([5, 0, 11, 6]), kv_heads)
    torch.testing.assert_close(caches[1], caches[0], atol=0, rtol=0, equal_nan=True)


# --- attention


def a_cache(
    kv_dtype: torch.dtype, length: int, page: int, kv_heads: int, head_dim: int
) -> tuple[torch.Tensor, np.ndarray]:
    """A cache with `length` random keys and values of one sequence, in shuffled blocks, and its block table."""
    blocks = -(-length // page)
    table = np.random.default_rng(length).permutation(blocks) + 1
    shape = (blocks + 1, 2, kv_heads, *kv_pages.page_shape(page, head_dim, kv_dtype))
    cache = torch.zeros(shape, dtype=kv_dtype)
    positions = np.arange(length)
    kv_pages.store(
        torch.randn(length, 2, kv_heads, head_dim).to(kv_dtype if kv_dtype == torch.bfloat16 else torch.float32),
        cache,
        torch.from_numpy(table[positions // page] * page + positions % page),
    )
    return cache, table[None].astype(np.int64)


@pytest.mark.capability("API-19", "KV-11")
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("groups", "head_dim", "page", "window"),
    [(3, 64, 16, None), (1, 40, 16, 9), (4, 128, 8, 70), (9, 16, 1, None), (2, 20, 48, 100), (5, 32, 16, 33)],
)
def test_attention_of_a_token_is_the_same_however_its_prompt_was_cut(
    compiled: Kernels, groups: int, head_dim: int, page: int, window: int | None, kv_dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    length, kv_heads = 203, 2
    cache, table = a_cache(kv_dtype, length, page, kv_heads, head_dim)
    q = torch.randn(length, kv_heads * groups, head_dim)
    if kv_dtype == torch.bfloat16:
        q = q.bfloat16().float()  # tiles multiply rounded queries

    def attend(each: Kernels, start: int, end: int) -> torch.Tensor:
        plan = each.plan_attention(np.array([start]), np.array([end - start]), table, page, q)
        return each.paged_attention(q[start:end], q[start:end], cache, plan, 0.2, window)

    whole = attend(compiled, 0, length)
    plain = cache.float() if kv_dtype == torch.bfloat16 else cache
    plan = fixed_order.plan_attention(np.array([0]), np.array([length]), table, page, q)
    expected = fixed_order.paged_attention(q, q, plain, plan, 0.2, window)
    if kv_dtype == torch.bfloat16 and page % 16 == 0 and head_dim % 32 == 0:
        # Tiles multiply weights that are rounded to bfloat16, by at most 2⁻⁸ of each.
        sizes = plain.clone()
        sizes[:, 1].abs_()
        rounding = fixed_order.paged_attention(q, q, sizes, plan, 0.2, window) * 2**-8
        assert ((whole - expected).abs() <= rounding + 2e-5).all()
    else:
        torch.testing.assert_close(whole, expected, atol=2e-5, rtol=1e-4)
    for start, end in ((0, 1), (0, 7), (7, 8), (8, 72), (63, 66), (72, 202), (202, 203), (150, 151)):
        assert torch.equal(attend(compiled, start, end), whole[start:end])


@pytest.mark.capability("API-19")
def test_attention_in_company_is_attention_alone(compiled):
    torch.manual_seed(0)
    caches = [a_cache(torch.float32, length, 4, 2, 32) for length in (90, 3, 41, 64)]
    new = (1, 1, 20, 5)
    queries = [torch.randn(count, 6, 32) for count in new]
    alone = []
    for (cache, table), q, count, length in zip(caches, queries, new, (90, 3, 41, 64), strict=True):
        plan = compiled.plan_attention(np.array([length - count]), np.array([count]), table, 4, q)
        alone.append(compiled.paged_attention(q, q, cache, plan, 0.2))
    width, offset, tables = max(table.shape[1] for _, table in caches), 0, []
    for cache, table in caches:
        tables.append(np.pad(table[0] + offset, (0, width - table.shape[1])))
        offset += len(cache)
    together, q = torch.cat([cache for cache, _ in caches]), torch.cat(queries)
    plan = compiled.plan_attention(np.array([89, 2, 21, 59]), np.array(new), np.stack(tables), 4, q)
    assert torch.equal(compiled.paged_attention(q, q, together, plan, 0.2), torch.cat(alone))


@pytest.mark.parametrize("endless", [math.nan, math.inf])
@pytest.mark.parametrize(("kv_dtype", "page", "size"), [(torch.float32, 4, 16), (torch.bfloat16, 16, 32)], ids=str)
def test_what_later_tokens_hold_is_never_computed_with(compiled, kv_dtype, page, size, endless):
    """Nor as 0 · infinity, if tiles multiply positions that some of their queries do not see."""
    assert_later_tokens_are_hidden(compiled, kv_dtype, page, size, endless)


@pytest.mark.capability("API-19")
@pytest.mark.parametrize("endless", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("kv_dtype", "page", "size"), [(torch.float32, 4, 16), (torch.bfloat16, 16, 32), (torch.float32, 8, 16)], ids=str
)
def test_fixed_order_never_computes_with_what_later_tokens_hold(kv_dtype, page, size, endless):
    """review/engine.md F11: one request's NaN was in the answers of all that had its blocks later."""
    assert_later_tokens_are_hidden(fixed_order, kv_dtype, page, size, endless)


def assert_later_tokens_are_hidden(compiled, kv_dtype, page, size, endless) -> None:
    cache, table = a_cache(kv_dtype, 40, page, 1, size)
    q = torch.randn(40, 1, size)

    def attend() -> torch.Tensor:
        plan = compiled.plan_attention(np.array([0]), np.array([40]), table, page, q)
        return compiled.paged_attention(q, q, cache, plan, 0.2)

    before = attend()
    held = cache[int(table[0, 22 // page]), :, :, 22 % page]  # position 22
    held[1] = endless
    after = attend()
    assert torch.equal(after[:22], before[:22])
    assert not after[22:].isfinite().any()
    held[0] = math.nan
    after = attend()
    assert torch.equal(after[:22], before[:22])
    assert after[22:].isnan().all()


# --- which of them, and how they are made


@pytest.mark.capability("KN-1")
def test_without_a_library_the_reference_computes(torch_alone):
    assert kernels_for(CPU, torch.float32) is reference
    assert kernels_for(CPU, torch.float32, deterministic=True) is fixed_order


@pytest.mark.capability("KN-1")
def test_they_serve_float32_alone(library):
    from slipway_runtime.kernels import cpu

    assert kernels_for(CPU, torch.float32) is kernels_for(CPU, torch.float32, deterministic=True) is cpu
    assert kernels_for(CPU, torch.bfloat16) is reference
    assert kernels_for(CPU, torch.bfloat16, deterministic=True) is fixed_order


def test_without_a_compiler_nothing_is_built_and_the_reason_is_raised(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    with pytest.raises(OSError, match="no-compiler"):
        build(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_library_that_does_not_load_is_passed_over(tmp_path, monkeypatch):
    for name in slipway_runtime.kernels.native.fitting():
        (tmp_path / f"{name}.so").write_bytes(b"not a library")
    monkeypatch.setattr(slipway_runtime.kernels.native, "__file__", str(tmp_path / "__init__.py"))
    assert slipway_runtime.kernels.native.library.__wrapped__() is None


def test_the_libraries_share_the_threads_of_torch(library):
    """One pool of threads in the process: the library's OpenMP is the one that torch has loaded."""
    code = (
        "import torch; from pathlib import Path; from slipway_runtime.kernels.native import Native; "
        f"Native(Path({library._name!r})); maps = Path('/proc/self/maps').read_text().splitlines(); "
        "print(len({line.split()[-1] for line in maps if 'omp' in line.rsplit('/', 1)[-1]}))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "1"
