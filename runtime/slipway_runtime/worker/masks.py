"""Grammars at the draws: what is not allowed gets a score of -inf, which no bias and no penalty changes."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipway_runtime.messages import TokenMasks
from slipway_runtime.worker.rows import Ints


def forbid(
    logits: Tensor, masks: TokenMasks | None, bound: npt.NDArray[np.bool_], row_ids: Ints, ends: tuple[int, ...]
) -> None:
    """Apply the masks, in place. logits: (D, V)  bound: (D,) whether a grammar binds the draw's row.

    A bound row whose first draw comes without a mask may only end: nothing is drawn unbound because something failed.
    """
    places = np.array(masks.draws if masks is not None else (), dtype=np.int64)
    if masks is not None and len(places):
        where = torch.from_numpy(places).to(logits.device)
        allowed = torch.from_numpy(unpack(masks, logits.shape[1])).to(logits.device)
        logits[where] = logits[where].masked_fill_(~allowed, float("-inf"))
    first = np.flatnonzero(bound & np.append(True, row_ids[1:] != row_ids[:-1]))
    for place in np.setdiff1d(first, places).tolist():
        scores = logits[place, list(ends)]
        logits[place] = float("-inf")
        logits[place, list(ends)] = scores


def unpack(masks: TokenMasks, vocab_size: int) -> npt.NDArray[np.bool_]:
    """(draws, V): whether each token is allowed; tokens beyond the masks are not."""
    packed = np.frombuffer(masks.words, dtype=np.uint8).reshape(len(masks.draws), -1)
    bits = np.unpackbits(packed, axis=1, count=min(vocab_size, 8 * packed.shape[1]), bitorder="little")
    return np.pad(bits, ((0, 0), (0, vocab_size - bits.shape[1]))).astype(bool)
