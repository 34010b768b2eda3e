"""Our InferenceServices as last seen: kopf's watch feeds this store, a periodic paged list corrects it.

kopf never tells of objects deleted while its watch was broken, so the list is what finds such ghosts. Both sources
race: what is newer wins by resourceVersion, and a uid that was deleted never comes back. Whoever comes, goes or takes
another served name wakes the others of that name: which of them is routed to may have changed.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from slipway_api.types import ServiceKey

REMEMBERED_DELETIONS = 10_000


def key_of(body: Mapping[str, Any]) -> ServiceKey:
    """The key of an object from the wire."""
    return ServiceKey(body["metadata"]["namespace"], body["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class StoredService:
    """One InferenceService as it came, and how new it is."""

    uid: str
    version: int
    body: Mapping[str, Any]

    @property
    def served_name(self) -> str:
        """What clients shall say as `model`; also where the spec cannot be read."""
        spec = self.body.get("spec")
        model = spec.get("model") if isinstance(spec, Mapping) else None
        name = model.get("servedName") if isinstance(model, Mapping) else None
        return name if name and isinstance(name, str) else str(self.body["metadata"]["name"])

    @property
    def created_at(self) -> datetime | None:
        """When the API server took it in."""
        text = self.body["metadata"].get("creationTimestamp")
        return datetime.fromisoformat(text) if text else None


class ServiceStore:
    """The newest known version of every InferenceService that this operator watches."""

    def __init__(self, on_contest: Callable[[ServiceKey], None] = lambda _: None) -> None:
        """`on_contest` hears of each service whose claim to its name may be another because of somebody else."""
        self._on_contest = on_contest
        self._services: dict[ServiceKey, StoredService] = {}
        self._claims: defaultdict[str, set[ServiceKey]] = defaultdict(set)  # by served name: one gateway serves all
        self._deleted: OrderedDict[str, None] = OrderedDict()  # uids
        self._listed = 0  # version of the newest list taken in

    def __len__(self) -> int:
        return len(self._services)

    def keys(self) -> list[ServiceKey]:
        """Every service known."""
        return list(self._services)

    def get(self, key: ServiceKey) -> StoredService | None:
        """The newest version of one service."""
        return self._services.get(key)

    def namesakes(self, key: ServiceKey) -> list[StoredService]:
        """The other services, of any namespace, that shall be served under the same name."""
        stored = self._services.get(key)
        claims = self._claims.get(stored.served_name, set()) if stored is not None else set()
        return [self._services[other] for other in sorted(claims) if other != key]

    def put(self, body: Mapping[str, Any]) -> bool:
        """Take in an object seen alive; False when something as new was known already."""
        # Unknown and older than the last list: it died before that list, and this is late news of its life.
        return self._take(body, newer_than=self._listed)

    def _take(self, body: Mapping[str, Any], *, newer_than: int) -> bool:
        key, uid, version = key_of(body), body["metadata"]["uid"], _version(body)
        known = self._services.get(key)
        if uid in self._deleted or version <= (newer_than if known is None else known.version):
            return False
        self._set(key, StoredService(uid, version, body))
        return True

    def remove(self, key: ServiceKey, uid: str) -> bool:
        """Take in that the object of this uid is gone; a successor under the same name stays."""
        self._deleted[uid] = None
        self._deleted.move_to_end(uid)
        while len(self._deleted) > REMEMBERED_DELETIONS:
            self._deleted.popitem(last=False)
        known = self._services.get(key)
        if known is None or known.uid != uid:
            return False
        self._set(key, None)
        return True

    def _set(self, key: ServiceKey, new: StoredService | None) -> None:
        old = self._services.get(key)
        if new is None:
            del self._services[key]
        else:
            self._services[key] = new
        if old is not None and new is not None and (old.served_name, old.uid) == (new.served_name, new.uid):
            return
        for stored in (old, new):
            if stored is None:
                continue
            claims = self._claims[stored.served_name]
            claims.discard(key)
            for other in claims:
                self._on_contest(other)
            if stored is new:
                claims.add(key)
            elif not claims:
                del self._claims[stored.served_name]

    def drifted(self, listing: Iterable[Mapping[str, Any]], version: int) -> set[ServiceKey]:
        """Where this store is behind a list made at `version`: objects it lacks, has old, or should not have."""
        behind = set()
        listed = {}
        for body in listing:
            key, uid = key_of(body), body["metadata"]["uid"]
            listed[key] = uid
            known = self._services.get(key)
            if uid not in self._deleted and (known is None or known.version < _version(body)):
                behind.add(key)
        behind |= {key for key, known in self._services.items() if _is_ghost(key, known, listed, version)}
        return behind

    def correct(self, listing: Iterable[Mapping[str, Any]], version: int) -> set[ServiceKey]:
        """Make this store at least as new as a list made at `version`; returns the keys that changed."""
        bodies = list(listing)
        changed = self.drifted(bodies, version)
        listed = {key_of(body): body["metadata"]["uid"] for body in bodies}
        for key, known in list(self._services.items()):
            if _is_ghost(key, known, listed, version):
                self.remove(key, known.uid)
        for body in bodies:
            self._take(body, newer_than=0)
        self._listed = max(self._listed, version)
        return changed


def _is_ghost(key: ServiceKey, known: StoredService, listed: Mapping[ServiceKey, str], version: int) -> bool:
    """Known, but not in a list that is newer: it was deleted. One created after the list was made is no ghost."""
    return listed.get(key) != known.uid and known.version <= version


def _version(body: Mapping[str, Any]) -> int:
    """resourceVersions of one kind are comparable integers (guaranteed since Kubernetes 1.35, true for etcd before)."""
    return int(body["metadata"]["resourceVersion"])
