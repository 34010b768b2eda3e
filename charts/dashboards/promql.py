"""Parts of expressions that many panels share. Replicas and the operator label their series with `namespace` and
`service`; a gateway's label `service` is `namespace/name`.
"""

from typing import Final

OF: Final = 'namespace=~"$namespace", service=~"$service"'
OF_GATEWAY: Final = 'service=~"$namespace/$service"'
BY: Final = "namespace, service"
NOW: Final = "$__rate_interval"


def rate(metric: str, where: str = OF, *, by: str = BY, over: str = NOW, offset: str = "") -> str:
    """Increase a second of a counter, summed."""
    return f"sum by ({by}) (rate({metric}{{{where}}}[{over}]{_offset(offset)}))"


def ratio(part: str, whole: str, where: str = OF, *, by: str = BY, over: str = NOW, offset: str = "") -> str:
    """A counter's part of another one, over the same time."""
    return (
        f"{rate(part, where, by=by, over=over, offset=offset)} / {rate(whole, where, by=by, over=over, offset=offset)}"
    )


def mean(histogram: str, where: str = OF, *, by: str = BY, over: str = NOW, offset: str = "") -> str:
    """The mean of a histogram's observations."""
    return ratio(f"{histogram}_sum", f"{histogram}_count", where, by=by, over=over, offset=offset)


def quantile(q: float, histogram: str, where: str = OF, *, by: str = BY, over: str = NOW, offset: str = "") -> str:
    """A quantile of a histogram's observations."""
    buckets = rate(f"{histogram}_bucket", where, by=f"le, {by}" if by else "le", over=over, offset=offset)
    return f"histogram_quantile({q}, {buckets})"


def quantiles(histogram: str, legend: str, where: str = OF, *, by: str = BY) -> dict[str, str]:
    """P50, P95 and P99, by legend."""
    return {f"P{q * 100:.0f} {legend}": quantile(q, histogram, where, by=by) for q in (0.5, 0.95, 0.99)}


def shift(histogram: str, reference: str) -> str:
    """The largest distance between the shares of observations below each bound, now and then: 0 to 1.

    It is the statistic of Kolmogorov and Smirnov, over the histogram's bounds.
    """

    def shares(offset: str) -> str:
        below = rate(f"{histogram}_bucket", by=f"le, {BY}", over="1h", offset=offset)
        return f"{below} / on ({BY}) group_left () {rate(f'{histogram}_count', over='1h', offset=offset)}"

    return f"max by ({BY}) (abs({shares('')} - {shares(reference)}))"


def _offset(offset: str) -> str:
    return f" offset {offset}" if offset else ""
