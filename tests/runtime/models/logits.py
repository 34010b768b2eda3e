"""Logits of a checkpoint through the paged path, and those of `transformers`."""

from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from slipway_runtime.kernels import fixed_order, reference
from slipway_runtime.kernels.dispatch import Kernels, kernels_for
from slipway_runtime.layers.matmul import ALL_DENSE, MatmulMakers
from slipway_runtime.messages import NewSequence, SamplingParams, SchedulerOutput
from slipway_runtime.models.checkpoint import Checkpoint
from slipway_runtime.models.config import read_config
from slipway_runtime.models.decoder import load_decoder
from slipway_runtime.worker.inputs import prepare_inputs
from slipway_runtime.worker.kv_cache import CacheSize, allocate_cache
from slipway_runtime.worker.runner import Runner

BLOCK = 4
CPU = torch.device("cpu")


class Bench:
    """A runner whose rows are computed by hand: row n has the blocks 1 + n * 20 …, in a scrambled order."""

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype = torch.float32,
        kernels: Kernels | None = None,
        makers: MatmulMakers = ALL_DENSE,
    ) -> None:
        config = read_config(path)
        kernels = kernels or kernels_for(CPU, dtype, latent=config.latent is not None)
        with Checkpoint(path, dtype, CPU) as checkpoint:
            self.decoder = load_decoder(config, checkpoint, kernels, 100, makers)
        caches = allocate_cache(config, CacheSize(100, BLOCK, 0), dtype, CPU)
        self.runner = Runner(
            self.decoder, caches, kernels, block_size=BLOCK, max_num_seqs=5, max_model_len=80, eos_token_ids=(),
            device=CPU,
        )  # fmt: skip
        self.known: dict[int, tuple[int, ...]] = {}

    def step(self, *work: tuple[int, list[int], int, int]) -> list[torch.Tensor]:
        """Compute tokens[start:end] for each (row, tokens, start, end); the logits of each of them."""
        work = tuple(sorted(work, key=lambda item: item[3] - item[2] != 1))
        blocks = {row: tuple(int(b) for b in np.random.default_rng(row).permutation(20) + 1 + row * 20)
                  for row, *_ in work}  # fmt: skip
        new = [item for item in work if item[0] not in self.known or self.known[item[0]] != tuple(item[1])]
        for row, tokens, *_ in new:
            self.known[row] = tuple(tokens)
        fresh = {row for row, *_ in new}
        plan = SchedulerOutput(
            step=1,
            new_rows=tuple(
                NewSequence(row=row, token_ids=tuple(tokens), num_prompt_tokens=1, params=SamplingParams(max_tokens=1))
                for row, tokens, *_ in new
            ),
            rows=tuple(row for row, *_ in work),
            num_computed=tuple(start for _, _, start, _ in work),
            num_new=tuple(end - start for _, _, start, end in work),
            new_blocks=tuple(blocks[row] if row in fresh else () for row, *_ in work),
            samples=(False,) * len(work),
        )
        with torch.inference_mode():
            self.runner._rows.update_states(plan)
            inputs = prepare_inputs(plan, self.runner._rows, BLOCK, CPU)
            logits = self.decoder.logits(self.runner.hidden(inputs))
        by_row = dict(zip(plan.rows, logits.split(list(plan.num_new)), strict=True))
        return [by_row[row] for row in sorted(by_row)]


def oracle(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float()


def some_tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 97, count).tolist()


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-3)


KERNELS = {"of the processor": kernels_for(CPU, torch.float32), "reference": reference, "fixed order": fixed_order}


def check_logits(model: PreTrainedModel, path: Path, kernels: Kernels | None = None) -> None:
    """Prompts, chunks and single tokens, alone and in mixed batches, have the logits of `model`."""
    bench = Bench(path, kernels=kernels)
    a, b, c, d = (some_tokens(count, seed=count) for count in (61, 7, 33, 18))
    theirs = {row: oracle(model, tokens) for row, tokens in enumerate((a, b, c, d))}

    (whole,) = bench.step((0, a, 0, 61))
    assert_close(whole, theirs[0])
    # a goes on from its own middle, b is new, c is new and goes on below, all in one batch
    again, new, chunk = bench.step((0, a, 40, 61), (1, b, 0, 7), (2, c, 0, 9))
    assert_close(again, theirs[0][40:])
    assert_close(new, theirs[1])
    assert_close(chunk, theirs[2][:9])
    # single tokens of very different lengths, beside a chunk with a past and a new prompt
    last, single, chunk, new = bench.step((0, a, 60, 61), (1, b, 6, 7), (2, c, 9, 33), (3, d, 0, 17))
    assert_close(last, theirs[0][60:])
    assert_close(single, theirs[1][6:])
    assert_close(chunk, theirs[2][9:])
    assert_close(new, theirs[3][:17])
    # decode only: a batch of all, then the same token alone
    batch = bench.step((0, a, 60, 61), (1, b, 6, 7), (2, c, 32, 33), (3, d, 17, 18))
    for ours, row in zip(batch, range(4), strict=True):
        assert_close(ours, theirs[row][-1:])
    (alone,) = bench.step((2, c, 32, 33))
    assert_close(alone, theirs[2][-1:])
