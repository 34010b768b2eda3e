"""Grammar bitmasks on logits: a token that a grammar forbids gets -inf, which no bias and no penalty changes."""

import numpy as np
import numpy.typing as npt
from torch import Tensor

from slipway_runtime.kernels.dispatch import Kernels
from slipway_runtime.kernels.upload import upload
from slipway_runtime.messages import TokenMasks
from slipway_runtime.worker.input_batch import Ints


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
