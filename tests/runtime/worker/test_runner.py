"""Plans become tensors, and what a plan copies is copied before anything is computed."""

import numpy as np
import pytest
import torch

from slipway_runtime.messages import NewSequence, SamplingParams, SchedulerOutput
from slipway_runtime.scheduling.block_pool import BlockPool
from slipway_runtime.worker.input_batch import InputBatch
from slipway_runtime.worker.inputs import prepare_inputs
from tests.runtime.checkpoints import a_checkpoint
from tests.runtime.models.logits import BLOCK, Bench

CPU = torch.device("cpu")


def new_row(row: int, tokens: list[int], **params: object) -> NewSequence:
    return NewSequence(row=row, token_ids=tuple(tokens), num_prompt_tokens=len(tokens),
                  params=SamplingParams(**{"max_tokens": 9, "temperature": 0.0, **params}))  # fmt: skip


def test_rows_are_packed_without_padding():
    rows = InputBatch(max_num_seqs=3, max_model_len=20, max_blocks=5)
    plan = SchedulerOutput(
        step=1,
        new_rows=(new_row(2, [7]), new_row(0, [1, 2, 3, 4, 5, 6])),
        rows=(2, 0),
        num_computed=(0, 3),
        num_new=(1, 3),
        new_blocks=((9,), (4, 8)),
        samples=(True, False),
    )
    rows.update_states(plan)
    inputs = prepare_inputs(plan, rows, 4, CPU)
    assert inputs.token_ids.tolist() == [7, 4, 5, 6]
    assert inputs.positions.tolist() == [0, 3, 4, 5]
    assert inputs.slots.tolist() == [36, 19, 32, 33]
    assert inputs.sampled_rows.tolist() == [2]
    assert inputs.sampled_tokens.tolist() == [0]
    assert inputs.sampled_positions.tolist() == [1]


@pytest.mark.capability("KV-2")
def test_a_fork_continues_from_a_copy_and_leaves_the_original_alone(tmp_path):
    a_checkpoint(tmp_path)
    bench = Bench(tmp_path)
    runner, pool = bench.runner, BlockPool(90, BLOCK)
    prompt = [5, 9, 30, 8, 7, 6]

    def start(row: int, blocks: list[int], computed: int, tokens: list[int], copies: tuple = ()) -> int:
        plan = SchedulerOutput(
            step=1,
            new_rows=(new_row(row, tokens),),
            copies=copies,
            rows=(row,),
            num_computed=(computed,),
            num_new=(len(tokens) - computed,),
            new_blocks=(tuple(blocks),),
            samples=(True,),
        )
        return runner.execute(plan).token_ids[0][0]

    def go_on(row: int, computed: int) -> int:
        plan = SchedulerOutput(
            step=1, rows=(row,), num_computed=(computed,), num_new=(1,), new_blocks=((),), samples=(True,)
        )
        return runner.execute(plan).token_ids[0][0]

    table = pool.allocate(2)
    first = start(0, table, 0, prompt)
    copy_table, copy = pool.fork(table, len(prompt))
    assert copy is not None
    before = [cache[table].clone() for cache in runner.caches]
    other = start(1, copy_table, len(prompt), [*prompt, 44], (copy,))
    after = [cache[table] for cache in runner.caches]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True)), "the fork wrote into a shared block"
    assert other == start(2, pool.allocate(2), 0, [*prompt, 44])
    assert go_on(0, len(prompt)) == start(3, pool.allocate(2), 0, [*prompt, first])


def test_penalties_count_the_prompt_and_the_output_apart(tmp_path):
    a_checkpoint(tmp_path)
    bench = Bench(tmp_path)
    sampler, rows = bench.runner._sampler, bench.runner._rows
    plan = SchedulerOutput(step=1, new_rows=(new_row(0, [3, 4, 5], presence_penalty=5.0), new_row(1, [3, 4, 5])))
    rows.update_states(plan)
    rows.tokens[:, 3] = 6  # sampled
    logits = torch.zeros(2, 97)
    logits[:, [5, 6]] = torch.tensor([1.0, 2.0])
    assert sampler(logits, np.array([0, 1]), np.array([4, 4])).token_ids.tolist() == [5, 6]


@pytest.mark.capability("BS-7")
def test_steps_that_are_launched_before_the_tokens_of_the_last_one_are_read_sample_the_same(tmp_path):
    """Finding C15: a sampled token went to the host and back before the next step. A new row joins in between."""
    a_checkpoint(tmp_path)
    params = ({}, {"temperature": 0.9, "seed": 4}, {"repetition_penalty": 1.7, "presence_penalty": 0.9, "logprobs": 3})
    prompts = ([5, 9, 30], [8, 7], [6, 6, 6, 2])

    def plan(rows: tuple[int, ...], computed: tuple[int, ...], new: tuple[int, ...], **more: object) -> SchedulerOutput:
        return SchedulerOutput(step=1, rows=rows, num_computed=computed, num_new=new, samples=(True,) * len(rows),
                               new_blocks=more.pop("new_blocks", ((),) * len(rows)), **more)  # fmt: skip

    def own(row: int) -> tuple[int, ...]:
        return tuple(range(1 + 8 * row, 9 + 8 * row))

    steps = [
        plan((0, 1), (0, 0), (3, 2), new_blocks=(own(0), own(1)),
             new_rows=tuple(new_row(row, prompts[row], **params[row]) for row in (0, 1))),
        plan((0, 1), (3, 2), (1, 1)),
        plan((0, 1, 2), (4, 3, 0), (1, 1, 4), new_blocks=((), (), own(2)),
             new_rows=(new_row(2, prompts[2], **params[2]),)),
        plan((2, 0, 1), (4, 5, 4), (1, 1, 1)),
        plan((2, 1), (5, 5), (1, 1)),
        plan((2,), (6,), (1,)),
        plan((0,), (0,), (2,), new_blocks=(own(3),), new_rows=(new_row(0, [9, 9]),)),  # the row is used again
        plan((0, 2), (2, 7), (1, 1)),
    ]  # fmt: skip
    one_by_one = Bench(tmp_path).runner
    expected = [one_by_one.execute(step) for step in steps]
    ahead, results = Bench(tmp_path).runner, []
    pending = [ahead.launch(steps[0])]
    for step in steps[1:]:
        pending.append(ahead.launch(step))
        results.append(pending.pop(0)())
    results.append(pending[0]())
    assert results == expected
    assert len({token for result in results for row in result.token_ids for token in row}) > 4
