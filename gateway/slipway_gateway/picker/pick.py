"""Picks an endpoint for one attempt: filter, score, choose. Deterministic: the random draws are arguments."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from slipway_gateway.picker.endpoints import Endpoint, Route
from slipway_gateway.picker.scorers import Candidate, RoutingRequest, Scorer, least_load, weighted_scores
from slipway_gateway.picker.split import choose_revision, knows_revision

SCORERS: Final[tuple[tuple[Scorer, float], ...]] = ((least_load, 1.0),)


@dataclass(frozen=True, slots=True)
class Load:
    """What this gateway has outstanding on one endpoint."""

    tokens: int = 0
    requests: int = 0


IDLE: Final = Load()


@dataclass(frozen=True, slots=True)
class Picked:
    """The endpoint for this attempt."""

    endpoint: Endpoint


@dataclass(frozen=True, slots=True)
class UnknownRevision:
    """The client pinned a revision that this service does not have."""

    revision: str


@dataclass(frozen=True, slots=True)
class NoneReady:
    """No replica can answer now; `reason` is a sentence for the client."""

    reason: str


Pick = Picked | UnknownRevision | NoneReady


def pick(
    route: Route,
    request: RoutingRequest,
    *,
    loads: Mapping[str, Load],
    ejected: Collection[str] = (),
    tried: Collection[str] = (),
    draw: float,
    tie_break: float,
    scorers: Sequence[tuple[Scorer, float]] = SCORERS,
) -> Pick:
    """The best endpoint of `route` for one attempt of `request`.

    1. Filter: the pinned revision, or the one that `draw` chooses by weight; never one that was `tried`.
    2. Leave out the `ejected`, unless no other is left: a suspect is better than a refusal.
    3. Score, and among the best let `tie_break` in [0, 1) choose, so that equals share the work.
    """
    if request.pin and not knows_revision(route, request.pin):
        return UnknownRevision(request.pin)
    untried = [endpoint for endpoint in route.endpoints if endpoint.name not in tried]
    ready = {endpoint.revision for endpoint in untried}
    cohort = request.cohort and f"{route.service.key}/{request.cohort}"
    revision = request.pin or choose_revision(route.service.weights, ready, draw, cohort)
    fitting = [endpoint for endpoint in untried if revision is None or endpoint.revision == revision]
    fitting = [endpoint for endpoint in fitting if endpoint.name not in ejected] or fitting
    if not fitting:
        return NoneReady(_why_none(route, request.pin, tried))
    candidates = [_candidate(endpoint, loads) for endpoint in fitting]
    scores = weighted_scores(request, candidates, scorers)
    highest = max(scores)
    best = [candidate.endpoint for candidate, score in zip(candidates, scores, strict=True) if score == highest]
    return Picked(best[int(tie_break * len(best))])


def _candidate(endpoint: Endpoint, loads: Mapping[str, Load]) -> Candidate:
    load = loads.get(endpoint.name, IDLE)
    return Candidate(endpoint, outstanding_tokens=load.tokens, outstanding_requests=load.requests)


def _why_none(route: Route, pin: str, tried: Collection[str]) -> str:
    whose = f"revision {pin} of {route.name}" if pin else route.name
    if any(endpoint.name in tried for endpoint in route.endpoints):
        return f"no other replica of {whose} can take this request now"
    if route.adapter is not None and route.has_base:
        return f"no ready replica of {route.service.served_name} has loaded the adapter {whose}"
    return f"{whose} has no ready replica"
