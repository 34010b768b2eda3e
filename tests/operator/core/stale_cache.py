"""A cache of pods that is behind by some seconds, for each pod by others, so that changes arrive reordered."""

import zlib
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta

from slipway_operator.core.observed import Replica

IsSeen = Callable[[Replica | None], bool]


class StaleCache:
    """What an informer shows, and what the operator still waits to see in it."""

    def __init__(self) -> None:
        self.lag = 0
        self._shown: dict[str, Replica] = {}
        self._on_the_way: list[tuple[datetime, str, Replica | None]] = []
        self._expected: dict[str, tuple[IsSeen, datetime]] = {}

    def set_lag(self, seconds: int, actual: Mapping[str, Replica]) -> None:
        """From now on changes take up to so many seconds to arrive."""
        if not self.lag:
            self._shown = dict(actual)
        self.lag = seconds

    def view(self, actual: Mapping[str, Replica], now: datetime) -> dict[str, Replica]:
        """What the cache shows now; each change since the last look is on its way."""
        if not self.lag:
            self._shown, self._on_the_way = dict(actual), []
            return dict(actual)
        last: dict[str, Replica | None] = dict(self._shown)
        last |= {name: replica for _, name, replica in self._on_the_way}
        for name in {*last, *actual}:
            if last.get(name) != actual.get(name):
                lag = self.lag * (zlib.crc32(name.encode()) % 4) // 3
                self._on_the_way.append((now + timedelta(seconds=lag), name, actual.get(name)))
        for _, name, replica in [one for one in self._on_the_way if one[0] <= now]:
            if replica is None:
                self._shown.pop(name, None)
            else:
                self._shown[name] = replica
        self._on_the_way = [one for one in self._on_the_way if one[0] > now]
        return dict(self._shown)

    def moments(self) -> list[datetime]:
        """When something arrives, or is not waited for any more."""
        return [*(moment for moment, _, _ in self._on_the_way), *(until for _, until in self._expected.values())]

    def expect(self, name: str, now: datetime, is_seen: IsSeen) -> None:
        """A write to this pod has been answered."""
        if self.lag:
            self._expected[name] = is_seen, now + timedelta(seconds=2 * self.lag)

    def is_waited_for(self, actual: Mapping[str, Replica], now: datetime) -> bool:
        """Whether a write does not show yet: as in the shell, nothing is decided before it does."""
        shown = self.view(actual, now)
        self._expected = {
            name: (is_seen, until)
            for name, (is_seen, until) in self._expected.items()
            if now < until and not is_seen(shown.get(name))
        }
        return bool(self._expected)
