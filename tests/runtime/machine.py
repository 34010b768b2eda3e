"""A runner on a real checkpoint that computes any stretch of any sequence, in any company, and shows its scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import slipway_runtime
from slipway_runtime.kernels.dispatch import kernels_for
from slipway_runtime.layers.matmul import ALL_DENSE
from slipway_runtime.messages import NewSequence, SamplingParams, SchedulerOutput
from slipway_runtime.models.checkpoint import Checkpoint
from slipway_runtime.models.config import read_config
from slipway_runtime.models.decoder import load_decoder
from slipway_runtime.models.quantize import activation_dtype, choose_kv_dtype, matmul_makers
from slipway_runtime.models.sharding import WHOLE, Shard, part_of
from slipway_runtime.worker.inputs import prepare_inputs
from slipway_runtime.worker.kv_cache import CacheSize, allocate_cache
from slipway_runtime.worker.runner import Runner

TINY = Path(slipway_runtime.__file__).parents[2] / "models" / "tiny"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Stretch:
    """Tokens `start` … `end` of what row `row` holds; those before are in its cache."""

    row: int
    tokens: Sequence[int]
    start: int
    end: int


class Machine:
    """Row n owns the blocks 1 + n * blocks of a row …"""

    def __init__(
        self,
        path: Path = TINY,
        *,
        quantization: str = "none",
        dtype: torch.dtype = torch.float32,
        kv_dtype: str = "auto",
        deterministic: bool = False,
        packed: bool = True,  # False: weights as they are in the checkpoint
        rows: int = 32,
        longest: int = 128,
        block: int = 16,
        share: Shard = WHOLE,
    ) -> None:
        config = read_config(path)
        kernels = kernels_for(
            CPU, activation_dtype(dtype, CPU), deterministic=deterministic, latent=config.latent is not None
        )
        makers = matmul_makers(quantization, deterministic=deterministic, device=CPU, dtype=dtype)
        activations = activation_dtype(dtype, CPU)
        with Checkpoint(path, activations, CPU) as checkpoint:
            self.decoder = load_decoder(config, checkpoint, kernels, longest, makers if packed else ALL_DENSE, share)
        self._per_row, self._block = -(-longest // block), block
        size = CacheSize(rows * self._per_row, block, 0)
        own = part_of(config, share.size)
        self.caches = allocate_cache(own, size, choose_kv_dtype(kv_dtype, dtype), CPU)
        self._runner = Runner(
            self.decoder, self.caches, kernels, block_size=block, max_num_seqs=rows, max_model_len=longest,
            eos_token_ids=(), device=CPU,
        )  # fmt: skip

    def logits(self, *work: Stretch) -> dict[int, torch.Tensor]:
        """By row: the scores after each token of its stretch. (n, V)."""
        work = tuple(sorted(work, key=lambda stretch: stretch.end - stretch.start != 1))
        plan = SchedulerOutput(
            step=1,
            new_rows=tuple(
                NewSequence(row=w.row, token_ids=tuple(w.tokens), num_prompt_tokens=1,
                            params=SamplingParams(max_tokens=1))
                for w in work
            ),
            rows=tuple(w.row for w in work),
            num_computed=tuple(w.start for w in work),
            num_new=tuple(w.end - w.start for w in work),
            new_blocks=tuple(
                tuple(range(1 + w.row * self._per_row, 1 + (w.row + 1) * self._per_row)) for w in work
            ),
            samples=(False,) * len(work),
        )  # fmt: skip
        with torch.inference_mode():
            self._runner._rows.update_states(plan)
            inputs = prepare_inputs(plan, self._runner._rows, self._block, CPU)
            scores = self.decoder.logits(self._runner.hidden(inputs))
        return dict(zip(plan.rows, scores.split(list(plan.num_new)), strict=True))
