"""A whole model on the Triton kernels and on the reference."""

from pathlib import Path

import pytest
import torch

import slipway_runtime
from slipway_runtime.kernels import gpu, reference
from slipway_runtime.kernels.dispatch import Kernels
from slipway_runtime.messages import NewSequence, SamplingParams, SchedulerOutput
from slipway_runtime.models.checkpoint import Checkpoint
from slipway_runtime.models.config import read_config
from slipway_runtime.models.decoder import load_decoder
from slipway_runtime.worker.input_batch import InputBatch
from slipway_runtime.worker.inputs import prepare_inputs
from slipway_runtime.worker.kv_cache import CacheSize, allocate_cache
from slipway_runtime.worker.runner import Runner

TINY = Path(slipway_runtime.__file__).parents[2] / "models" / "tiny"
BLOCK = 4
PARAMS = SamplingParams(max_tokens=9, temperature=0.0)


def new_row(row: int, tokens: tuple[int, ...]) -> NewSequence:
    return NewSequence(row=row, token_ids=tokens, num_prompt_tokens=len(tokens), params=PARAMS)


STEPS = [  # two prompts, then one token of the first beside a chunk of the second and a third prompt
    SchedulerOutput(
        step=1,
        new_rows=(new_row(0, (5, 6, 7, 8, 9)), new_row(1, (9, 30, 8, 7, 6, 5, 4))),
        rows=(0, 1), num_computed=(0, 0), num_new=(4, 3), new_blocks=((3, 7), (5, 1)), samples=(False, False),
    ),
    SchedulerOutput(
        step=2,
        new_rows=(new_row(2, (11, 12)),),
        rows=(0, 1, 2), num_computed=(4, 3, 0), num_new=(1, 4, 2), new_blocks=((), (), (2,)), samples=(True,) * 3,
    ),
]  # fmt: skip


def hidden_of(kernels: Kernels, device: torch.device) -> list[torch.Tensor]:
    """The last layer's output after each step."""
    config = read_config(TINY)
    with Checkpoint(TINY, torch.float32, device) as checkpoint:
        decoder = load_decoder(config, checkpoint, kernels, 32)
    caches = allocate_cache(config, CacheSize(8, BLOCK, 0), torch.float32, device)
    runner = Runner(
        decoder, caches, kernels,
        block_size=BLOCK, max_num_seqs=3, max_model_len=32, eos_token_ids=(2,), device=device,
    )  # fmt: skip
    rows = InputBatch(3, 32, 8)
    outputs = []
    with torch.inference_mode():
        for plan in STEPS:
            rows.update_states(plan)
            outputs.append(runner.hidden(prepare_inputs(plan, rows, BLOCK, device)).cpu())
    return outputs


@pytest.mark.capability("KN-1")
def test_a_model_computes_the_same_on_either_implementation(device):
    expected = hidden_of(reference, torch.device("cpu"))
    torch.testing.assert_close(hidden_of(gpu, device), expected, atol=1e-4, rtol=1e-4)
