"""Picks an endpoint for one attempt: filter, score, choose. Deterministic: the random draws are arguments.

| strategy    | scorers                                                   | session, home, bounded load |
|-------------|-----------------------------------------------------------|-----------------------------|
| PrefixCache | adapter residency, prefix match, home, load, KV headroom  | yes                         |
| LeastLoad   | adapter residency, load, KV headroom                      | no                          |
| RoundRobin  | none: the endpoints in turn                               | no                          |
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import nlargest
from types import MappingProxyType
from typing import Final

from slipway_api.inference_service import RoutingStrategy
from slipway_gateway.picker import affinity, scorers
from slipway_gateway.picker.endpoints import Endpoint, Route
from slipway_gateway.picker.prefix import TOKENS_OF_BLOCK, PrefixIndex
from slipway_gateway.picker.scorers import Candidate, ReplicaLoad, RoutingRequest, Scorer, weighted_scores
from slipway_gateway.picker.split import choose_revision, knows_revision

WeightedScorers = Sequence[tuple[Scorer, float]]

SCORERS: Final[Mapping[RoutingStrategy, WeightedScorers]] = MappingProxyType(
    {
        RoutingStrategy.PREFIX_CACHE: (
            (scorers.adapter_residency, 16.0),
            (scorers.prefix_match, 16.0),
            (scorers.home, 2.0),
            (scorers.least_load, 1.0),
            (scorers.kv_headroom, 0.5),
        ),
        RoutingStrategy.LEAST_LOAD: (
            (scorers.adapter_residency, 16.0),
            (scorers.least_load, 1.0),
            (scorers.kv_headroom, 0.5),
        ),
        RoutingStrategy.ROUND_ROBIN: (),
    }
)
MOST_CONSIDERED: Final = 3  # endpoints of a pick whose numbers are kept for `kubectl slipway why`
NOTHING_KNOWN: Final = PrefixIndex()  # never added to
NO_REPORTS: Final[Mapping[str, ReplicaLoad]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Load:
    """What this gateway has outstanding on one endpoint."""

    tokens: int = 0
    requests: int = 0


IDLE: Final = Load()


class PickReason(Enum):
    """Why an endpoint was picked."""

    ONLY = "only"  # no other endpoint could take the request
    TURN = "turn"  # RoundRobin
    BEST_SCORE = "best_score"


@dataclass(frozen=True, slots=True)
class Considered:
    """An endpoint that was scored, with the numbers behind its score."""

    endpoint: str
    score: float
    matched_tokens: int
    load_tokens: int
    kv_usage: float | None  # None: it reported nothing
    is_home: bool


@dataclass(frozen=True, slots=True)
class Picked:
    """The endpoint for this attempt."""

    endpoint: Endpoint
    matched_tokens: int = 0  # of the prompt, which it was sent before and need not compute again
    reason: PickReason = field(default=PickReason.ONLY, compare=False)
    considered: tuple[Considered, ...] = field(default=(), compare=False)  # those with the highest scores


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
    reports: Mapping[str, ReplicaLoad] = NO_REPORTS,
    prefixes: PrefixIndex = NOTHING_KNOWN,
    ejected: Collection[str] = (),
    tried: Collection[str] = (),
    avoid_nodes: Collection[str] = (),
    draw: float,
    tie_break: float,
    turn: int = 0,
    weighted: WeightedScorers | None = None,
) -> Pick:
    """The best endpoint of `route` for one attempt of `request`.

    1. Filter: the pinned revision, or the one that `draw` chooses by weight; never one that was `tried`, nor one of a
       revision that was rolled back or has not passed its gates.
    2. Leave out the `ejected`, unless no other is left: a suspect is better than a refusal.
    3. Leave out replicas on `avoid_nodes`, unless no other is left: the node may be lost with all its replicas.
    4. Leave out those whose load is beyond the bound of affinity.
    5. Score, and among the best let `tie_break` in [0, 1) choose, so that equals share the work.

    `turn` counts the picks of this service, for RoundRobin. `weighted` replaces the scorers of the service's strategy.
    """
    if request.pin and not knows_revision(route, request.pin):
        return UnknownRevision(request.pin)
    withheld = frozenset() if request.pin else route.service.withheld
    untried = [one for one in route.endpoints if one.name not in tried and one.revision not in withheld]
    ready = {endpoint.revision for endpoint in untried}
    cohort = request.cohort and f"{route.service.key}/{request.cohort}"
    revision = request.pin or choose_revision(route.service.weights, ready, draw, cohort)
    fitting = [endpoint for endpoint in untried if revision is None or endpoint.revision == revision]
    fitting = [endpoint for endpoint in fitting if endpoint.name not in ejected] or fitting
    fitting = [endpoint for endpoint in fitting if endpoint.node not in avoid_nodes] or fitting
    if not fitting:
        return NoneReady(_why_none(route, request.pin, tried))
    if len(fitting) == 1:
        return Picked(fitting[0])
    strategy = route.service.strategy
    weighted = SCORERS[strategy] if weighted is None else weighted
    if not weighted:
        return Picked(fitting[turn % len(fitting)], reason=PickReason.TURN)
    candidates: Sequence[Candidate] = [_candidate(endpoint, loads, reports) for endpoint in fitting]
    if strategy is RoutingStrategy.PREFIX_CACHE:
        candidates = _with_affinity(request, candidates, prefixes)
    scores = weighted_scores(request, candidates, weighted)
    highest = max(scores)
    best = [candidate for candidate, score in zip(candidates, scores, strict=True) if score == highest]
    chosen = best[int(tie_break * len(best))]
    return Picked(
        chosen.endpoint, chosen.matched_tokens, PickReason.BEST_SCORE, _considered(chosen, candidates, scores)
    )


def _considered(chosen: Candidate, candidates: Sequence[Candidate], scores: Sequence[float]) -> tuple[Considered, ...]:
    """The chosen endpoint, and those with the next scores."""
    scored = list(zip(scores, candidates, strict=True))
    best = nlargest(MOST_CONSIDERED, scored, key=lambda pair: (pair[0], pair[1] is chosen))
    return tuple(
        Considered(
            one.endpoint.name,
            score,
            one.matched_tokens,
            one.load_tokens,
            one.reported.kv_usage if one.reported is not None else None,
            one.is_home,
        )
        for score, one in best
    )


def _candidate(endpoint: Endpoint, loads: Mapping[str, Load], reports: Mapping[str, ReplicaLoad]) -> Candidate:
    load = loads.get(endpoint.name, IDLE)
    return Candidate(endpoint, load.tokens, load.requests, reports.get(endpoint.name))


def _with_affinity(
    request: RoutingRequest, candidates: Sequence[Candidate], prefixes: PrefixIndex
) -> Sequence[Candidate]:
    """The candidates within the bound, with what they have cached, and one of them marked as home."""
    if request.blocks:
        for candidate in candidates:
            if matched := prefixes.matched(candidate.endpoint.name, request.blocks):
                candidate.matched_tokens = matched * TOKENS_OF_BLOCK
                candidate.matched_share = matched / len(request.blocks)
    candidates = affinity.within_bound(request, candidates)
    if request.session:
        key = affinity.stable_hash(f"{request.model}\x1f{request.session}")
    elif request.blocks and not any(candidate.matched_tokens for candidate in candidates):
        key = request.blocks[0]
    else:
        return candidates
    home = affinity.home(key, [candidate.endpoint.name for candidate in candidates])
    for candidate in candidates:
        candidate.is_home = candidate.endpoint.name == home
    return candidates


def _why_none(route: Route, pin: str, tried: Collection[str]) -> str:
    whose = f"revision {pin} of {route.name}" if pin else route.name
    if any(endpoint.name in tried for endpoint in route.endpoints):
        return f"no other replica of {whose} can take this request now"
    if route.adapter is not None and route.has_base:
        return f"no ready replica of {route.service.served_name} has loaded the adapter {whose}"
    return f"{whose} has no ready replica"
