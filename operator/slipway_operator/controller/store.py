"""The store of custom resources: kopf's watch events fill it, and paged lists correct it.

kopf reports no deletion that happened while its watch was broken, so a list has to find those objects. Events and
lists race with each other and with the replies to our own writes:

| source                  | known, newer      | known, older | unknown                                              |
|-------------------------|-------------------|--------------|------------------------------------------------------|
| watch (`put`)           | taken             | ignored      | taken, unless a list was newer                       |
| our own reply (`update`)| taken             | ignored      | ignored: it was deleted while the reply travelled    |
| list (`correct`)        | taken             | ignored      | taken, unless a deletion was newer than the list     |
| list older than another | everything in it is taken: etcd was restored, and its versions began anew            |
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from slipway_operator.controller.kinds import Key, StoredObject, key_of

OnChange = Callable[[Key, StoredObject | None, StoredObject | None], None]


class ObjectStore:
    """The newest known version of every object of one kind that this operator watches."""

    def __init__(self, kind: str, on_change: OnChange = lambda _key, _old, _new: None) -> None:
        """Calls `on_change(key, old, new)` after each change."""
        self._kind = kind
        self._on_change = on_change
        self._objects: dict[Key, StoredObject] = {}
        self._listed = 0  # version of the newest list applied
        self._deleted = 0  # version of the newest deletion event

    def __len__(self) -> int:
        return len(self._objects)

    def keys(self) -> list[Key]:
        """The keys of all stored objects."""
        return list(self._objects)

    def bodies(self, namespace: str) -> list[Mapping[str, Any]]:
        """The stored objects of one namespace, or of all ("")."""
        return [stored.body for key, stored in self._objects.items() if namespace in ("", key.namespace)]

    def get(self, key: Key) -> StoredObject | None:
        """The newest version of one object."""
        return self._objects.get(key)

    def put(self, body: Mapping[str, Any]) -> bool:
        """Store an object of an ADDED or MODIFIED event; False when the stored one is as new."""
        # Unknown and older than the last list: it was deleted before that list, and this event is late. kopf delivers
        # the events of one object in order, so none other can follow its deletion.
        return self._take(body, newer_than=self._listed)

    def update(self, body: Mapping[str, Any]) -> bool:
        """Store the reply to a write of ours; False when the object is deleted or newer by now."""
        known = self._objects.get(key_of(self._kind, body))
        return known is not None and known.uid == body["metadata"]["uid"] and self._take(body, newer_than=0)

    def remove(self, body: Mapping[str, Any]) -> bool:
        """Remove an object by its uid; a new object under the same name stays."""
        self._deleted = max(self._deleted, _version(body))
        key = key_of(self._kind, body)
        known = self._objects.get(key)
        if known is None or known.uid != body["metadata"]["uid"]:
            return False
        self._set(key, None)
        return True

    def drifted(self, listing: Iterable[Mapping[str, Any]], version: int) -> set[Key]:
        """Where this store is behind a list made at `version`: objects it lacks, has old, or should not have."""
        is_restored = self._is_restored(version)
        listed = {key_of(self._kind, body): body for body in listing}
        behind = set()
        for key, body in listed.items():
            known = self._objects.get(key)
            if known is None:
                if is_restored or max(version, _version(body)) > self._deleted:
                    behind.add(key)
            elif is_restored:
                if (known.uid, known.version) != (body["metadata"]["uid"], _version(body)):
                    behind.add(key)
            elif known.version < _version(body):
                behind.add(key)
        for key, known in self._objects.items():
            is_listed = key in listed and listed[key]["metadata"]["uid"] == known.uid
            # Stored, but not in a newer list: it was deleted. One created after the list was made stays.
            if not is_listed and (is_restored or known.version <= version):
                behind.add(key)
        return behind

    def correct(self, listing: Iterable[Mapping[str, Any]], version: int) -> set[Key]:
        """Make this store at least as new as a list made at `version`; returns the keys that changed."""
        listed = {key_of(self._kind, body): body for body in listing}
        changed = self.drifted(listed.values(), version)
        if self._is_restored(version):
            self._listed = self._deleted = 0
        for key in sorted(changed, key=lambda key: (key in listed, key)):  # deletions first
            body = listed.get(key)
            self._set(key, None if body is None else self._stored(body))
        self._listed = max(self._listed, version)
        return changed

    def _is_restored(self, version: int) -> bool:
        """Whether etcd was restored from a backup: only then is a new list older than an earlier one."""
        return version < self._listed

    def _take(self, body: Mapping[str, Any], *, newer_than: int) -> bool:
        key = key_of(self._kind, body)
        known = self._objects.get(key)
        if _version(body) <= (newer_than if known is None else known.version):
            return False
        self._set(key, self._stored(body))
        return True

    def _stored(self, body: Mapping[str, Any]) -> StoredObject:
        return StoredObject(body["metadata"]["uid"], _version(body), body)

    def _set(self, key: Key, new: StoredObject | None) -> None:
        old = self._objects.get(key)
        if new is None:
            self._objects.pop(key, None)
        else:
            self._objects[key] = new
        self._on_change(key, old, new)


def _version(body: Mapping[str, Any]) -> int:
    """resourceVersions of one kind are comparable integers (guaranteed since Kubernetes 1.35, true for etcd before)."""
    return int(body["metadata"]["resourceVersion"])
