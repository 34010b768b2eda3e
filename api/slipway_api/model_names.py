"""Decides which service or adapter answers a model name. Gateway, operator and adapters share this one resolver.

| a client sends       | answered by                                                                                |
|----------------------|--------------------------------------------------------------------------------------------|
| `<namespace>/<name>` | objects of that namespace only: the service of that name, else the oldest with that name   |
| another name         | the oldest object that has it: as served name, as an adapter's name, or as an alias        |
| a former served name | the oldest service with a replica that still answers to it, if no object has that name now |

- A name asks for a namespace if the part before its first `/` is one that exists, or in which an object was seen. An
  object may be absent for a moment, because GitOps deletes and creates it; its name must not go elsewhere then.
  Names of Hugging Face, such as `Qwen/Qwen2.5-7B`, have no such first part.
- Only objects that the caller may use count: an object of another tenant neither answers nor takes a name away.
- A base keeps its served name, also from older adapters of its own.

Pure. A lookup costs the same however many objects claim the name: the claims of a name are kept in their order, and the
answer for a caller is kept until a claim of that name changes.
"""

import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum, StrEnum
from typing import Final

from slipway_api.seniority import older_first

MayUse = Callable[[str, str], bool]  # of the name that a client says, and the full name of the object that would answer

MAX_CALLERS: Final = 1024  # whose answers are kept


def may_use_all(model: str, full_name: str) -> bool:
    """Whether a caller may use the object: every one, if no tenants are configured."""
    return True


class ObjectKind(StrEnum):
    """The kinds of objects that have model names."""

    SERVICE = "InferenceService"
    ADAPTER = "LoRAAdapter"


class Rank(IntEnum):
    """How strong a claim is; among equal ranks the oldest object has the name."""

    OWN = 0  # `<namespace>/<name>` of a service
    CURRENT = 1  # a served name, an adapter's name, an alias
    FORMER = 2  # a served name that only replicas of the last revision answer to


@dataclass(frozen=True, slots=True)
class ServiceNames:
    """The names of one service, and when it was created."""

    served_name: str
    created: datetime | None = None
    former: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class AdapterNames:
    """The names of one adapter, the key of its base, and when it was created."""

    name: str
    service: str
    alias: str = ""
    created: datetime | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """One object's claim to one name."""

    rank: Rank
    kind: ObjectKind
    key: str  # <namespace>/<metadata.name> of the object
    service: str  # key of the service whose replicas would answer
    full_name: str  # <namespace>/<model name>, which the patterns of tenants may name
    is_alias: bool
    order: tuple[Rank, tuple[datetime, str, str], ObjectKind]

    @property
    def namespace(self) -> str:
        """The namespace of the object."""
        return namespace_of(self.key)


@dataclass(frozen=True, slots=True)
class Answer:
    """The service that answers, and the adapter; several adapters share an alias."""

    service: str
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NameConflict:
    """Why an object is not served under its name."""

    name: str
    namespace: str = ""  # the name belongs to this other namespace; empty: `kind` and `key` have it
    kind: ObjectKind = ObjectKind.SERVICE
    key: str = ""


def namespace_of(key: str) -> str:
    """The part before the first slash; empty if there is none."""
    first, slash, _ = key.partition("/")
    return first if slash else ""


class _Claims:
    """The claims to one name in their order; `version` counts the changes."""

    __slots__ = ("entries", "version")

    def __init__(self) -> None:
        self.entries: list[Claim] = []
        self.version = 0

    def add(self, claim: Claim) -> None:
        bisect.insort(self.entries, claim, key=_order)
        self.version += 1

    def remove(self, claim: Claim) -> None:
        del self.entries[bisect.bisect_left(self.entries, claim.order, key=_order)]
        self.version += 1


def _order(claim: Claim) -> tuple[Rank, tuple[datetime, str, str], ObjectKind]:
    return claim.order


@dataclass(slots=True)
class _Caller:
    """The answers of one caller: by name, with the claims and their version that the answer follows from."""

    answers: dict[str, tuple[_Claims, int, Answer | None]] = field(default_factory=dict)


