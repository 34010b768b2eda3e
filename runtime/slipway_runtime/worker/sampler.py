"""Logits to tokens, each row by its own parameters.

The order is fixed: tokens that may not come yet (min_tokens), penalties, temperature, min-p, top-k, top-p, draw.
"""

import numpy as np
import torch
from torch import Tensor

from slipway_runtime.kernels.dispatch import Kernels
from slipway_runtime.worker.rows import Ints, Rows


class Sampler:
    """Draws are keyed by (seed, position): neither the batch nor a preemption changes them."""

    def __init__(self, rows: Rows, eos_token_ids: tuple[int, ...], kernels: Kernels) -> None:
        self._rows = rows
        self._eos = eos_token_ids
        self._kernels = kernels

    def __call__(self, logits: Tensor, row_ids: Ints, positions: Ints) -> Ints:
        """logits: (R, V) of `row_ids`; the tokens will stand at `positions`."""
        rows = self._rows
        if rows.min_tokens[row_ids].any():
            self._hold_back_ends(logits, row_ids, positions)
        if rows.penalized[row_ids].any():
            logits = self._penalize(logits, row_ids, positions)
        if rows.greedy[row_ids].all():
            return logits.argmax(dim=-1).cpu().numpy()

        def of_rows(values: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> Tensor:
            return torch.from_numpy(values[row_ids]).to(logits.device)

        tokens = self._kernels.draw(
            logits,
            temperature=of_rows(rows.temperature),
            top_k=of_rows(rows.top_k),
            top_p=of_rows(rows.top_p),
            min_p=of_rows(rows.min_p),
            seeds=of_rows(rows.seed),
            positions=torch.from_numpy(positions).to(logits.device),
        )
        return tokens.cpu().numpy()

    def _hold_back_ends(self, logits: Tensor, row_ids: Ints, positions: Ints) -> None:
        """Before `min_tokens` are out, nothing that would end the sequence may come."""
        rows = self._rows
        early = positions - rows.num_prompt[row_ids] < rows.min_tokens[row_ids] - 1
        for index in np.flatnonzero(early):
            ends = (*self._eos, *rows.stop_token_ids[row_ids[index]])
            logits[int(index), list(ends)] = float("-inf")

    def _penalize(self, logits: Tensor, row_ids: Ints, positions: Ints) -> Tensor:
        rows, vocabulary = self._rows, logits.shape[1]
        prompt = np.zeros((len(row_ids), vocabulary), dtype=np.float32)
        output = np.zeros((len(row_ids), vocabulary), dtype=np.float32)
        for index, row in enumerate(row_ids):
            if rows.penalized[row]:
                split, end = rows.num_prompt[row], positions[index]
                prompt[index] = np.bincount(rows.tokens[row, :split], minlength=vocabulary)
                output[index] = np.bincount(rows.tokens[row, split:end], minlength=vocabulary)
        return self._kernels.penalize(
            logits,
            torch.from_numpy(prompt).to(logits.device),
            torch.from_numpy(output).to(logits.device),
            *(
                torch.from_numpy(values[row_ids]).to(logits.device)
                for values in (rows.repetition, rows.presence, rows.frequency)
            ),
        )
