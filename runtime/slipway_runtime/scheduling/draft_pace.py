"""How many tokens a draft model drafts for a row, from the acceptance of the row's earlier drafts. Pure.

With an acceptance rate p, the K-th draft token is kept with probability p^K, and costs one pass of the draft model. So
K is the largest number with p^K >= `WORTH`:

    p   0.95  0.9  0.8  0.7  0.6  0.5  0.3  below
    K     23   11    5    3    2    1    1      0

p is estimated from decayed counts, beside a prior of `PRIOR_TRIES` tries at rate `PRIOR_RATE`. At K = 0 the row rests
for `REST_TOKENS` tokens and then tries one; each failure in a row doubles the rest, up to `LONGEST_REST_TOKENS`. So a
useless draft model costs a row a bounded number of passes, plus one for each `LONGEST_REST_TOKENS` tokens.
"""

import math
from typing import Final, NamedTuple

WORTH: Final = 0.3  # least chance of being kept; about what a pass of a draft model costs in steps of the model
PRIOR_RATE: Final = 0.7
PRIOR_TRIES: Final = 2.0
DECAY: Final = 0.9  # of the counts, with each verified draft
REST_TOKENS: Final = 16
LONGEST_REST_TOKENS: Final = 1024


class Pace(NamedTuple):
    """What a row remembers of its drafts."""

    kept: float = 0.0  # accepted draft tokens, decayed
    tried: float = 0.0  # those that were compared: the accepted ones, and the first rejected one of each draft
    rest: int = 0  # output tokens until it drafts again
    last_rest: int = 0  # the length of the last rest; 0: it has not rested since its last success

    @property
    def rate(self) -> float:
        """The estimated probability that a draft token is accepted, if those before it are."""
        return (self.kept + PRIOR_RATE * PRIOR_TRIES) / (self.tried + PRIOR_TRIES)


FIRST_PACE: Final = Pace()


def draft_length(pace: Pace, most: int) -> int:
    """How many tokens to draft next."""
    if pace.rest > 0:
        return 0
    if pace.rate >= 1.0:
        return most
    worthwhile = int(math.log(WORTH) / math.log(pace.rate))
    return min(most, max(worthwhile, 1))  # a row whose rest is over tries one token


def pace_after_verification(pace: Pace, drafted: int, accepted: int) -> Pace:
    """The pace after `accepted` of `drafted` tokens were accepted."""
    kept = DECAY * pace.kept + accepted
    tried = DECAY * pace.tried + accepted + (accepted < drafted)
    found = Pace(kept, tried, 0, 0 if accepted else pace.last_rest)
    if accepted or found.rate >= WORTH:
        return found
    rest = min(2 * pace.last_rest or REST_TOKENS, LONGEST_REST_TOKENS)
    return found._replace(rest=rest, last_rest=rest)


def pace_after_tokens(pace: Pace, tokens: int) -> Pace:
    """The pace after the row has output so many tokens."""
    return pace._replace(rest=max(pace.rest - tokens, 0)) if pace.rest else pace
