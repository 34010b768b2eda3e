"""Where time comes from: three clocks for three questions, so that tests can bring their own."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from slipway_kube.lease import suspend_aware_clock


def utc_now() -> datetime:
    """The time of day, as it is written down."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The clocks of one process."""

    now: Callable[[], datetime] = utc_now
    """For what is written down and read by others."""
    monotonic: Callable[[], float] = time.monotonic
    """For what is only measured here."""
    lease: Callable[[], float] = suspend_aware_clock
    """For the Lease: it also counts while the machine sleeps."""


SYSTEM = Clock()
