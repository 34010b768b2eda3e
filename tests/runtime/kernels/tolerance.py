"""How far a kernel may be from its definition computed in float64: derived from what it rounds, not from one machine.

Two correct implementations of a sum differ by the order in which they add, and the order changes with the processor's
vectors and with the GPU. What does not change is how much can be lost, for values sampled from N(0, 1):

    a sum of n products      its partial sums walk as far as √i, and each is rounded by u of its size: the errors
                             add up to u · √(Σ i) = u · n / √2 (one standard deviation)
    a score q·k · scale      the error of the sum times the scale, and a few roundings of the score itself
    a softmax                weights e^score / Σ: an error d of a score changes a weight by the factor 1 ± 2d
    a weighted mean of v     the weights add up to 1, so n roundings of partial sums of at most max|v| add up to
                             u · √n · max|v|
    low precision            weights and results are rounded once each to the type of the values

`SIGMAS` covers what the largest of many errors adds; the largest value, score and error are taken together, though
they hardly meet. Leaving out a block or a head changes a result by orders of magnitude more (test_sweep.py).
"""

import math
from typing import Final

import torch

UNIT: Final = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SIGMAS: Final = 4
SCORE_ROUNDINGS: Final = 4  # of a score: times the scale, times log2(e), minus the maximum, to the power


def of_a_sum(terms: int) -> float:
    """Most error of a sum of so many products of N(0, 1) values, added in float32."""
    return SIGMAS * UNIT[torch.float32] * terms / math.sqrt(2)


def of_attention(
    *, head_dim: int, keys: int, scale: float, largest_value: float, largest_score: float, dtype: torch.dtype
) -> float:
    """Most error of one number that attention over `keys` tokens computes in float32 from values of `dtype`."""
    unit = UNIT[torch.float32]
    of_a_score = scale * of_a_sum(head_dim) + SCORE_ROUNDINGS * unit * largest_score
    of_the_mean = SIGMAS * unit * math.sqrt(keys)
    of_the_type = 2 * UNIT[dtype]
    return largest_value * (2 * of_a_score + of_the_mean + of_the_type)
