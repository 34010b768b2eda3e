"""The clocks of the process: time of day, monotonic time, and one that counts suspension; tests set their own."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from slipway_kube.lease import suspend_aware_clock


def utc_now() -> datetime:
    """The current time of day in UTC."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The clocks of one process."""

    now: Callable[[], datetime] = utc_now
    """Time of day, for what is stored in Kubernetes objects."""
    monotonic: Callable[[], float] = time.monotonic
    """Monotonic seconds, for durations within this process."""
    lease: Callable[[], float] = suspend_aware_clock
    """Monotonic seconds for the Lease: they also count while the machine is suspended."""


SYSTEM = Clock()
