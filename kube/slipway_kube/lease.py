"""Who leads: one `coordination.k8s.io` Lease, renewed every 2 s, given up by its holder after 7, free after 10.

The holder fences itself by its own clock: `is_leader()` turns false 7 s after the last renewal was *begun*, three
seconds before anyone else may take over, whether or not this process noticed that something is wrong.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from slipway_kube.client import Client

LEASE_SECONDS: Final = 10
FENCE_SECONDS: Final = 7.0
RETRY_SECONDS: Final = 2.0


class Fence(Protocol):
    """What a writer asks before each write."""

    def is_leader(self) -> bool:
        """May this process write at this very moment?"""
        ...

    def seconds_left(self) -> float:
        """For how long, if no renewal succeeds any more."""
        ...


class Elector:
    """One candidate. `identity` is made unique per process, so that a restarted pod never mistakes itself."""

    def __init__(self, client: Client, *, namespace: str, name: str, identity: str) -> None:
        self.identity = identity
        self.leading = asyncio.Event()
        """Set when the lease is won; cleared when it is lost or given back."""

    def is_leader(self) -> bool:
        """True while this process holds the lease by its own clock: ask before every write."""
        raise NotImplementedError

    def seconds_left(self) -> float:
        """Until `is_leader()` turns false, if no renewal succeeds any more; 0 for a standby."""
        raise NotImplementedError

    async def run(self) -> None:
        """Campaign, then hold. Raises `LeadershipLost` on loss; gives the lease back when cancelled."""
        raise NotImplementedError


_Clock = Callable[[], float]
