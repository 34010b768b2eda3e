"""Indexes LoRAAdapters by base and by name, so that no event walks over all adapters.

It keeps the few facts that the plan of a base needs; an object that cannot be read counts as absent.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from slipway_api.lora_adapter import PlacementMode, source_version
from slipway_api.seniority import older_first
from slipway_api.types import ServiceKey
from slipway_operator.controller.kinds import Key, StoredObject
from slipway_operator.core.adapter.observed import AttachedAdapter


@dataclass(frozen=True, slots=True)
class IndexedAdapter:
    """One adapter as its base and its rivals see it."""

    key: Key
    base: ServiceKey
    created_at: datetime | None
    alias: str
    is_leaving: bool
    facts: AttachedAdapter

    @property
    def seniority(self) -> tuple[datetime, str, str]:
        """The sort key of those that claim one name."""
        return older_first(self.created_at, self.key.namespace, self.key.name)


class AdapterIndex:
    """The adapters of all namespaces."""

    def __init__(self) -> None:
        self._adapters: dict[Key, IndexedAdapter] = {}
        self._of_base: defaultdict[ServiceKey, set[Key]] = defaultdict(set)
        self._named: defaultdict[tuple[str, str], set[Key]] = defaultdict(set)
        self._aliased: defaultdict[tuple[str, str], set[Key]] = defaultdict(set)

    def saw(self, key: Key, new: StoredObject | None) -> tuple[set[Key], set[ServiceKey]]:
        """Apply one change; returns the other adapters and the bases that it concerns."""
        before = self._adapters.pop(key, None)
        after = indexed(key, new) if new is not None else None
        if before is not None:
            self._remove(before)
        if after is not None:
            self._adapters[key] = after
            self._of_base[after.base].add(key)
            self._named[key.namespace, after.facts.name].add(key)
            self._aliased[key.namespace, after.alias].add(key)
        if before == after:
            return set(), set()
        changed = [one for one in (before, after) if one is not None]
        rivals = {rival for one in changed for rival in self._claimants(one)}
        return rivals - {key}, {one.base for one in changed}

    def _remove(self, one: IndexedAdapter) -> None:
        namespace = one.key.namespace
        for index, place in (
            (self._of_base, one.base),
            (self._named, (namespace, one.facts.name)),
            (self._aliased, (namespace, one.alias)),
        ):
            known: dict[Any, set[Key]] = cast("dict[Any, set[Key]]", index)
            known[place].discard(one.key)
            if not known[place]:
                del known[place]

    def _claimants(self, one: IndexedAdapter) -> set[Key]:
        """The adapters that claim a name of this one; several may share an alias."""
        namespace, name = one.key.namespace, one.facts.name
        found = self._named.get((namespace, name), set()) | self._aliased.get((namespace, name), set())
        return found | (self._named.get((namespace, one.alias), set()) if one.alias else set())

    def named(self, namespace: str, name: str) -> set[Key]:
        """The adapters of a namespace that have this name or alias."""
        return self._named.get((namespace, name), set()) | self._aliased.get((namespace, name), set())

    def keys_of(self, base: ServiceKey) -> set[Key]:
        """The adapters of one base."""
        return set(self._of_base.get(base, ()))

    def key_of(self, base: ServiceKey, name: str) -> set[Key]:
        """The adapters of one base that have this model name."""
        return self._named.get((base.namespace, name), set()) & self._of_base.get(base, set())

    def of(self, base: ServiceKey) -> tuple[AttachedAdapter, ...]:
        """The facts of the adapters of one base, by name; without those that are being deleted."""
        found = [self._adapters[key] for key in self._of_base.get(base, ())]
        return tuple(sorted((one.facts for one in found if not one.is_leaving), key=lambda one: one.name))

    def older_rival(self, key: Key) -> IndexedAdapter | None:
        """The oldest other adapter of the namespace with the same name, if it is older than this one."""
        own = self._adapters.get(key)
        if own is None:
            return None
        claimants = [self._adapters[one] for one in self._claimants(own)]
        oldest = min(claimants, key=lambda one: one.seniority, default=own)
        return None if oldest.seniority >= own.seniority else oldest


def indexed(key: Key, stored: StoredObject) -> IndexedAdapter | None:
    """The facts of a stored adapter; None where its spec cannot be read."""
    spec: dict[str, Any] = stored.body.get("spec") or {}
    status: dict[str, Any] = stored.body.get("status") or {}
    try:
        source, placement = spec["source"], spec.get("placement") or {}
        facts = AttachedAdapter(
            name=str(spec.get("adapterName") or key.name),
            uri=str(source["uri"]),
            digest=str(source.get("digest") or ""),
            version=source_version(str(source["uri"]), str(source.get("digest") or "")),
            pinned=bool(placement.get("pin")),
            priority=int(placement.get("priority") or 0),
            mode=PlacementMode(placement.get("mode") or PlacementMode.ALL),
            has_credentials=bool(source.get("credentialsSecretRef")),
            is_ready=_condition(status, "Ready").get("status") == "True",
            is_refused=_condition(status, "Stalled").get("reason") == "NameConflict",
        )
        base = ServiceKey(key.namespace, str(spec["baseRef"]["name"]))
        alias = str((spec.get("alias") or {}).get("name") or "")
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    is_leaving = bool(stored.body["metadata"].get("deletionTimestamp"))
    return IndexedAdapter(key, base, stored.created_at, alias, is_leaving, facts)


def _condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return next((one for one in status.get("conditions") or () if one.get("type") == kind), {})
