"""Affinity with bounded load: requests with one key prefer one endpoint, and never overload it.

Rendezvous hashing: every (key, endpoint) pair has a rank, and the endpoint of the highest rank is the key's home. All
gateways compute the same homes without talking to each other. When an endpoint leaves, only its own keys move, spread
over all others; when one joins, it takes its share of the keys from all others.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final

from slipway_gateway.picker.scorers import Candidate, RoutingRequest

# Two requests' worth of tokens, as "stick only if load < min + 2"; a huge request does not get a huge tolerance.
TOLERATED_REQUESTS: Final = 2
MOST_TOLERATED_COST: Final = 2048
# Under high load two requests are noise; consistent hashing with bounded loads uses 1.25 times the mean.
TOLERATED_SHARE_OF_MEAN: Final = 0.25

_MASK: Final = (1 << 64) - 1


@lru_cache(maxsize=65536)
def stable_hash(text: str) -> int:
    """64 bits of `text`; the same in every process, unlike `hash`."""
    return int.from_bytes(blake2b(text.encode(errors="replace"), digest_size=8).digest(), "little")


def rank(key: int, endpoint: str) -> int:
    """The rank of this endpoint for this key: splitmix64 of both hashes."""
    mixed = (key ^ stable_hash(endpoint)) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def home(key: int, endpoints: Sequence[str]) -> str:
    """The endpoint that requests with this key prefer."""
    return max(endpoints, key=lambda endpoint: (rank(key, endpoint), endpoint))


def within_bound(request: RoutingRequest, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that affinity may choose from: those whose load is near the least; never empty.

    A candidate may have as much more load than the least loaded one as it saves by its cache, and beside that two
    requests or a quarter of the mean load. Worked: cost 1,100, loads 0, 2,000 and 5,000, mean 2,333, nothing cached →
    bound 0 + 2,200 + 0.25 × 2,333 = 2,783: the first two. With 2,500 tokens of the prompt cached at the third: all.
    """
    least = min(candidate.load_tokens for candidate in candidates)
    mean = sum(candidate.load_tokens for candidate in candidates) / len(candidates)
    tolerance = TOLERATED_REQUESTS * min(request.cost, MOST_TOLERATED_COST) + TOLERATED_SHARE_OF_MEAN * mean
    return [
        candidate for candidate in candidates if candidate.load_tokens <= least + tolerance + candidate.matched_tokens
    ]
