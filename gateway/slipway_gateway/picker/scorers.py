"""The scorers of candidate endpoints: each returns 0..1, higher is better; they are combined with weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipway_gateway.picker.endpoints import Endpoint


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """The properties of a request that the picker uses."""

    model: str
    cost: int = 0  # of prompt and answer, estimated in tokens
    pin: str = ""  # the revision that the client insists on
    cohort: str = ""  # the user whose requests go to one revision of a split; empty: each request is drawn


@dataclass(frozen=True, slots=True)
class Candidate:
    """An endpoint and the work that this gateway has given it and that is not done yet."""

    endpoint: Endpoint
    outstanding_tokens: int = 0
    outstanding_requests: int = 0


# All candidates at once, since "least" is a comparison; one score for each, in their order.
Scorer = Callable[[RoutingRequest, Sequence[Candidate]], Sequence[float]]


def least_load(request: RoutingRequest, candidates: Sequence[Candidate]) -> list[float]:
    """1 for an idle replica, 0 for the busiest: load is counted in tokens, since requests differ a thousandfold."""
    busiest = max((candidate.outstanding_tokens for candidate in candidates), default=0)
    if busiest == 0:
        return [1.0] * len(candidates)
    return [1.0 - candidate.outstanding_tokens / busiest for candidate in candidates]


def weighted_scores(
    request: RoutingRequest, candidates: Sequence[Candidate], scorers: Sequence[tuple[Scorer, float]]
) -> list[float]:
    """The weighted mean of all scorers, per candidate."""
    total = sum(weight for _, weight in scorers)
    sums = [0.0] * len(candidates)
    for scorer, weight in scorers:
        for index, score in enumerate(scorer(request, candidates)):
            sums[index] += score * weight / total
    return sums
