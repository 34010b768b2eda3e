"""Records the writes of this process that its caches do not show yet, so that no reconcile acts on a stale cache.

Pure bookkeeping: the caller brings the time. Creates are known by name, deletes and label changes by uid; all are
forgotten when the informer shows them, or after five minutes. A write of unknown outcome is waited for only shortly:
the next try finds out, because names are deterministic and everything else names a uid.
"""

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from slipway_kube.cache import Change
from slipway_kube.objects import Object

FORGET_AFTER_SECONDS: Final = 300.0
UNSURE_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Pending:
    """The writes for one owner that the caches do not show yet."""

    creates: frozenset[str] = frozenset()  # names
    deletes: frozenset[str] = frozenset()  # uids
    labels: frozenset[str] = frozenset()  # uids

    def __bool__(self) -> bool:
        return bool(self.creates or self.deletes or self.labels)


@dataclass(frozen=True, slots=True)
class _Created:
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class _Deleted:
    uid: str


@dataclass(frozen=True, slots=True)
class _Labelled:
    uid: str


_Write = _Created | _Deleted | _Labelled


class Expectations:
    """Pending creates, deletes and label changes by owner, which may be any key."""

    def __init__(self) -> None:
        self._until: defaultdict[Hashable, dict[_Write, float]] = defaultdict(dict)
        self._owners: dict[_Write, Hashable] = {}
        self._labels: dict[str, tuple[str, str | None]] = {}

    def expect_create(self, owner: Hashable, namespace: str, name: str, *, now: float, unsure: bool = False) -> None:
        """An object of this name is about to be created (or, `unsure`, may have been)."""
        self._expect(owner, _Created(namespace, name), now, unsure)

    def expect_delete(self, owner: Hashable, uid: str, *, now: float, unsure: bool = False) -> None:
        """The object of this uid is about to be deleted (or, `unsure`, may have been)."""
        self._expect(owner, _Deleted(uid), now, unsure)

    def expect_label(
        self, owner: Hashable, uid: str, label: str, value: str | None, *, now: float, unsure: bool = False
    ) -> None:
        """The object of this uid is about to get this label (or, `unsure`, may have got it)."""
        self._labels[uid] = (label, value)
        self._expect(owner, _Labelled(uid), now, unsure)

    def retract_create(self, namespace: str, name: str) -> None:
        """Drop the expectation: the server refused the create."""
        self._fulfil(_Created(namespace, name))

    def retract_delete(self, uid: str) -> None:
        """Drop the expectation: the server refused the delete."""
        self._fulfil(_Deleted(uid))

    def retract_label(self, uid: str) -> None:
        """Drop the expectation: the server refused the label."""
        self._fulfil(_Labelled(uid))

    def saw(self, change: Change, old: Object | None, new: Object | None) -> None:
        """Drop the expectations that a change of an informer fulfils; a callback for `Informer.on_change`."""
        if change is Change.DELETED and old is not None:
            self._fulfil(_Deleted(old.uid))
            self._fulfil(_Labelled(old.uid))
        if new is not None:
            self._fulfil(_Created(*new.key))
            if new.is_terminating:
                self._fulfil(_Deleted(new.uid))
            label, value = self._labels.get(new.uid, ("", ""))
            if label and new.labels.get(label) == value:
                self._fulfil(_Labelled(new.uid))

    def pending(self, owner: Hashable, *, now: float) -> Pending:
        """The writes for this owner that the caches do not show yet; falsy when there are none."""
        for write in [write for write, until in self._until.get(owner, {}).items() if until <= now]:
            self._fulfil(write)
        writes = self._until.get(owner, {})
        return Pending(
            creates=frozenset(write.name for write in writes if isinstance(write, _Created)),
            deletes=frozenset(write.uid for write in writes if isinstance(write, _Deleted)),
            labels=frozenset(write.uid for write in writes if isinstance(write, _Labelled)),
        )

    def _expect(self, owner: Hashable, write: _Write, now: float, unsure: bool) -> None:
        self._until[owner][write] = now + (UNSURE_SECONDS if unsure else FORGET_AFTER_SECONDS)
        self._owners[write] = owner

    def _fulfil(self, write: _Write) -> None:
        if isinstance(write, _Labelled):
            self._labels.pop(write.uid, None)
        owner = self._owners.pop(write, None)
        if owner is None:
            return
        writes = self._until[owner]
        del writes[write]
        if not writes:
            del self._until[owner]
