"""What we wrote and the cache has not shown yet, so that a quick second reconcile does not write it again.

Pure bookkeeping: the caller brings the time. Creates are known by name, deletes by uid; both are forgotten when the
informer shows them, or after five minutes. A write of unknown outcome is waited for only shortly: the next try finds
out, because names are deterministic and deletes name a uid.
"""

from dataclasses import dataclass
from typing import Final

from slipway_kube.cache import Change
from slipway_kube.objects import Key, Object

FORGET_AFTER_SECONDS: Final = 300.0
UNSURE_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Pending:
    """What one owner still waits to see."""

    creates: frozenset[str] = frozenset()  # names
    deletes: frozenset[str] = frozenset()  # uids

    def __bool__(self) -> bool:
        return bool(self.creates or self.deletes)


@dataclass(frozen=True, slots=True)
class _Expected:
    owner: Key
    until: float


class Expectations:
    """Pending creates and deletes by owner (the key of a service); the objects live in the owner's namespace."""

    def __init__(self) -> None:
        self._creates: dict[Key, _Expected] = {}
        self._deletes: dict[str, _Expected] = {}

    def expect_create(self, owner: Key, name: str, *, now: float, unsure: bool = False) -> None:
        """An object of this name is about to be created (or, `unsure`, may have been)."""
        self._creates[owner[0], name] = _Expected(owner, now + (UNSURE_SECONDS if unsure else FORGET_AFTER_SECONDS))

    def expect_delete(self, owner: Key, uid: str, *, now: float, unsure: bool = False) -> None:
        """The object of this uid is about to be deleted (or, `unsure`, may have been)."""
        self._deletes[uid] = _Expected(owner, now + (UNSURE_SECONDS if unsure else FORGET_AFTER_SECONDS))

    def retract_create(self, owner: Key, name: str) -> None:
        """The server refused: nothing will come."""
        self._creates.pop((owner[0], name), None)

    def retract_delete(self, uid: str) -> None:
        """The server refused: it stays."""
        self._deletes.pop(uid, None)

    def saw(self, change: Change, old: Object | None, new: Object | None) -> None:
        """What an informer tells; fits `Informer.on_change`."""
        if change is Change.DELETED and old is not None:
            self._deletes.pop(old.uid, None)
        if new is not None:
            self._creates.pop(new.key, None)
            if new.is_terminating:
                self._deletes.pop(new.uid, None)

    def pending(self, owner: Key, *, now: float) -> Pending:
        """What this owner still waits for; falsy when the cache shows everything we did."""
        self._creates = {key: expected for key, expected in self._creates.items() if expected.until > now}
        self._deletes = {uid: expected for uid, expected in self._deletes.items() if expected.until > now}
        return Pending(
            creates=frozenset(name for (_, name), expected in self._creates.items() if expected.owner == owner),
            deletes=frozenset(uid for uid, expected in self._deletes.items() if expected.owner == owner),
        )
