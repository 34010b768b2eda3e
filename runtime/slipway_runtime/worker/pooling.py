"""Embedding pooler: pools hidden states of prompts to embeddings, in an engine that serves embeddings only.

A prompt may be prefilled in several steps, so the sums of a mean are kept per row. The step that reaches the prompt's
last token returns the embedding: float32, of length 1.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from slipway_runtime.kernels.upload import Download, upload
from slipway_runtime.messages import SchedulerOutput, StepResult
from slipway_runtime.models.pooling import MEAN
from slipway_runtime.models.score_head import ScoreHead
from slipway_runtime.worker.capture import StepHidden
from slipway_runtime.worker.inputs import HostInputs


class Pooler:
    """Pools by the last token or by the mean of all tokens; scores the pooled state, if the model is a reranker."""

    def __init__(
        self, pooling: str, max_num_seqs: int, size: int, device: torch.device, head: ScoreHead | None = None
    ) -> None:
        """head: of a reranker, whose "embedding" is one number: the score."""
        self._head = head
        self._sums = torch.zeros(max_num_seqs, size, device=device) if pooling == MEAN else None

    def __call__(
        self, plan: SchedulerOutput, inputs: HostInputs, step: StepHidden, norm: Callable[[Tensor], Tensor]
    ) -> StepResult:
        """The result has an embedding and a placeholder token 0 for each row whose prompt ends."""
        if self._sums is None:
            pooled = norm(step.sampled).float()
        else:
            pooled = self._mean(self._sums, plan, inputs, norm(step.tokens).float())
        ends = any(plan.samples)
        # Waited for though no prompt ends here, or the host would launch whole prompts ahead.
        found = F.normalize(pooled, dim=-1) if self._head is None else self._head(pooled)
        values = Download((found,) if ends else (), pooled.device).arrays()
        of_rows = iter(values[0] if ends else ())
        finite = iter(np.isfinite(values[0]).all(axis=1).tolist() if ends else ())
        return StepResult(
            step=plan.step,
            token_ids=tuple([(0,) if ends else () for ends in plan.samples]),
            embeddings=tuple([next(of_rows).tobytes() if ends else b"" for ends in plan.samples]),
            invalid=tuple([index for index, ends in enumerate(plan.samples) if ends and not next(finite)]),
        )

    def _mean(self, sums: Tensor, plan: SchedulerOutput, inputs: HostInputs, normed: Tensor) -> Tensor:
        """Add this step's tokens to their rows' sums; return the means of rows whose prompt ends. (T, H) -> (D, H)."""
        # num_computed 0: the row begins, or begins again after a preemption. Its sum is an older sequence's.
        begin, end = inputs.num_computed == 0, np.array(plan.samples, dtype=bool)
        lengths = (inputs.num_computed + inputs.num_new)[end]
        arrays = (inputs.row_ids[begin], inputs.token_rows, inputs.row_ids[end], lengths)
        begun, token_rows, ended, counts = upload(arrays, normed.device)
        sums.index_fill_(0, begun, 0.0).index_add_(0, token_rows, normed)
        return sums.index_select(0, ended) / counts[:, None]
