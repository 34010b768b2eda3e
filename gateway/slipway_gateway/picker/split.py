"""Chooses the revision that serves a request: by the traffic split, or the one that the client pinned."""

from collections.abc import Collection, Mapping

from slipway_gateway.picker.endpoints import Route


def choose_revision(weights: Mapping[str, int], ready: Collection[str], draw: float) -> str | None:
    """The revision for this `draw` in [0, 1), among those with a `ready` replica; None: any of them.

    Shares are exact: of `total` evenly spaced draws, each revision gets as many as its weight.

    >>> [choose_revision({"old": 3, "new": 1}, {"old", "new"}, draw / 4) for draw in range(4)]
    ['new', 'old', 'old', 'old']

    A revision without a ready replica leaves its share to the others. When no revision with a weight is
    ready, any ready one answers: status may lag behind a roll-out, and an answer is better than a 503.
    """
    shares = sorted((revision, weight) for revision, weight in weights.items() if weight > 0 and revision in ready)
    mark = draw * sum(weight for _, weight in shares)
    for revision, weight in shares:
        if mark < weight:
            return revision
        mark -= weight
    return shares[-1][0] if shares else None


def knows_revision(route: Route, revision: str) -> bool:
    """Whether a pin to `revision` can ever be served: it is in the service's status or has a replica."""
    return revision in route.revisions
