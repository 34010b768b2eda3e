"""Indexes LoRAAdapters by base and by name, so that no event walks over all adapters.

It keeps the few facts that the plan of a base needs; an object that cannot be read counts as absent.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from slipway_api.lora_adapter import PlacementMode, source_version
from slipway_api.model_names import AdapterNames
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


class AdapterIndex:
    """The adapters of all namespaces."""

    def __init__(self) -> None:
        self._adapters: dict[Key, IndexedAdapter] = {}
        self._of_base: defaultdict[ServiceKey, set[Key]] = defaultdict(set)
        self._named: defaultdict[tuple[str, str], set[Key]] = defaultdict(set)

    def saw(self, key: Key, new: StoredObject | None) -> set[ServiceKey]:
        """Apply one change; returns the bases that it concerns."""
        before = self._adapters.pop(key, None)
        after = indexed(key, new) if new is not None else None
        if before is not None:
            self._remove(before)
        if after is not None:
            self._adapters[key] = after
            self._of_base[after.base].add(key)
            self._named[key.namespace, after.facts.name].add(key)
        if before == after:
            return set()
        return {one.base for one in (before, after) if one is not None}

    def _remove(self, one: IndexedAdapter) -> None:
        namespace = one.key.namespace
        for index, place in (
            (self._of_base, one.base),
            (self._named, (namespace, one.facts.name)),
        ):
            known: dict[Any, set[Key]] = cast("dict[Any, set[Key]]", index)
            known[place].discard(one.key)
            if not known[place]:
                del known[place]

    def names(self, key: Key) -> AdapterNames | None:
        """The names that an adapter claims; None for one that is being deleted or cannot be read."""
        one = self._adapters.get(key)
        if one is None or one.is_leaving:
            return None
        return AdapterNames(one.facts.name, f"{one.base.namespace}/{one.base.name}", one.alias, one.created_at)

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
