"""Divides memory and connections fairly between services, so that none can exhaust them. Pure counting.

Dynamic thresholds, as switches share packet buffers (Choudhury and Hahne, 1998): an owner may hold at most as much as
is free. One greedy owner gets half, two get a third each, n leave 1/(n+1) for the next one; nothing is reserved in
advance and nothing must be configured for each service.
"""

from collections.abc import Hashable


class SharedCapacity:
    """A capacity of which owners take and release parts."""

    def __init__(self, capacity: int) -> None:
        self._free = capacity
        self._held: dict[Hashable, int] = {}

    @property
    def free(self) -> int:
        """The part that no owner holds."""
        return self._free

    def held_by(self, owner: Hashable) -> int:
        """The amount that this owner holds now."""
        return self._held.get(owner, 0)

    def take(self, owner: Hashable, amount: int) -> bool:
        """Take `amount` for `owner`, unless it would then hold more than is left for all others."""
        held = self.held_by(owner) + amount
        if held > self._free - amount:
            return False
        self._free -= amount
        self._held[owner] = held
        return True

    def give_back(self, owner: Hashable, amount: int) -> None:
        """Return what was taken."""
        self._free += amount
        left = self._held[owner] - amount
        assert left >= 0, "more was given back than was taken"
        if left:
            self._held[owner] = left
        else:
            del self._held[owner]
