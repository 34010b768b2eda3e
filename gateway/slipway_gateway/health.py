"""The health of replicas and the limits of retries: circuit breaker, ejection and retry budget.

Pure state machines: the caller brings the time. All state belongs to one destination service, so that an overloaded or
broken service spends nothing of another's.

| state     | failure                              | unreachable     | success | told to stay away | time      |
|-----------|--------------------------------------|-----------------|---------|-------------------|-----------|
| trusted   | trusted; the third in a row: ejected | ejected         | trusted | ejected           | –         |
| ejected   | ejected: part of one incident        | ejected         | trusted | the longer counts | probation |
| probation | ejected for twice as long            | ejected, twice  | trusted | ejected           | –         |

On probation one request at a time tries the replica (`after_probe`). Ejection is advice: `pick` falls back to ejected
replicas when no other is left.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """After how many failures in a row a replica is ejected, and for how long at first and at most."""

    failures: int = 3
    first_seconds: float = 1.0
    max_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class Health:
    """The recent failures of one replica."""

    failures: int = 0  # in a row
    ejections: int = 0  # in a row, without a success between
    ejected_until: float = 0.0

    def is_ejected(self, now: float) -> bool:
        """Whether requests should go to other replicas now."""
        return now < self.ejected_until


TRUSTED: Final = Health()


def after_failure(health: Health, now: float, policy: BreakerPolicy) -> Health:
    """One more failure: the third in a row ejects; on probation the first one does, for twice as long as before.

    1 s, 2 s, 4 s, … 30 s: a replica that restarts is back soon, one that is broken costs ever fewer tries.
    """
    failures = health.failures + 1
    if failures < policy.failures and health.ejections == 0:
        return replace(health, failures=failures)
    # Many requests can fail together when a replica dies: they are one ejection, not thirty doublings.
    if health.is_ejected(now):
        return replace(health, failures=failures)
    return Health(failures, health.ejections + 1, now + _ejection_seconds(health.ejections, policy))


def after_unreachable(health: Health, now: float, policy: BreakerPolicy) -> Health:
    """No connection could be made: ejected at once, since each further try costs a whole connect timeout."""
    return after_failure(replace(health, failures=max(health.failures, policy.failures - 1)), now, policy)


def after_probe(health: Health, now: float, policy: BreakerPolicy) -> Health:
    """A request was sent to a replica on probation: the next one waits for its outcome, or as long as the ejection."""
    if health.ejections == 0 or health.is_ejected(now):
        return health
    return replace(health, ejected_until=now + _ejection_seconds(health.ejections - 1, policy))


def after_unavailable(health: Health, now: float, seconds: float) -> Health:
    """The replica answered 503, because it drains or loads: no failure, but a retry so soon would be in vain."""
    return replace(health, ejected_until=max(health.ejected_until, now + seconds))


def _ejection_seconds(earlier_ejections: int, policy: BreakerPolicy) -> float:
    return min(policy.first_seconds * 2.0 ** min(earlier_ejections, 30), policy.max_seconds)


class AttemptFailure(Enum):
    """Why an attempt failed before anything of it was forwarded."""

    UNREACHABLE = "unreachable"  # no connection: the request never arrived
    LOST = "lost"  # the connection broke after the request was sent
    SILENT = "silent"  # a stream without a first byte for too long
    MOVED = "moved"  # the replica left the routing table before its first byte
    SHED = "shed"  # 429: that replica is full
    UNAVAILABLE = "unavailable"  # 503: that replica is draining or loading
    ENGINE_DEAD = "engine_dead"  # 500 or 503, and the runtime says that its engine has died
    INTERRUPTED = "interrupted"  # 503: the replica had begun and could not finish
    WRONG_REVISION = "wrong_revision"  # the answer is of another revision than the pod's label says

    @property
    def may_be_the_requests_fault(self) -> bool:
        """Whether the request itself may have caused the failure, so that few replicas may be exposed to it."""
        return self in _POSSIBLY_CAUSED_BY_REQUEST


_POSSIBLY_CAUSED_BY_REQUEST: Final = frozenset(
    {
        AttemptFailure.LOST,
        AttemptFailure.SILENT,
        AttemptFailure.MOVED,
        AttemptFailure.ENGINE_DEAD,
        AttemptFailure.INTERRUPTED,
    }
)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often one request may be tried in all."""

    tries: int = 3
    # Tries that never arrived cost a connect timeout each, and eject their replica for all requests.
    unreachable_tries: int = 8
    # The request itself may have crashed the replica: it is retried on one more replica, not on the whole fleet.
    retries_of_suspects: int = 1

    def allows(self, failures: Sequence[AttemptFailure]) -> bool:
        """Whether a request with these failures so far may be tried once more."""
        unreachable = failures.count(AttemptFailure.UNREACHABLE)
        suspects = sum(failure.may_be_the_requests_fault for failure in failures)
        return (
            len(failures) - unreachable < self.tries
            and unreachable < self.unreachable_tries
            and suspects <= self.retries_of_suspects
        )


class RetryBudget:
    """Retries as a share of one service's requests, so that a struggling service is not also hit by its own retries.

    A token bucket filled by requests instead of time: every request brings `ratio` of a retry, at most
    `burst` are saved. With 0.2, a hundred requests pay for twenty retries.
    """

    def __init__(self, *, ratio: float = 0.2, burst: float = 20.0) -> None:
        self._ratio = ratio
        self._burst = burst
        self._saved = burst

    def add_request(self) -> None:
        """A request came in."""
        self._saved = min(self._burst, self._saved + self._ratio)

    def spend(self) -> bool:
        """Take one retry from the budget, if there is one."""
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True