class ModelNames:
    """All model names of services and adapters, each with the objects that claim it."""

    def __init__(self) -> None:
        self.changes = 0  # of claims and of known namespaces
        self._services: dict[str, ServiceNames] = {}
        self._adapters: dict[str, AdapterNames] = {}
        self._adapters_of: dict[str, set[str]] = {}  # by the key of their base
        self._claimed: dict[tuple[ObjectKind, str], dict[str, Claim]] = {}  # by object: its claims by name
        self._claims: dict[str, _Claims] = {}
        self._local: dict[tuple[str, str], _Claims] = {}  # by namespace of the object, and name
        self._namespaces: set[str] = set()
        self._names_with: dict[str, set[str]] = {}  # claimed names by the part before their first slash
        self._callers: OrderedDict[MayUse, _Caller] = OrderedDict()

    # --- changes

    @property
    def namespaces(self) -> frozenset[str]:
        """Every namespace that is known: names that begin with it are its own."""
        return frozenset(self._namespaces)

    def know_namespaces(self, namespaces: Iterable[str]) -> set[tuple[ObjectKind, str]]:
        """Reserve the names that begin with these namespaces; returns the objects that this concerns."""
        concerned: set[tuple[ObjectKind, str]] = set()
        for namespace in set(namespaces) - self._namespaces - {""}:
            self._namespaces.add(namespace)
            self.changes += 1
            for name in self._names_with.get(namespace, ()):
                concerned |= {(one.kind, one.key) for one in self._claims[name].entries}
        return concerned

    def set_service(self, key: str, service: ServiceNames | None) -> set[tuple[ObjectKind, str]]:
        """Add, replace or remove a service; returns the other objects whose names may have another holder now."""
        before = self._services.get(key)
        if service is None:
            self._services.pop(key, None)
        else:
            self._services[key] = service
        concerned = self.know_namespaces([namespace_of(key)])
        concerned |= self._claim(ObjectKind.SERVICE, key, self._claims_of_service(key))
        if (before and before.served_name) != (service and service.served_name):
            for adapter in self._adapters_of.get(key, ()):
                concerned |= self._claim(ObjectKind.ADAPTER, adapter, self._claims_of_adapter(adapter))
        return concerned - {(ObjectKind.SERVICE, key)}

    def set_adapter(self, key: str, adapter: AdapterNames | None) -> set[tuple[ObjectKind, str]]:
        """Add, replace or remove an adapter; returns the other objects whose names may have another holder now."""
        before = self._adapters.pop(key, None)
        if before is not None:
            self._adapters_of[before.service].discard(key)
            if not self._adapters_of[before.service]:
                del self._adapters_of[before.service]
        if adapter is not None:
            self._adapters[key] = adapter
            self._adapters_of.setdefault(adapter.service, set()).add(key)
        concerned = self.know_namespaces([namespace_of(key)])
        concerned |= self._claim(ObjectKind.ADAPTER, key, self._claims_of_adapter(key))
        return concerned - {(ObjectKind.ADAPTER, key)}

    # --- questions

    def resolve(self, name: str, may_use: MayUse = may_use_all) -> Answer | None:
        """The object that this caller means by `name`; None: there is none that it may use."""
        claims = self._candidates(name)
        if claims is None:
            return None
        caller = self._caller(may_use)
        known = caller.answers.get(name)
        if known is not None and known[0] is claims and known[1] == claims.version:
            return known[2]
        answer = _first_usable(name, claims.entries, may_use)
        caller.answers[name] = (claims, claims.version, answer)
        return answer

    def holder(self, name: str, namespace: str = "") -> Claim | None:
        """The claim that has the name: of all objects, or of those of one namespace."""
        claims = self._local.get((namespace, name)) if namespace else self._candidates(name)
        return claims.entries[0] if claims is not None and claims.entries else None

    def conflict_of_service(self, key: str) -> NameConflict | None:
        """Why a service is not served under its served name, to callers that may use everything; None: it is."""
        if key not in self._services:
            return None
        name = self._services[key].served_name
        asked = namespace_of(name)
        if asked in self._namespaces and asked != namespace_of(key):
            return NameConflict(name, namespace=asked)
        holder = self.holder(name)
        assert holder is not None, "the service itself claims it"
        return None if holder.key == key and holder.kind is ObjectKind.SERVICE else _conflict(name, holder)

    def conflict_of_adapter(self, key: str) -> NameConflict | None:
        """The object of its namespace that has the adapter's name or alias; None: the adapter has both."""
        adapter = self._adapters.get(key)
        if adapter is None:
            return None  # it is being deleted
        for name in filter(None, (adapter.name, adapter.alias)):
            holder = self.holder(name, namespace_of(key))
            if holder is None or (holder.kind, holder.key) == (ObjectKind.ADAPTER, key):
                continue
            if not (holder.is_alias and name != adapter.name):  # several adapters may share an alias
                return _conflict(name, holder)
        return None

    # --- claims

    def _claims_of_service(self, key: str) -> dict[str, Claim]:
        service = self._services.get(key)
        if service is None:
            return {}

        def claim(rank: Rank) -> Claim:
            return _claim(rank, ObjectKind.SERVICE, key, service.created, service=key, full_name=key)

        names = dict.fromkeys(service.former, Rank.FORMER) | {service.served_name: Rank.CURRENT, key: Rank.OWN}
        return {name: claim(rank) for name, rank in names.items()}

    def _claims_of_adapter(self, key: str) -> dict[str, Claim]:
        """Nothing without its base, and never the name of its base: replicas answer to it as the base itself."""
        adapter = self._adapters.get(key)
        base = self._services.get(adapter.service) if adapter is not None else None
        if adapter is None or base is None:
            return {}
        namespace = namespace_of(key)
        claims: dict[str, Claim] = {}
        for name, is_alias in ((adapter.alias, True), (adapter.name, False)):
            if name and name != base.served_name:
                claim = _claim(
                    Rank.CURRENT, ObjectKind.ADAPTER, key, adapter.created, service=adapter.service,
                    full_name=f"{namespace}/{adapter.name}", is_alias=is_alias,
                )  # fmt: skip
                claims |= {name: claim, f"{namespace}/{name}": claim}
        return claims

    def _claim(self, kind: ObjectKind, key: str, claims: dict[str, Claim]) -> set[tuple[ObjectKind, str]]:
        """Set the claims of one object; returns the objects that claim a name whose holder has changed."""
        before = self._claimed.get((kind, key), {})
        if before == claims:
            return set()
        self.changes += 1
        if claims:
            self._claimed[kind, key] = claims
        else:
            del self._claimed[kind, key]
        concerned: set[tuple[ObjectKind, str]] = set()
        for name in before.keys() | claims.keys():
            old, new = before.get(name), claims.get(name)
            if old == new:
                continue
            holders = self._holders(name, key)
            if old is not None:
                self._remove(name, old)
            if new is not None:
                self._add(name, new)
            for claims_of_name, holder in holders:
                entries = claims_of_name.entries
                if (entries[0] if entries else None) != holder:
                    concerned |= {(one.kind, one.key) for one in entries}
        return concerned

    def _holders(self, name: str, key: str) -> list[tuple[_Claims, Claim | None]]:
        """The claims of a name, of all and of the object's namespace, each with its present holder."""
        found = (self._claims.get(name), self._local.get((namespace_of(key), name)))
        return [(one, one.entries[0] if one.entries else None) for one in found if one is not None]

    def _add(self, name: str, claim: Claim) -> None:
        if (first := namespace_of(name)) and name not in self._claims:
            self._names_with.setdefault(first, set()).add(name)
        self._claims.setdefault(name, _Claims()).add(claim)
        self._local.setdefault((claim.namespace, name), _Claims()).add(claim)

    def _remove(self, name: str, claim: Claim) -> None:
        for claims in (self._claims[name], self._local[claim.namespace, name]):
            claims.remove(claim)
        if not self._local[claim.namespace, name].entries:
            del self._local[claim.namespace, name]
        if not self._claims[name].entries:
            del self._claims[name]
            if first := namespace_of(name):
                self._names_with[first].discard(name)
                if not self._names_with[first]:
                    del self._names_with[first]

    def _candidates(self, name: str) -> _Claims | None:
        """The claims that count for a name: those of the namespace that it asks for, or of all objects."""
        asked = namespace_of(name)
        return self._local.get((asked, name)) if asked in self._namespaces else self._claims.get(name)

    def _caller(self, may_use: MayUse) -> _Caller:
        caller = self._callers.get(may_use)
        if caller is None:
            caller = self._callers[may_use] = _Caller()
            if len(self._callers) > MAX_CALLERS:
                self._callers.popitem(last=False)
        elif len(caller.answers) > 2 * len(self._claims):
            caller.answers.clear()  # most of them are of names that nothing claims any more
        return caller


