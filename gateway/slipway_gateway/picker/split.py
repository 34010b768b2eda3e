"""Chooses the revision or adapter of a request: by the traffic split, by the user's cohort, or as the client pinned.

A split without a cohort is drawn for each request. With a cohort (one user's requests), weighted rendezvous hashing
chooses: each choice gets its share of the users, one user stays with one choice, and when weights change only as many
users move as the weights demand, all of them towards what grew.
"""

import hashlib
import math
from collections.abc import Collection, Mapping

from slipway_gateway.picker.endpoints import Route


def choose_revision(weights: Mapping[str, int], ready: Collection[str], draw: float, cohort: str = "") -> str | None:
    """The revision for this `draw` in [0, 1), among those with a `ready` replica; None: any of them.

    Shares are exact: of `total` evenly spaced draws, each revision gets as many as its weight.

    >>> [choose_revision({"old": 3, "new": 1}, {"old", "new"}, draw / 4) for draw in range(4)]
    ['new', 'old', 'old', 'old']

    A revision without a ready replica leaves its share to the others. When no revision with a weight is
    ready, any ready one answers: status may lag behind a roll-out, and an answer is better than a 503.
    """
    shares = sorted((revision, weight) for revision, weight in weights.items() if weight > 0 and revision in ready)
    if cohort:
        return choose_by_hash(dict(shares), cohort)
    mark = draw * sum(weight for _, weight in shares)
    for revision, weight in shares:
        if mark < weight:
            return revision
        mark -= weight
    return shares[-1][0] if shares else None


def knows_revision(route: Route, revision: str) -> bool:
    """Whether a pin to `revision` can ever be served: it is in the service's status or has a replica."""
    return revision in route.revisions


def choose_by_hash(weights: Mapping[str, int], key: str) -> str | None:
    """The choice for this key by weighted rendezvous hashing; None: no choice has a weight.

    Each choice draws a number u in (0, 1) from the key and its own name, and scores -weight / ln u: the highest of
    these is at each choice with the probability of its share (Schindelhauer and Schomaker, 2005).
    """
    scores = {name: -weight / math.log(_uniform(key, name)) for name, weight in weights.items() if weight > 0}
    return max(sorted(scores), key=scores.__getitem__, default=None)


def _uniform(key: str, name: str) -> float:
    """A number in (0, 1) that is the same in every process."""
    digest = hashlib.blake2b(f"{name}\0{key}".encode(errors="replace"), digest_size=6).digest()
    return (int.from_bytes(digest, "big") + 0.5) / 2**48
