"""The work list of decode attention on a GPU, made there once a step: the splits of all rows, the longest splits first.

A fixed number of programs shares the list (`paged_attention._decode`), so a row of 131k tokens beside 255 of 1k is read
by many programs, and a captured launch has no program without work. The host knows nothing of it: a step that is
launched before the lengths of the step before it are read has its list too. How a row is split depends on its own
length alone; the list only says who computes a split, and when.
"""

# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
# Triton comes without types, and gives the arguments of a kernel its own.
# ruff: noqa: N803
# Compile-time constants of a kernel are upper case, as everywhere in Triton.

import triton
import triton.language as tl
from torch import Tensor

from slipway_runtime.kernels import attention_plan, captured_plan
from slipway_runtime.kernels.attention_plan import AttentionPlan
from slipway_runtime.kernels.paged_attention import splits_of
from slipway_runtime.kernels.upload import Ints

ROWS_AT_ONCE = 1024  # rows are put in order among so many; one size for every step, so one compiled kernel
CLASSES = 5  # of splits by their length: up to 1, 2, 4, 8 times the shortest, and longer


def plan_attention(
    num_computed: Ints, num_new: Ints, block_tables: Ints, block_size: int, like: Tensor
) -> AttentionPlan:
    """As `attention_plan.plan_attention`, with the work list of its decode rows."""
    plan = attention_plan.plan_attention(num_computed, num_new, block_tables, block_size, like)
    _list_splits(plan)
    return plan


def update_static_inputs(plan: AttentionPlan, lengths: Tensor, tables: Tensor, rows: Tensor) -> None:
    """As `captured_plan.update_static_inputs`, with the work list of the rows; a graph may begin with it."""
    captured_plan.update_static_inputs(plan, lengths, tables, rows)
    _list_splits(plan)


def _list_splits(plan: AttentionPlan) -> None:
    if plan.num_decodes:
        _list_work[(1,)](
            plan.lengths, plan.work, plan.num_decodes,
            SPLIT_TOKENS=plan.split, MOST_SPLITS=plan.max_splits, CLASSES=CLASSES, BLOCK=ROWS_AT_ONCE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _list_work(
    lengths, work, rows,
    SPLIT_TOKENS: tl.constexpr, MOST_SPLITS: tl.constexpr, CLASSES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the number of splits, then row · MOST_SPLITS + split of each of them. Grid: (1,)."""
    listed = 0
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        ours = row < rows
        splits, tokens = splits_of(tl.load(lengths + row, mask=ours, other=0), SPLIT_TOKENS, MOST_SPLITS)
        splits = tl.where(ours, splits, 0)
        most = tl.max(splits, 0)
        its_class = tl.zeros([BLOCK], dtype=tl.int32)
        for number in tl.static_range(1, CLASSES):
            its_class += (tokens > (SPLIT_TOKENS << (number - 1))).to(tl.int32)
        place = tl.zeros([BLOCK], dtype=tl.int32)
        for number in tl.static_range(CLASSES):
            of_class = tl.where(its_class == CLASSES - 1 - number, splits, 0)
            place = tl.where(its_class == CLASSES - 1 - number, listed + tl.cumsum(of_class, 0) - of_class, place)
            listed += tl.sum(of_class, 0)
        for split in range(most):
            tl.store(work + 1 + place + split, row * MOST_SPLITS + split, mask=split < splits)
    tl.store(work, listed)
