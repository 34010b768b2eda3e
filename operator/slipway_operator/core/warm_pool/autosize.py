"""How many pods a WarmPool should keep, from how fast they were asked for.

Little's law: a pool that replaces a used pod in W seconds needs as many pods as are asked for within W. The fastest
pace counts, not the mean, because a pool is there for bursts: the most uses within any `coverSeconds` of the last hour.

    uses at 0 s, 20 s, 100 s, 900 s; coverSeconds 120  ->  3
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from slipway_api.warm_pool import PoolUse, WarmPoolSpec
from slipway_api.words import count

LOOK_BACK: Final = timedelta(hours=1)


class Size(NamedTuple):
    """How many pods should wait for a claim, and why."""

    pods: int
    reason: str
    again_at: datetime | None = None  # when time alone makes it smaller


def wanted_size(spec: WarmPoolSpec, uses: Sequence[PoolUse], now: datetime) -> Size:
    """The number of pods that the spec asks for at this moment."""
    if spec.suspend:
        return Size(0, "spec.suspend is set")
    if spec.autosize is None:
        return Size(spec.size or 0, f"spec.size is {spec.size or 0}")
    auto = spec.autosize
    recent = sorted(use.time for use in uses if now - LOOK_BACK < use.time <= now)
    window = timedelta(seconds=auto.cover_seconds)
    peak = max((sum(start <= moment < start + window for moment in recent) for start in recent), default=0)
    pods = min(max(peak, auto.min), auto.max)
    claims = count(peak, "pod was", "pods were")
    reason = f"at most {claims} requested within {auto.cover_seconds}s in the last hour; {auto.min}…{auto.max}"
    return Size(pods, reason, recent[0] + LOOK_BACK if recent and pods > auto.min else None)
