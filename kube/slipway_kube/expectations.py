"""What we wrote and the cache has not shown yet, so that a quick second reconcile does not write it again.

Pure bookkeeping: the caller brings the time. Creates are known by name, deletes by uid; both are forgotten when the
informer shows them, or after five minutes.
"""

from dataclasses import dataclass
from typing import Final

from slipway_kube.informer import Change
from slipway_kube.objects import Key, Object

FORGET_AFTER_SECONDS: Final = 300.0


@dataclass(frozen=True, slots=True)
class Pending:
    """What one owner still waits to see."""

    creates: frozenset[str]  # names
    deletes: frozenset[str]  # uids

    def __bool__(self) -> bool:
        return bool(self.creates or self.deletes)


class Expectations:
    """Pending creates and deletes by owner (the key of a service)."""

    def expect_create(self, owner: Key, name: str, *, now: float) -> None:
        """An object of this name in the owner's namespace is about to be created."""
        raise NotImplementedError

    def expect_delete(self, owner: Key, uid: str, *, now: float) -> None:
        """The object of this uid is about to be deleted."""
        raise NotImplementedError

    def saw(self, change: Change, old: Object | None, new: Object | None) -> None:
        """What an informer tells; fits `Informer.on_change`."""
        raise NotImplementedError

    def pending(self, owner: Key, *, now: float) -> Pending:
        """What this owner still waits for; falsy when the cache shows everything we did."""
        raise NotImplementedError
