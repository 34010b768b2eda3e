"""Reconciles every object once a period, each at its own time, to correct changes that no watch event reported.

A resync compares and seldom writes, yet a thousand objects at once would queue before everything else. So each key
has its own time, the same in every period, and is queued with the lowest urgency.
"""

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable, Iterable

import structlog

from slipway_kube.errors import KubeError
from slipway_operator.controller.kinds import Key

log = structlog.get_logger()


class Resync:
    """Queues all keys once a period, then checks the caches against lists."""

    def __init__(
        self,
        known: Callable[[], Iterable[Key]],
        resync: Callable[[Key], None],
        check: Callable[[], Awaitable[None]],
        *,
        period_seconds: tuple[float, float],
    ) -> None:
        """`period_seconds` are the shortest and the longest period: replicas shall not list in step."""
        self._known = known
        self._resync = resync
        self._check = check
        self._period_seconds = period_seconds

    async def run(self) -> None:
        """Resync until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            started, period = loop.time(), random.uniform(*self._period_seconds)  # noqa: S311  jitter
            for moment, key in sorted((_phase(key) * period, key) for key in self._known()):
                await asyncio.sleep(started + moment - loop.time())
                self._resync(key)
            await asyncio.sleep(started + period - loop.time())
            try:
                await self._check()
            except KubeError as exc:
                log.warning("resync failed", error=str(exc))


def _phase(key: Key) -> float:
    """The time of this key within the period, in [0, 1)."""
    return int.from_bytes(hashlib.sha256("/".join(key).encode()).digest()[:4]) / 2**32
