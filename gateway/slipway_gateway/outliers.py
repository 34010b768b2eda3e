"""Ejects replicas that are alive but much slower than their peers (gray failures). Pure: the caller brings the time.

The latency of a replica is the median of its last streams; it is compared with the median of its peers' medians, which
one slow replica cannot move. Time to first token and time between tokens are compared separately.

| state     | slow: > 3 × the peers' and > the peers' + floor          | a stream finished           | time      |
|-----------|----------------------------------------------------------|-----------------------------|-----------|
| trusted   | at the fifth look: ejected for 10 s, unless too many are | –                           | –         |
| ejected   | –                                                        | late samples are ignored    | probation |
| probation | one request at a time; slow: ejected, for twice as long  | the third fast one: trusted | –         |

Ejection is advice, as in `health`: the picker falls back to ejected replicas when no other is left.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Final


@dataclass(frozen=True, slots=True)
class OutlierPolicy:
    """When a replica counts as slow, and for how long it is left out."""

    ratio: float = 3.0  # to the median of its peers
    ttft_floor_seconds: float = 0.5  # beyond the peers: prompts differ, and a small difference hurts nobody
    itl_floor_seconds: float = 0.03
    min_samples: int = 10  # of a replica, before it is judged or its peers are judged by it
    # In a row, each at least a second after the last: when the load of all jumps, one of them is the first to show it.
    judgements: int = 5
    window_seconds: float = 60.0  # older samples say nothing of now
    max_share: float = 0.34  # of the endpoints with samples; at least one, where there are two
    first_seconds: float = 10.0
    max_seconds: float = 300.0
    fast_probes: int = 3  # until an ejected replica is trusted again


MAX_SAMPLES: Final = 64  # of one kind and replica
SECONDS_BETWEEN_JUDGEMENTS: Final = 1.0  # of one replica: a comparison costs a median of each peer

TTFT: Final = "ttft"
ITL: Final = "itl"


@dataclass(slots=True)
class _Replica:
    """The latencies of one replica and its ejections."""

    samples: dict[str, deque[tuple[float, float]]] = field(
        default_factory=lambda: {TTFT: deque(maxlen=MAX_SAMPLES), ITL: deque(maxlen=MAX_SAMPLES)}
    )
    slow_judgements: int = 0  # in a row
    judged_at: float = float("-inf")
    ejections: int = 0  # in a row
    ejected_until: float = 0.0
    fast_probes: int = 0
    probe_until: float = 0.0  # a probe is on its way; it is given up at this time


class LatencyOutliers:
    """The latencies of the endpoints of one service, and which of these are left out for them."""

    def __init__(self, policy: OutlierPolicy | None = None) -> None:
        self._policy = policy or OutlierPolicy()
        self._replicas: dict[str, _Replica] = {}
        self._suspects: set[str] = set()  # ejected or on probation: the picker looks at no others

    def record(self, endpoint: str, now: float, *, ttft: float | None = None, itl: float | None = None) -> str:
        """Record the latency of a stream. Returns the reason when the endpoint is ejected for it, else ""."""
        replica = self._replicas.setdefault(endpoint, _Replica())
        reason, was_fast = "", True
        is_probe = endpoint in self._suspects and now >= replica.ejected_until
        for kind, seconds in ((TTFT, ttft), (ITL, itl)):
            if seconds is None:
                continue
            if endpoint not in self._suspects:
                replica.samples[kind].append((now, seconds))
            elif is_probe:  # what was sent before the ejection says nothing new
                slow = self._compare(endpoint, kind, seconds, now)
                was_fast = was_fast and not slow
                reason = reason or slow
        if is_probe:
            self._record_probe(endpoint, replica, was_fast, is_whole=itl is not None, now=now)
        elif endpoint not in self._suspects and (reason := self._judge(endpoint, replica, now)):
            self._eject(endpoint, replica, now)
        return reason

    def record_pick(self, endpoint: str, now: float) -> None:
        """A request is sent to the endpoint: on probation no other one is, until its outcome is known."""
        if endpoint in self._suspects:
            replica = self._replicas[endpoint]
            if now >= replica.ejected_until:
                replica.probe_until = now + self._seconds(replica.ejections)

    def ejected(self, now: float) -> list[str]:
        """The endpoints that requests should not go to now."""
        return [name for name in self._suspects if self._is_left_out(self._replicas[name], now)]

    def remove(self, endpoint: str) -> None:
        """The endpoint is gone, or became ready anew."""
        self._replicas.pop(endpoint, None)
        self._suspects.discard(endpoint)

    def _record_probe(self, endpoint: str, replica: _Replica, was_fast: bool, *, is_whole: bool, now: float) -> None:
        if not was_fast:
            self._eject(endpoint, replica, now)
            return
        if not is_whole:
            return  # the first token was in time; the rest of the stream decides
        replica.probe_until = 0.0
        replica.fast_probes += 1
        if replica.fast_probes >= self._policy.fast_probes:
            self._suspects.discard(endpoint)
            self._replicas[endpoint] = _Replica()

    def _eject(self, endpoint: str, replica: _Replica, now: float) -> None:
        replica.ejections += 1
        replica.ejected_until = now + self._seconds(replica.ejections)
        replica.probe_until = 0.0
        replica.fast_probes = 0
        self._suspects.add(endpoint)

    def _judge(self, endpoint: str, replica: _Replica, now: float) -> str:
        """The reason to eject a trusted endpoint, or ""."""
        if now - replica.judged_at < SECONDS_BETWEEN_JUDGEMENTS or not self._may_eject():
            return ""
        replica.judged_at = now
        for kind in (TTFT, ITL):
            value = self._median(replica, kind, now)
            if value is not None and (reason := self._compare(endpoint, kind, value, now)):
                replica.slow_judgements += 1
                return reason if replica.slow_judgements >= self._policy.judgements else ""
        replica.slow_judgements = 0
        return ""

    def _compare(self, endpoint: str, kind: str, value: float, now: float) -> str:
        """The sentence that says how much slower than its peers it is, or "" while it is not, or none can be asked."""
        peers = [
            middle
            for name, replica in self._replicas.items()
            if name != endpoint and name not in self._suspects
            if (middle := self._median(replica, kind, now)) is not None
        ]
        if not peers:
            return ""
        usual = median(peers)
        floor = self._policy.ttft_floor_seconds if kind == TTFT else self._policy.itl_floor_seconds
        limit = max(usual * self._policy.ratio, usual + floor)
        if value <= limit:
            return ""
        peers_text = f"the median of {len(peers)} peers is {usual * 1e3:.0f} ms"
        return f"{kind} {value * 1e3:.0f} ms > {limit * 1e3:.0f} ms; {peers_text}"

    def _may_eject(self) -> bool:
        """Whether one more may be left out: at most a share of the endpoints that have samples, and never all."""
        known = sum(any(replica.samples.values()) or name in self._suspects for name, replica in self._replicas.items())
        allowed = max(1, int(known * self._policy.max_share)) if known >= 2 else 0
        return len(self._suspects) < allowed

    def _median(self, replica: _Replica, kind: str, now: float) -> float | None:
        """The median of the recent samples, or None while there are too few."""
        samples = replica.samples[kind]
        while samples and samples[0][0] < now - self._policy.window_seconds:
            samples.popleft()
        if len(samples) < self._policy.min_samples:
            return None
        return median(seconds for _, seconds in samples)

    def _is_left_out(self, replica: _Replica, now: float) -> bool:
        return now < replica.ejected_until or now < replica.probe_until

    def _seconds(self, ejections: int) -> float:
        policy = self._policy
        return min(policy.first_seconds * 2.0 ** min(ejections - 1, 30), policy.max_seconds)
