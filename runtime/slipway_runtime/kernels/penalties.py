"""Sampling penalties by token counts on a GPU, in Triton. Tested against `reference_sampling.penalize_rows`.

One kernel reads logits and counts and writes logits: 12 bytes per row and token of the vocabulary, without a copy of
either. With torch operators it took some 25 launches for every 55 rows of Qwen's vocabulary, and ten times the bytes.
"""

# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
# Triton comes without types, and gives the arguments of a kernel its own.
# ruff: noqa: N803
# Compile-time constants of a kernel are upper case, as everywhere in Triton.

import triton
import triton.language as tl
from torch import Tensor

from slipway_runtime.kernels import reference_sampling

__all__ = ["penalize_rows"]

BLOCK = 2048
IN_PROMPT = tl.constexpr(reference_sampling.IN_PROMPT)


def penalize_rows(
    logits: Tensor,
    places: Tensor,
    counts: Tensor,
    rows: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Penalize logits at `places`, (M,), by the counts in `rows`, (M,). logits: (D, V)  counts: (…, V) int32."""
    vocabulary = logits.shape[1]
    assert logits.stride(1) == 1, "the scores of a row lie side by side"
    assert counts.is_contiguous(), "so do the counts"
    assert counts.shape[1] == vocabulary, "a count for each score"
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    _penalize_rows[(len(places), triton.cdiv(vocabulary, block))](
        logits, places, counts, rows, repetition, presence, frequency, logits.stride(0), V=vocabulary, BLOCK=block
    )


@triton.jit
def _penalize_rows(
    logits, places, counts, rows, repetitions, presences, frequencies, stride, V: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid: (M, blocks of the vocabulary)."""
    index = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ours = token < V
    row = logits + tl.load(places + index).to(tl.int64) * stride
    count = tl.load(counts + tl.load(rows + index).to(tl.int64) * V + token, mask=ours, other=0)
    x = tl.load(row + token, mask=ours & (count != 0), other=0.0)
    repetition = tl.load(repetitions + index)
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    output = count & (IN_PROMPT - 1)
    x = x - tl.where(output > 0, tl.load(presences + index), 0.0)
    x = x - tl.load(frequencies + index) * output.to(tl.float32)
    tl.store(row + token, x, mask=ours & (count != 0))
