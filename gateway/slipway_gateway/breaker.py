"""When to stop trusting a replica, and for how long. A pure state machine: the caller brings the time.

| state    | failure                                   | success | asked to stay away      | time passes         |
|----------|-------------------------------------------|---------|-------------------------|---------------------|
| trusted  | trusted, or ejected on the third in a row | trusted | ejected for that long   | –                   |
| ejected  | ejected for twice as long                 | trusted | ejected for the longer  | on probation        |
| probation| ejected for twice as long                 | trusted | ejected for that long   | –                   |

Ejection is advice: `pick` falls back to ejected replicas when nobody else is left.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """After how many failures in a row a replica is left out, and for how long at first and at most."""

    failures: int = 3
    first_seconds: float = 1.0
    most_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class Health:
    """What we remember of one replica."""

    failures: int = 0  # in a row
    ejections: int = 0  # in a row, without a success between
    ejected_until: float = 0.0

    def is_ejected(self, now: float) -> bool:
        """Whether requests should go elsewhere now."""
        return now < self.ejected_until


TRUSTED: Final = Health()


def after_failure(health: Health, now: float, policy: BreakerPolicy) -> Health:
    """One more failure: the third in a row ejects; on probation the first one does, for twice as long as before.

    1 s, 2 s, 4 s, … 30 s: a replica that restarts is back soon, one that is broken costs ever fewer tries.
    """
    failures = health.failures + 1
    if failures < policy.failures and health.ejections == 0:
        return Health(failures=failures)
    # Many requests can fail together when a replica dies: they are one ejection, not thirty doublings.
    if health.is_ejected(now):
        return Health(failures, health.ejections, health.ejected_until)
    seconds = min(policy.first_seconds * 2**health.ejections, policy.most_seconds)
    return Health(failures, health.ejections + 1, now + seconds)


def after_success(health: Health) -> Health:
    """It answered: trust is restored at once, since a wrong ejection is retried cheaply before the first byte."""
    return TRUSTED


def asked_to_stay_away(health: Health, now: float, seconds: float) -> Health:
    """It said 503 itself, so it is draining or loading: not its failure, but pointless to ask again so soon."""
    return Health(health.failures, health.ejections, max(health.ejected_until, now + seconds))
