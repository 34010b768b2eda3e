"""Logits to tokens, each row by its own parameters.

The order is fixed: what a grammar forbids, logit_bias, tokens that may not come yet (min_tokens), penalties,
temperature, min-p, top-k, top-p, sample. Logprobs are those after the grammar and before all the rest.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipway_runtime.kernels.dispatch import Kernels
from slipway_runtime.kernels.upload import upload
from slipway_runtime.messages import TokenLogprobs, TokenMasks
from slipway_runtime.worker.input_batch import InputBatch, Ints
from slipway_runtime.worker.logprobs import score
from slipway_runtime.worker.masks import apply_masks
from slipway_runtime.worker.token_counts import IN_PROMPT, TokenCounts

_PENALIZED_AT_ONCE = 1 << 23  # scores: what penalties need beside them stays within some 32 MB tensors

Masks = Callable[[], TokenMasks | None]  # of all samples; called only when a grammar binds one


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """D samples."""

    token_ids: Ints  # (D,)
    logprobs: tuple[TokenLogprobs | None, ...] = ()  # (D,), None for rows that did not ask; empty: nobody did


class Sampler:
    """Draws are keyed by (seed, position): neither the batch nor a preemption changes them."""

    def __init__(self, rows: InputBatch, eos_token_ids: tuple[int, ...], kernels: Kernels) -> None:
        self._rows = rows
        self._eos = eos_token_ids
        self._kernels = kernels
        self._counts = TokenCounts(rows)

    def __call__(self, logits: Tensor, row_ids: Ints, positions: Ints, masks: Masks = lambda: None) -> SampledTokens:
        """logits: (D, V), written over; the tokens will stand at `positions` of `row_ids`."""
        rows = self._rows
        if rows.plain[row_ids].all():
            return SampledTokens(logits.argmax(dim=-1).cpu().numpy())
        if (bound := rows.bound[row_ids]).any():
            apply_masks(logits, masks(), bound, row_ids, self._eos, self._kernels)
        asked = np.flatnonzero(rows.logprobs[row_ids] >= 0)
        raw = logits[torch.from_numpy(asked).to(logits.device)] if len(asked) else None  # a copy
        token_ids = self._sample(self._change(logits, row_ids, positions), row_ids, positions)
        if raw is None:
            return SampledTokens(token_ids)
        logprobs: list[TokenLogprobs | None] = [None] * len(row_ids)
        for place, one in zip(asked, score(raw, token_ids[asked], rows.logprobs[row_ids[asked]]), strict=True):
            logprobs[place] = one
        return SampledTokens(token_ids, tuple(logprobs))

    def _change(self, logits: Tensor, row_ids: Ints, positions: Ints) -> Tensor:
        """Bias, min_tokens, penalties."""
        rows = self._rows
        for place in np.flatnonzero(rows.biased[row_ids]):
            self._bias(logits[int(place)], rows.bias[row_ids[place]])
        if rows.min_tokens[row_ids].any():
            self._suppress_stop_tokens(logits, row_ids, positions)
        return self._penalize(logits, row_ids, positions) if rows.penalized[row_ids].any() else logits

    def _sample(self, logits: Tensor, row_ids: Ints, positions: Ints) -> Ints:
        rows = self._rows
        if rows.greedy[row_ids].all():
            return logits.argmax(dim=-1).cpu().numpy()

        columns = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed)
        tokens = self._kernels.sample(
            logits, *upload((*(column[row_ids] for column in columns), positions), logits.device)
        )
        return tokens.cpu().numpy()

    def _bias(self, scores: Tensor, bias: tuple[tuple[int, float], ...]) -> None:
        known = [(token, value) for token, value in bias if token < len(scores)]  # padding is no token
        ids = torch.tensor([token for token, _ in known], device=scores.device, dtype=torch.int64)
        scores[ids] += torch.tensor([value for _, value in known], device=scores.device)

    def _suppress_stop_tokens(self, logits: Tensor, row_ids: Ints, positions: Ints) -> None:
        """Before `min_tokens` are out no end may come, unless a grammar has nothing left but ends."""
        rows = self._rows
        early = positions - rows.num_prompt[row_ids] < rows.min_tokens[row_ids] - 1
        for place in np.flatnonzero(early):
            row, scores = row_ids[place], logits[int(place)]
            ends = [token for token in (*self._eos, *rows.stop_token_ids[row]) if token < len(scores)]
            before = scores[ends]
            scores[ends] = float("-inf")
            if rows.bound[row] and bool(scores.isneginf().all()):
                scores[ends] = before

    def _penalize(self, logits: Tensor, row_ids: Ints, positions: Ints) -> Tensor:
        """Change the scores of rows that are penalized, in place; the others are not touched."""
        rows = self._rows
        penalized = np.flatnonzero(rows.penalized[row_ids])
        # All samples of a row together: the counts of its drafts are added to those of its first sample.
        most = max(_PENALIZED_AT_ONCE // logits.shape[1], 1)
        own = row_ids[penalized]
        ends = np.append(np.flatnonzero(own[1:] != own[:-1]) + 1, len(own)).tolist()  # of each row's samples
        bounds, last = [0], 0
        for row_end in ends:
            if row_end - bounds[-1] > most and last > bounds[-1]:
                bounds.append(last)
            last = row_end
        for begin, end in zip(bounds, [*bounds[1:], len(own)], strict=True):
            places = penalized[begin:end]
            of_rows = row_ids[places]
            counts = self._counts.of(of_rows, positions[places], logits)
            where, *factors = upload(
                (places, rows.repetition[of_rows], rows.presence[of_rows], rows.frequency[of_rows]), logits.device
            )
            logits[where] = self._kernels.penalize(
                logits[where], (counts >= IN_PROMPT).int(), counts % IN_PROMPT, *factors
            )
        return logits
