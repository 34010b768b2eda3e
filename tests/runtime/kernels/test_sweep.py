"""Attention over the table of shapes: every pair of values in the unit tests, everything with `make kernels`."""

from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import torch

from slipway_runtime.kernels import decode_work, kv_pages, norms, store_kv
from slipway_runtime.kernels import paged_attention as kernels
from tests.runtime.kernels.pairwise import pairwise
from tests.runtime.kernels.test_paged_attention import PADDING, Step, a_step

AXES: dict[str, tuple[Any, ...]] = {
    "groups": (1, 2, 4, 5, 7, 8),
    "head_dim": (64, 80, 96, 128, 256),
    "page": (16, 32, 64, 128),
    "length": ("0", "1", "page-1", "page", "page+1", "long"),
    "new": (1, 2, 5, 8, 17, 200),
    "window": (None, 40),
    "padded": (False, True),
    "kv": (None, "int8", "fp8"),
}
SHORT, LONG = 300, 8191
SAMPLE = pairwise(AXES)
OUTER = ("groups", "head_dim", "page")  # a test each; the other axes are gone through within it
INNER = [name for name in AXES if name not in OUTER]


def device() -> torch.device:
    from triton.runtime.interpreter import InterpretedFunction

    return torch.device("cpu" if isinstance(norms._swiglu, InterpretedFunction) else "cuda")


def check(case: dict[str, Any], longest: int) -> None:
    """One sequence of that length before the new tokens, beside a row alone and padding."""
    page = case["page"]
    past = {"0": 0, "1": 1, "page-1": page - 1, "page": page, "page+1": page + 1, "long": longest}[case["length"]]
    past = max(0, min(past, longest - case["new"]))
    rows = [(past, 1)] if case["new"] == 1 else [(17, 1), (past, case["new"])]
    if case["padded"]:
        rows.insert(1, PADDING)
    kv_dtype = None if case["kv"] is None else kv_pages.KV_DTYPES[case["kv"]]
    step = a_step(rows, groups=case["groups"], head_dim=case["head_dim"], block_size=page, kv_dtype=kv_dtype)
    step.agrees(device(), case["window"])


def test_a_pairwise_sample_holds_every_pair():
    for a, b in combinations(AXES, 2):
        assert {(case[a], case[b]) for case in SAMPLE} == set(product(AXES[a], AXES[b]))
    assert len(SAMPLE) < 60


@pytest.mark.capability("KN-1", "KN-2")
@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: "-".join(map(str, case.values())))
def test_a_sample_of_all_shapes_equals_the_reference(case):
    """Chaos C12: with a fixed tolerance a shape failed on every AMD EPYC."""
    check(case, SHORT)


@pytest.mark.kernels
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(OUTER, list(product(*(AXES[name] for name in OUTER))))
def test_every_shape_equals_the_reference(groups, head_dim, page):
    longest = LONG if device().type == "cuda" else SHORT
    for values in product(*(AXES[name] for name in INNER)):
        case = {"groups": groups, "head_dim": head_dim, "page": page, **dict(zip(INNER, values, strict=True))}
        check(case, longest)


@pytest.mark.kernels
@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: "-".join(map(str, case.values())))
def test_a_sample_of_all_shapes_equals_the_reference_in_a_long_context(case):
    check(case | {"length": "long"}, LONG)


@pytest.mark.parametrize("head_dim", AXES["head_dim"])
def test_the_tolerance_does_not_hide_a_block_that_is_left_out(head_dim):
    """The tolerance follows from roundings (tolerance.py): one block less of 300 tokens is far outside of it."""
    step = a_step([(SHORT, 1)], head_dim=head_dim)
    whole = step.reference(None)

    left_out = (whole - step.reference(window=SHORT - 15)).abs().max()

    assert left_out > 20 * step.tolerance


@pytest.mark.capability("KN-1")
@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.int8], ids=str)
def test_a_cache_may_be_larger_than_32_bits_count(kv_dtype):
    """Blocks behind 2³¹ elements are read and written; memory that nobody touches is not there."""
    quantized = kv_pages.is_quantized(kv_dtype)
    small = a_step([(40, 1), (9, 20)], dtype=torch.float16, kv_dtype=kv_dtype if quantized else None)
    per_block = small.cache[0].numel()
    first = -(-(1 << 31) // per_block)
    large = torch.empty(first + len(small.cache), *small.cache.shape[1:], dtype=small.cache.dtype)
    large[first:].view(torch.int8).copy_(small.cache.view(torch.int8))
    step = Step(small.q, small.kv, large, small.num_computed, small.num_new, small.tables + first, small.block_size)
    expected = small.reference(None)
    plan = decode_work.plan_attention(step.num_computed, step.num_new, step.tables, step.block_size, large)
    actual = kernels.paged_attention(step.q, step.kv, large, plan, 0.3)
    torch.testing.assert_close(actual.double(), expected, atol=step.tolerance, rtol=0)

    qkv = torch.randn(1, 4, 16).to(torch.float16)
    cos, sin = torch.ones(1, 1, 16, dtype=torch.float16), torch.zeros(1, 1, 16, dtype=torch.float16)
    store_kv.rope_and_store(qkv, cos, sin, large, torch.tensor([first * 16 + 3]), 2)
    stored = kv_pages.codes(large[first:][:1], 16)[0, :, 0, 3].float()
    if quantized:
        stored = stored * kv_pages.scales(large[first:][:1], 16)[0, :, 0, 3, None]
    torch.testing.assert_close(stored, qkv[0, 2:].float(), atol=0.02, rtol=0)
    assert np.prod(large.shape) > 1 << 31
