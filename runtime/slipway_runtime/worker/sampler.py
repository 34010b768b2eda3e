"""Sampler: tokens from logits, each row by its own sampling parameters.

The order is fixed: grammar bitmask, logit_bias, min_tokens, penalties, temperature, min-p, top-k, top-p, sample.
Logprobs are computed after the bitmask and before all the rest.

The largest logit of each row is read before any of that. If it is NaN or infinite, the model computed no answer, and
the sample is marked as invalid.

Draft tokens (speculative decoding) are accepted if the row samples the same token. A sample is a function of the
logits, the seed and the position: a row with K draft tokens samples K + 1 times, each with the key of its position, as
if all drafts before it were accepted. The first sample that differs from its draft is kept too, and ends the row's
step. So the output is the same with and without drafts, token for token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipway_runtime.kernels.dispatch import Kernels
from slipway_runtime.kernels.reference_sampling import PENALIZED_AT_ONCE
from slipway_runtime.kernels.upload import Download, Ints, upload
from slipway_runtime.messages import SchedulerOutput, TokenLogprobs, TokenMasks
from slipway_runtime.worker.input_batch import InputBatch
from slipway_runtime.worker.logprobs import as_logprobs, score
from slipway_runtime.worker.token_counts import TokenCounts

Masks = Callable[[], TokenMasks | None]  # of all samples; called only when a grammar constrains one


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens of D samples, and their logprobs."""

    token_ids: Ints  # (D,)
    valid: npt.NDArray[np.bool_]  # (D,) whether the logits were finite
    logprobs: tuple[TokenLogprobs | None, ...] = ()  # (D,), None for rows that did not request them; empty: no row did


@dataclass(frozen=True, slots=True)
class PendingSamples:
    """D samples that the device was asked for; `read` waits for them."""

    token_ids: Tensor  # (D,) int32, on the device
    read: Callable[[], SampledTokens]


