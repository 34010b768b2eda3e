"""Order of waiting requests: fair shares of tenants and adapters, and priorities that age. Pure.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", 2024): each tenant has a counter of
the work done for it, divided by its weight, and the smallest counter is served first. So two tenants that both
have work waiting get tokens in the ratio of their weights, however many requests each of them sends. Work is what
was computed: prompt tokens that were not in the cache, and twice each token of output. Inside a tenant the same holds
between its adapters, with equal weights.

A tenant that returns after a time without requests starts at least at the smallest counter of the tenants that have
requests: idle time earns no credit.

Higher priority classes are served first, but a class counts as one class higher for each `aging_seconds` since it was
last served: with 30 s, a request of priority 0 waits behind a stream of priority 2 for 60 s, then is served.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

PREFILL_WEIGHT = 1
OUTPUT_WEIGHT = 2
MOST_SILENT_TENANTS = 4096  # with more tenants, the counters of those without requests are dropped


@dataclass(slots=True, eq=False)
class Share:
    """The counter of one adapter of one tenant, or of the tenant itself."""

    name: str
    owner: "Share | None" = None
    weight: float = 1.0
    served: float = 0.0  # tokens, by their weights, divided by the share's weight
    present: int = 0  # requests that have not ended
    parts: "dict[str, Share]" = field(default_factory=dict)

    def charge(self, prefill: int = 0, output: int = 0) -> None:
        """Add computed tokens to this counter and to that of its tenant."""
        tokens = PREFILL_WEIGHT * prefill + OUTPUT_WEIGHT * output
        self.served += tokens / self.weight
        if self.owner is not None:
            self.owner.served += tokens / self.owner.weight


class Shares:
    """The counters of all tenants."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        if any(weight <= 0 for weight in self._weights.values()):
            raise ValueError("the weight of a tenant is above 0")
        self._tenants: dict[str, Share] = {}

    def join(self, tenant: str, adapter: str) -> Share:
        """Count a new request of a tenant for an adapter; the counter that it is charged to."""
        share = self._tenants.get(tenant)
        if share is None:
            self._tenants[tenant] = share = Share(tenant, weight=self._weights.get(tenant, 1.0))
        part = share.parts.get(adapter)
        if part is None:
            share.parts[adapter] = part = Share(adapter, owner=share)
        _enter(share, self._tenants)
        _enter(part, share.parts)
        return part

    def leave(self, part: Share) -> None:
        """Uncount a request that has ended."""
        tenant = part.owner
        assert tenant is not None
        part.present -= 1
        tenant.present -= 1
        if tenant.present == 0:
            tenant.parts.clear()
            if len(self._tenants) > MOST_SILENT_TENANTS:
                self._tenants = {name: share for name, share in self._tenants.items() if share.present}


def _enter(share: Share, among: Mapping[str, Share]) -> None:
    if share.present == 0:
        share.served = max(share.served, min((s.served for s in among.values() if s.present), default=0.0))
    share.present += 1


def class_rank(priority: int, seconds_unserved: float, aging_seconds: float) -> float:
    """The rank of a priority class: the highest is served first."""
    return priority + seconds_unserved / aging_seconds
