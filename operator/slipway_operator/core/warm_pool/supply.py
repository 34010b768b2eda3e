"""What a service sees of the WarmPool that it names: the pods that wait for a claim."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from slipway_api.runtime_api import ReadyReason
from slipway_api.warm_pool import WarmPool

# No model, or its model with no name: what the process says while a claim can have it.
CLAIMABLE: Final = (ReadyReason.NO_MODEL, ReadyReason.STANDBY)
# Asked every 15 s while it waits: a pod that missed three answers may be hung.
SILENT_AFTER: Final = timedelta(seconds=60)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmPod:
    """The facts of one pod that waits for a claim."""

    name: str
    uid: str
    shape: str = ""  # annotation slipway.dev/warm-shape
    starting: str = ""  # of its newest sample
    sampled_at: datetime | None = None
    on_bad_node: bool = False  # cordoned, or not ready
    is_over: bool = False  # ended, or being deleted

    def can_be_claimed(self, now: datetime) -> bool:
        """Whether it has started as far as its level says, waits for a claim, and answers."""
        answers = self.sampled_at is not None and now - self.sampled_at <= SILENT_AFTER
        is_booted = answers and self.starting in CLAIMABLE
        return is_booted and not self.on_bad_node and not self.is_over


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmSupply:
    """The pool that a service names."""

    pool: str
    pool_uid: str = ""  # empty: there is no such WarmPool
    pods: tuple[WarmPod, ...] = ()
    resource: WarmPool | None = None  # None: there is none, it is being deleted, or it cannot be read
