"""Tests whether one share is above another, at every look anew, without more false alarms than one look would have.

A fixed test at 5 % that is repeated at every look is wrong far more often than in 5 % of the cases: after twenty looks
at two equal revisions, in about a quarter. These tests are likelihood ratios against a uniform mixture of alternatives
(a mixture SPRT; Robbins 1970, Johari et al. 2017): under equality they are martingales, so by Ville's inequality they
exceed 1/alpha at any time of an endless series of looks with probability of at most alpha.
"""

from math import lgamma, log
from typing import NamedTuple

_SMALLEST = 1e-6


class Share(NamedTuple):
    """`part` of `whole`: failed requests of all, or answers slower than a limit of all. May be fractions."""

    part: float
    whole: float

    @property
    def rate(self) -> float:
        """The share as a number; 0 of 0 is 0."""
        return self.part / self.whole if self.whole else 0.0


def is_above(share: Share, limit: float, *, alpha: float) -> bool:
    """Whether the probability behind `share` is above `limit`.

    5 of 100 against 0.01 is not certain at alpha 0.05, 6 of 100 is.
    """
    limit = min(max(limit, _SMALLEST), 1 - _SMALLEST)
    return share.rate > limit and _log_evidence(share, limit) >= log(1 / alpha)


def is_above_other(share: Share, other: Share, *, alpha: float) -> bool:
    """Whether the probability behind `share` is above that behind `other`.

    Where the two are equal, each event falls into `share` with the probability of its part of all trials: 20 of 100
    against 5 of 100 is 20 of 25 where a half would be expected, and certain enough at alpha 0.05.
    """
    if not share.whole or not other.whole or share.rate <= other.rate:
        return False
    expected = share.whole / (share.whole + other.whole)
    return is_above(Share(share.part, share.part + other.part), expected, alpha=alpha)


def _log_evidence(share: Share, limit: float) -> float:
    """Logarithm of the likelihood under a uniform mixture, over the likelihood at the limit."""
    hits, misses = share.part, share.whole - share.part
    mixture = lgamma(hits + 1) + lgamma(misses + 1) - lgamma(share.whole + 2)
    return mixture - hits * log(limit) - misses * log(1 - limit)
