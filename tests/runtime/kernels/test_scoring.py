"""Soft caps, sinks, windows and scales of attention: every implementation against the formula, written out here."""

import numpy as np
import pytest
import torch
from torch import Tensor

from slipway_runtime.kernels import fixed_order, gpu, gpu_fixed_order, kv_pages, reference
from slipway_runtime.kernels.reference_attention import Scoring
from tests.runtime.paging import paged

BLOCK = 4
SINKS = torch.tensor([0.7, -1.2, 3.0, 0.1, -4.0, 2.2])
SCORINGS = {
    "cap": Scoring(softcap=1.5),
    "sinks": Scoring(sinks=SINKS),
    "both": Scoring(softcap=2.0, sinks=SINKS),
}
# (past, new): rows of one new token, then chunks
ROWS = {
    "decode": [(0, 1), (16, 1), (700, 1)],
    "chunks": [(0, 7), (15, 18), (70, 33)],
    "mixed": [(5, 1), (300, 1), (0, 5), (9, 12)],
    "few tokens on a long past": [(1100, 2)],
}


def by_the_formula(
    q: Tensor, k: Tensor, v: Tensor, past: int, scale: float, window: int | None, scoring: Scoring
) -> Tensor:
    """One sequence, one query at a time. q: (n, Hq, D)  k, v: (past + n, Hkv, D) -> (n, Hq * D)."""
    out = torch.empty(q.shape, dtype=torch.float64)
    for i in range(len(q)):
        last = past + i
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(q.shape[1]):
            of = head // (q.shape[1] // k.shape[1])
            scores = k[first : last + 1, of].double() @ q[i, head].double() * scale
            if scoring.softcap is not None:
                scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
            weights = scores.exp()
            total = weights.sum() + (0 if scoring.sinks is None else scoring.sinks[head].double().exp())
            out[i, head] = weights / total @ v[first : last + 1, of].double()
    return out.flatten(1)


@pytest.mark.capability("API-20")
@pytest.mark.parametrize(
    ("rows", "window"),
    [("decode", None), ("decode", 6), ("chunks", None), ("mixed", 6), ("few tokens on a long past", None)],
)
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("name", ["reference", "fixed order", "avx512", "avx2", "triton", "triton in order"])
def test_scores_are_capped_and_sinks_take_weight_as_the_formula_says(name, scoring, rows, window, request, monkeypatch):
    if name.startswith("triton"):
        from slipway_runtime.kernels import attention_plan

        monkeypatch.setattr(attention_plan, "SPLIT", 128)
        kernels = gpu if name == "triton" else gpu_fixed_order
    elif name.startswith("avx"):
        from slipway_runtime.kernels import cpu
        from tests.runtime.kernels.conftest import a_library

        monkeypatch.setattr(cpu, "_native", a_library(name))
        kernels = cpu
    else:
        kernels = {"reference": reference, "fixed order": fixed_order}[name]
    torch.manual_seed(1)
    work = ROWS[rows]
    num_computed, num_new = (np.array(column) for column in zip(*work, strict=True))
    lengths, scale = num_computed + num_new, 0.4
    widest = -(-int(lengths.max()) // BLOCK)
    tables = 1 + np.arange(len(work) * widest).reshape(len(work), widest)
    by_slot = torch.randn((1 + len(work) * widest) * BLOCK, 2, 2, 12)
    queries = torch.randn(int(num_new.sum()), 6, 12)
    own = [(int(tables[row][0]) * BLOCK, int(length)) for row, length in enumerate(lengths)]
    parts = queries.split(num_new.tolist())
    expected = torch.cat([
        by_the_formula(part, *by_slot[start : start + length].unbind(1), int(past), scale, window, SCORINGS[scoring])
        for part, (start, length), past in zip(parts, own, num_computed, strict=True)
    ])  # fmt: skip
    new = torch.cat([by_slot[start + int(past) : start + length]
                     for (start, length), past in zip(own, num_computed, strict=True)])  # fmt: skip
    cache = paged(by_slot, BLOCK)
    assert not kv_pages.is_quantized(cache.dtype)
    plan = kernels.plan_attention(num_computed, num_new, tables, BLOCK, cache)
    ours = kernels.paged_attention(queries, new, cache, plan, scale, window, SCORINGS[scoring])
    torch.testing.assert_close(ours.double(), expected, atol=2e-5, rtol=1e-4)