class Sampler:
    """Samples tokens. Random numbers are keyed by (seed, position): batch and preemption do not change them."""

    def __init__(self, rows: InputBatch, eos_token_ids: tuple[int, ...], kernels: Kernels) -> None:
        self._rows = rows
        self._eos = eos_token_ids
        self._kernels = kernels
        self._counts = TokenCounts(rows)

    def __call__(self, logits: Tensor, row_ids: Ints, positions: Ints, masks: Masks = lambda: None) -> PendingSamples:
        """Sample one token per row of logits. logits: (D, V), overwritten; `positions` of `row_ids` get the tokens."""
        rows = self._rows
        if rows.plain[row_ids].all():
            largest, tokens = logits.max(dim=-1)  # NaN is the largest
            return _without_logprobs(tokens, largest)
        largest = logits.amax(dim=-1)
        if (bound := rows.bound[row_ids]).any():
            apply_masks(logits, masks(), bound, row_ids, self._eos, self._kernels)
        asked = np.flatnonzero(rows.logprobs[row_ids] >= 0)
        if not len(asked):
            return _without_logprobs(
                self._sample(self._change(logits, row_ids, positions), row_ids, positions), largest
            )
        (where,) = upload((asked,), logits.device)
        raw = logits.index_select(0, where)  # a copy
        tokens = self._sample(self._change(logits, row_ids, positions), row_ids, positions)
        counts = rows.logprobs[row_ids[asked]]
        scored = score(raw, tokens.index_select(0, where), int(counts.max()))
        tokens = tokens.to(torch.int32)
        copy = Download((*scored, tokens, largest), tokens.device)

        def read() -> SampledTokens:
            *scores, token_ids, best = copy.arrays()
            logprobs: list[TokenLogprobs | None] = [None] * len(row_ids)
            for place, one in zip(asked, as_logprobs(token_ids[asked], scores, counts), strict=True):
                logprobs[place] = one
            return SampledTokens(token_ids, np.isfinite(best), tuple(logprobs))

        return PendingSamples(tokens, read)

    def _change(self, logits: Tensor, row_ids: Ints, positions: Ints) -> Tensor:
        """Apply logit_bias, min_tokens and penalties."""
        rows = self._rows
        if rows.biased[row_ids].any():
            self._bias(logits, row_ids)
        if rows.min_tokens[row_ids].any():
            self._suppress_stop_tokens(logits, row_ids, positions)
        return self._penalize(logits, row_ids, positions) if rows.penalized[row_ids].any() else logits

    def _sample(self, logits: Tensor, row_ids: Ints, positions: Ints) -> Tensor:
        rows = self._rows
        if rows.greedy[row_ids].all():
            return logits.argmax(dim=-1)

        columns = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed)
        return self._kernels.sample(
            logits, *upload((*(column[row_ids] for column in columns), positions), logits.device)
        )

    def _bias(self, logits: Tensor, row_ids: Ints) -> None:
        """Add the biases of all rows at once."""
        biases = [
            (place, token, value)
            for place in np.flatnonzero(self._rows.biased[row_ids]).tolist()
            for token, value in self._rows.bias[row_ids[place]]
            if token < logits.shape[1]  # ids beyond the logits have no score
        ]
        places, tokens = _pairs([(place, token) for place, token, _ in biases])
        values = np.array([value for *_, value in biases], dtype=np.float32)
        where, which, added = upload((places, tokens, values), logits.device)
        logits.index_put_((where, which), added, accumulate=True)

    def _suppress_stop_tokens(self, logits: Tensor, row_ids: Ints, positions: Ints) -> None:
        """Mask EOS and stop tokens of rows with fewer than `min_tokens`, unless the grammar allows nothing else."""
        rows = self._rows
        early = np.flatnonzero(positions - rows.num_prompt[row_ids] < rows.min_tokens[row_ids] - 1)
        ends = [
            (place, token)
            for place in early.tolist()
            for token in dict.fromkeys((*self._eos, *rows.stop_token_ids[row_ids[place]]))
            if token < logits.shape[1]
        ]
        if not ends:
            return
        places, tokens = _pairs(ends)
        bound = np.flatnonzero(rows.bound[row_ids[places]])  # of the pairs
        where, which, bound_where, bound_which = upload((places, tokens, places[bound], tokens[bound]), logits.device)
        before = logits[bound_where, bound_which] if len(bound) else None
        nothing = logits.new_full((), float("-inf"))
        logits.index_put_((where, which), nothing)
        if before is not None:
            only_ends = logits.index_select(0, bound_where).isneginf().all(dim=1)
            logits.index_put_((bound_where, bound_which), before.where(only_ends, nothing))

    def _penalize(self, logits: Tensor, row_ids: Ints, positions: Ints) -> Tensor:
        """Apply penalties in place, to the logits of penalized rows only."""
        penalized = np.flatnonzero(self._rows.penalized[row_ids])
        own = row_ids[penalized]
        is_last = np.append(own[1:] != own[:-1], True)  # of its row's samples
        if is_last.all():  # no drafts: the count table needs no copy
            counts = self._counts.up_to(own, positions[penalized], logits)
            self._apply_penalties(logits, penalized, own, counts, own)
            return logits
        # Chunks hold all samples of a row: counts of its draft tokens are added to those of its first sample.
        most = max(PENALIZED_AT_ONCE // logits.shape[1], 1)
        bounds, last = [0], 0
        for row_end in (np.flatnonzero(is_last) + 1).tolist():
            if row_end - bounds[-1] > most and last > bounds[-1]:
                bounds.append(last)
            last = row_end
        for begin, end in zip(bounds, [*bounds[1:], len(own)], strict=True):
            places = penalized[begin:end]
            counts = self._counts.of(own[begin:end], positions[places], logits)
            self._apply_penalties(logits, places, own[begin:end], counts, np.arange(len(places)))
        return logits

    def _apply_penalties(self, logits: Tensor, places: Ints, row_ids: Ints, counts: Tensor, count_rows: Ints) -> None:
        rows = self._rows
        factors = rows.repetition[row_ids], rows.presence[row_ids], rows.frequency[row_ids]
        where, which, *on_device = upload((places, count_rows, *factors), logits.device)
        self._kernels.penalize_rows(logits, where, counts, which, *on_device)


def _without_logprobs(token_ids: Tensor, largest: Tensor) -> PendingSamples:
    tokens = token_ids.to(torch.int32)
    copy = Download((tokens, largest), tokens.device)

    def read() -> SampledTokens:
        read_tokens, best = copy.arrays()
        return SampledTokens(read_tokens, np.isfinite(best))

    return PendingSamples(tokens, read)


def _pairs(pairs: list[tuple[int, int]]) -> tuple[Ints, Ints]:
    """Split (place, token) pairs into two arrays."""
    both = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return np.ascontiguousarray(both[:, 0]), np.ascontiguousarray(both[:, 1])


def apply_masks(
    logits: Tensor,
    masks: TokenMasks | None,
    bound: npt.NDArray[np.bool_],
    row_ids: Ints,
    ends: tuple[int, ...],
    kernels: Kernels,
) -> None:
    """Apply the bitmasks in place. logits: (D, V)  bound: (D,) whether a grammar constrains the sample's row.

    A constrained row whose first sample has no mask may only sample a token of `ends`: a grammar failure never leads
    to an unconstrained sample.
    """
    places = np.array(masks.samples if masks is not None else (), dtype=np.int64)
    if masks is not None and len(places):
        words = np.frombuffer(bytearray(masks.words), dtype=np.int32).reshape(len(places), -1)
        kernels.apply_bitmask(logits, *upload((places, words), logits.device))
    first = np.flatnonzero(bound & np.append(True, row_ids[1:] != row_ids[:-1]))
    if len(unmasked := np.setdiff1d(first, places)):
        rows, tokens = upload((unmasked, np.array(ends, dtype=np.int64)), logits.device)
        at_ends = rows[:, None], tokens[None, :]
        scores = logits[at_ends]
        logits.index_fill_(0, rows, float("-inf"))
        logits.index_put_(at_ends, scores)


def kept_tokens(plan: SchedulerOutput, sampled: list[int]) -> tuple[tuple[int, ...], ...]:
    """Sampled tokens that each row of the plan keeps. sampled: all samples of the plan, in order."""
    following = iter(sampled)
    if not plan.drafts:
        return tuple([(next(following),) if samples else () for samples in plan.samples])
    return tuple(
        [
            _kept(drafts, list(islice(following, 1 + len(drafts)))) if samples else ()
            for samples, drafts in zip(plan.samples, plan.drafts, strict=True)
        ]
    )


def kept_logprobs(
    plan: SchedulerOutput, logprobs: Sequence[TokenLogprobs | None], token_ids: tuple[tuple[int, ...], ...]
) -> tuple[tuple[TokenLogprobs, ...], ...]:
    """Logprobs of each row's kept tokens. logprobs: of all samples, in order; empty, as the result: none requested."""
    if not logprobs:
        return ()
    result: list[tuple[TokenLogprobs, ...]] = []
    first = 0
    for index, kept in enumerate(token_ids):
        result.append(tuple([one for one in logprobs[first : first + len(kept)] if one is not None]))
        if plan.samples[index]:
            first += 1 + (len(plan.drafts[index]) if plan.drafts else 0)
    return tuple(result)


def invalid_rows(
    plan: SchedulerOutput, valid: npt.NDArray[np.bool_], token_ids: tuple[tuple[int, ...], ...]
) -> tuple[int, ...]:
    """Rows of the plan with a kept token from logits that were not finite. valid: of all samples, in order."""
    if valid.all():
        return ()
    result, first = [], 0
    for index, kept in enumerate(token_ids):
        if not valid[first : first + len(kept)].all():
            result.append(index)
        if plan.samples[index]:
            first += 1 + (len(plan.drafts[index]) if plan.drafts else 0)
    return tuple(result)


def _kept(drafts: tuple[int, ...], sampled: list[int]) -> tuple[int, ...]:
    accepted = 0
    while accepted < len(drafts) and sampled[accepted] == drafts[accepted]:
        accepted += 1
    return tuple(sampled[: accepted + 1])