def _claim(
    rank: Rank,
    kind: ObjectKind,
    key: str,
    created: datetime | None,
    *,
    service: str,
    full_name: str,
    is_alias: bool = False,
) -> Claim:
    namespace, _, name = key.partition("/")
    order = (rank, older_first(created, namespace, name), kind)
    return Claim(rank, kind, key, service, full_name, is_alias, order)


def _first_usable(name: str, claims: Iterable[Claim], may_use: MayUse) -> Answer | None:
    """The answer of the first claim that the caller may use; an alias brings the others of its namespace."""
    usable = (one for one in claims if _is_usable(name, one, may_use))
    first = next(usable, None)
    if first is None:
        return None
    if first.kind is ObjectKind.SERVICE:
        return Answer(first.service)
    if not first.is_alias:
        return Answer(first.service, (first.key,))
    return Answer(first.service, (first.key, *_others_of_alias(first, usable)))


def _others_of_alias(first: Claim, usable: Iterator[Claim]) -> Iterator[str]:
    return (one.key for one in usable if one.is_alias and one.namespace == first.namespace)


def _is_usable(name: str, claim: Claim, may_use: MayUse) -> bool:
    return may_use(name, claim.service) or (claim.full_name != claim.service and may_use(name, claim.full_name))


def _conflict(name: str, holder: Claim) -> NameConflict:
    return NameConflict(name, kind=holder.kind, key=holder.key)
