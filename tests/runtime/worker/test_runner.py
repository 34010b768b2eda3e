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
