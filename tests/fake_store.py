"""The memory of the fake API server: objects, versions, history, deletion and apply. No HTTP, no clock of its own.

It does what the real one does as far as Slipway can tell the difference (a conformance test compares the two):
versions of one sequence, no new version for a write that changes nothing, finalizers, graceful pod deletion,
generation, `/status` apart from the rest, label and field selectors, ownership of fields by apply.
"""

import base64
import json
import re
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from tests.fake_apply import Owners, apply_patch, copied, release_changed

Object = dict[str, Any]
Where = tuple[str, str]  # (namespace, name)

REASONS = {400: "BadRequest", 404: "NotFound", 409: "Conflict", 410: "Expired", 422: "Invalid", 429: "TooManyRequests"}


class Refused(Exception):  # noqa: N818
    """The API server says no."""

    def __init__(self, status: int, message: str, reason: str = "", retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.reason = reason or REASONS.get(status, "InternalError")
        self.retry_after = retry_after


@dataclass(frozen=True)
class Happening:
    """One step of history: an object before and after; `None` where it did not exist."""

    version: int
    kind: str  # group/plural
    old: Object | None
    new: Object | None
    at_deletion: Object | None = None  # as it was deleted, with the version of the deletion


@dataclass
class _Kept:
    body: Object
    owners: Owners = field(default_factory=dict)


class Store:
    """All objects of all kinds, and what happened to them since the last compaction."""

    def __init__(self, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self.version = 100
        self.compacted = 0  # history up to here is gone
        self.history: list[Happening] = []
        self._kinds: dict[str, dict[Where, _Kept]] = {}
        self._lists: dict[tuple[str, str], tuple[int, list[Object]]] = {}  # by kind and namespace: version, objects
        self._snapshots: dict[str, tuple[int, list[Object]]] = {}  # of lists whose later pages may be asked for
        self._now = now

    # Reading

    def get(self, kind: str, where: Where) -> Object:
        return self._find(kind, where).body

    def all(self, kind: str, namespace: str = "") -> list[Object]:
        """Current objects of a kind, in the server's order."""
        version, objects = self._lists.get((kind, namespace), (0, []))
        if version != self.version:
            kept = sorted(self._kinds.get(kind, {}).items())
            objects = [one.body for (at, _), one in kept if not namespace or at == namespace]
            self._lists[kind, namespace] = self.version, objects
        return list(objects)

    def page(self, kind: str, namespace: str, matches: Callable[[Object], bool], limit: int, token: str) -> Object:
        """One page of a consistent list; the later pages come from the same snapshot, until it is compacted."""
        if token:
            snapshot, start = json.loads(base64.urlsafe_b64decode(token))
            if snapshot not in self._snapshots:
                raise Refused(410, "The provided continue parameter is too old", "Expired")
        else:
            snapshot, start = uuid.uuid4().hex, 0
            self._snapshots[snapshot] = self.version, [one for one in self.all(kind, namespace) if matches(one)]
        version, items = self._snapshots[snapshot]
        metadata = {"resourceVersion": str(version)}
        if limit and start + limit < len(items):
            rest = json.dumps([snapshot, start + limit]).encode()
            metadata["continue"] = base64.urlsafe_b64encode(rest).decode()
        elif not token:
            del self._snapshots[snapshot]  # a list of one page: nobody can ask for more
        return {"metadata": metadata, "items": items[start : start + limit] if limit else items}

    def events_after(
        self, version: int, kind: str, namespace: str, matches: Callable[[Object], bool]
    ) -> Iterator[tuple[int, str, Object]]:
        """(version, type, object) as a watch with that selector sees them: leaving the selection is a deletion."""
        first = bisect_right(self.history, version, key=lambda step: step.version)
        for step in islice(self.history, first, None):
            if step.kind != kind:
                continue
            some = step.new or step.old
            assert some is not None
            if namespace and some["metadata"].get("namespace") != namespace:
                continue
            was = step.old is not None and matches(step.old)
            is_now = step.new is not None and matches(step.new)
            if is_now:
                assert step.new is not None
                yield step.version, "MODIFIED" if was else "ADDED", step.new
            elif was:
                assert step.old is not None
                gone = copied(step.at_deletion or step.old)
                gone["metadata"]["resourceVersion"] = str(step.version)
                yield step.version, "DELETED", gone

    def kinds_changed_after(self, version: int) -> set[str]:
        """The kinds that have changes in the history after a version."""
        first = bisect_right(self.history, version, key=lambda step: step.version)
        return {step.kind for step in islice(self.history, first, None)}

    # Writing

    def create(self, kind: str, namespace: str, body: Object, *, dry_run: bool = False) -> Object:
        new = copied(body)
        meta = new.setdefault("metadata", {})
        if not meta.get("name"):
            if not meta.get("generateName"):
                raise Refused(422, "name or generateName is required", "Invalid")
            meta["name"] = meta["generateName"] + uuid.uuid4().hex[:5]
        if namespace:
            meta["namespace"] = namespace
        if self.exists(kind, (namespace, meta["name"])):
            raise Refused(409, f'{kind} "{meta["name"]}" already exists', "AlreadyExists")
        new.pop("status", None)  # a create never sets it
        if kind == "/pods":
            new["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
        return self._commit(kind, None, new, dry_run=dry_run)

    def update(
        self,
        kind: str,
        where: Where,
        change: Callable[[Object], Object],
        *,
        subresource: str = "",
        dry_run: bool = False,
    ) -> Object:
        """Replace or patch: `change` gets a copy and returns the whole object."""
        kept = self._find(kind, where)
        new = change(copied(kept.body))
        asked = new.get("metadata", {}).get("resourceVersion")
        if asked and asked != kept.body["metadata"]["resourceVersion"]:
            raise Refused(409, "the object has been modified; please apply your changes to the latest version")
        new = _only_its_half(kept.body, new, subresource)
        return self._commit(kind, kept, new, dry_run=dry_run)

    def apply(
        self,
        kind: str,
        where: Where,
        body: Object,
        *,
        manager: str,
        force: bool,
        subresource: str = "",
        dry_run: bool = False,
    ) -> tuple[Object, bool]:
        """Server-side apply; (object, whether it was created)."""
        manager = f"{manager}/{subresource}"
        if not self.exists(kind, where):
            if subresource:
                raise Refused(404, f"{kind} {where} not found")
            if body["metadata"].get("uid"):
                raise Refused(409, "uid mismatch: the object has a uid, and no existing object was found")
            created = self.create(kind, where[0], body | {"metadata": body["metadata"] | {"name": where[1]}})
            _, owners, _ = apply_patch({}, body, {}, manager)
            self._find(kind, where).owners = owners
            return created, True
        kept = self._find(kind, where)
        body = copied(body)
        if not subresource:
            body.pop("status", None)
        wanted_uid = body.get("metadata", {}).get("uid")
        if wanted_uid and wanted_uid != kept.body["metadata"]["uid"]:
            raise Refused(409, "uid in the patch does not match")
        new, owners, conflicts = apply_patch(kept.body, body, kept.owners, manager)
        if conflicts and not force:
            raise Refused(409, f"Apply failed with {len(conflicts)} conflicts: {conflicts}")
        stored = self._commit(kind, kept, _only_its_half(kept.body, new, subresource), dry_run=dry_run, owners=owners)
        return stored, False

    def delete(
        self,
        kind: str,
        where: Where,
        *,
        uid: str = "",
        version: str = "",
        grace: int | None = None,
        dry_run: bool = False,
    ) -> Object:
        kept = self._find(kind, where)
        meta = kept.body["metadata"]
        if uid and uid != meta["uid"]:
            raise Refused(409, f"Precondition failed: UID in precondition: {uid}, UID in object meta: {meta['uid']}")
        if version and version != meta["resourceVersion"]:
            have = meta["resourceVersion"]
            raise Refused(
                409, f"Precondition failed: ResourceVersion in precondition: {version}, in object meta: {have}"
            )
        seconds = self._grace(kind, kept.body, grace)
        if not meta.get("finalizers") and not seconds:
            return self._remove(kind, kept, dry_run=dry_run)
        new = copied(kept.body)
        shortened = seconds < new["metadata"].get("deletionGracePeriodSeconds", seconds + 1)
        if "deletionTimestamp" not in new["metadata"] or shortened:
            new["metadata"]["deletionTimestamp"] = _stamp(self._now())
            new["metadata"]["deletionGracePeriodSeconds"] = seconds
        return self._commit(kind, kept, new, dry_run=dry_run)

    def put(self, kind: str, body: Object) -> Object:
        """Create or replace everything, status included: for tests that play kubelet or user."""
        where = (body["metadata"].get("namespace", ""), body["metadata"]["name"])
        kept = self._kinds.get(kind, {}).get(where)
        new = copied(body)
        if kept is not None:
            server_owned = ("uid", "creationTimestamp", "generation", "resourceVersion", "deletionTimestamp")
            new["metadata"] |= {key: kept.body["metadata"][key] for key in server_owned if key in kept.body["metadata"]}
        return self._commit(kind, kept, new)

    def forget(self, kind: str, where: Where) -> None:
        """Delete without a trace in history: what a watcher misses when it was away for too long."""
        del self._kinds[kind][where]
        self.version += 1

    def compact(self) -> None:
        """Forget all history: older watches and half-read lists answer 410."""
        self.compacted = self.version
        self.history.clear()
        self._snapshots.clear()

    def exists(self, kind: str, where: Where) -> bool:
        return where in self._kinds.get(kind, {})

    def kinds(self) -> list[str]:
        return list(self._kinds)

    def _find(self, kind: str, where: Where) -> _Kept:
        try:
            return self._kinds[kind][where]
        except KeyError:
            raise Refused(404, f'{kind} "{where[1]}" not found') from None

    def _grace(self, kind: str, body: Object, asked: int | None) -> int:
        """Only a pod that a kubelet has, and that has not ended, is deleted gracefully."""
        if kind != "/pods" or not body.get("spec", {}).get("nodeName"):
            return 0
        if body.get("status", {}).get("phase") in ("Failed", "Succeeded"):
            return 0
        return int(body["spec"].get("terminationGracePeriodSeconds", 30)) if asked is None else asked

    def _commit(
        self, kind: str, kept: _Kept | None, new: Object, *, dry_run: bool = False, owners: Owners | None = None
    ) -> Object:
        meta = new["metadata"]
        if kept is None:
            meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": _stamp(self._now()), "generation": 1}
        else:
            old = kept.body
            if new.get("spec") != old.get("spec") or "deletionTimestamp" in meta.keys() - old["metadata"].keys():
                meta["generation"] = old["metadata"].get("generation", 1) + 1
            meta["resourceVersion"] = old["metadata"]["resourceVersion"]
            if not dry_run:
                kept.owners = release_changed(kept.owners, old, new) if owners is None else owners
            if new == old:
                return old
            if self._may_go(kind, new):
                return self._remove(kind, kept, dry_run=dry_run, last=new)
        if dry_run:
            return new
        self.version += 1
        meta["resourceVersion"] = str(self.version)
        self.history.append(Happening(self.version, kind, kept.body if kept else None, new))
        where = (meta.get("namespace", ""), meta["name"])
        if kept is None:
            self._kinds.setdefault(kind, {})[where] = _Kept(new)
        else:
            kept.body = new
        return new

    def _may_go(self, kind: str, body: Object) -> bool:
        meta = body["metadata"]
        return "deletionTimestamp" in meta and not meta.get("finalizers") and not meta.get("deletionGracePeriodSeconds")

    def _remove(self, kind: str, kept: _Kept, *, dry_run: bool, last: Object | None = None) -> Object:
        gone = copied(last or kept.body)
        if dry_run:
            return gone
        meta = gone["metadata"]
        self.version += 1
        meta["resourceVersion"] = str(self.version)
        del self._kinds[kind][meta.get("namespace", ""), meta["name"]]
        self.history.append(Happening(self.version, kind, kept.body, None, gone))
        return gone


def _only_its_half(old: Object, new: Object, subresource: str) -> Object:
    """`/status` changes the status and nothing else; everything else leaves the status alone."""
    fixed = {key: old["metadata"][key] for key in ("name", "uid", "creationTimestamp") if key in old["metadata"]}
    old_spec, new_spec = old.get("spec", {}), new.get("spec", {})
    if old.get("kind") == "Pod" and not subresource and _without_images(old_spec) != _without_images(new_spec):
        raise Refused(422, "Pod is invalid: spec: Forbidden: pod updates may not change fields other than images")
    if subresource == "status":
        result = copied(old)
        result["status"] = new.get("status", {})
        return result
    result = {key: value for key, value in new.items() if key != "status"}
    if "status" in old:
        result["status"] = old["status"]
    for key in ("namespace", "generation", "deletionTimestamp", "deletionGracePeriodSeconds", "resourceVersion"):
        result["metadata"].pop(key, None)
        if key in old["metadata"]:
            fixed[key] = old["metadata"][key]
    result["metadata"] |= fixed
    return result


def _without_images(spec: Object) -> Object:
    containers = [{key: value for key, value in one.items() if key != "image"} for one in spec.get("containers", [])]
    return spec | {"containers": containers}


def label_matcher(selector: str) -> Callable[[Object], bool]:
    """`a=b,c!=d,e in (f,g),h,!i`, as the server reads it."""
    terms: list[Callable[[dict[str, str]], bool]] = []
    for term in re.split(r",(?![^(]*\))", selector) if selector else []:
        if match := re.fullmatch(r"\s*(\S+)\s+(in|notin)\s+\((.*)\)\s*", term):
            name, verb, values = match[1], match[2], {value.strip() for value in match[3].split(",")}
            terms.append(lambda labels, n=name, v=values, w=verb == "in": (labels.get(n) in v) == w)  # type: ignore[misc]
        elif "!=" in term:
            name, value = term.split("!=")
            terms.append(lambda labels, n=name, v=value: labels.get(n) != v)  # type: ignore[misc]
        elif "=" in term:
            name, value = re.split("==?", term)
            terms.append(lambda labels, n=name, v=value: labels.get(n) == v)  # type: ignore[misc]
        else:
            name, wanted = term.lstrip("!"), not term.startswith("!")
            terms.append(lambda labels, n=name, w=wanted: (n in labels) == w)  # type: ignore[misc]
    return lambda one: all(term(one["metadata"].get("labels") or {}) for term in terms)


def field_matcher(selector: str) -> Callable[[Object], bool]:
    """`metadata.name=x,status.phase!=Failed`."""

    def value(one: Object, path: str) -> str:
        found: Any = one
        for step in path.split("."):
            found = found.get(step, {}) if isinstance(found, dict) else {}
        return found if isinstance(found, str) else ""

    def matches(one: Object) -> bool:
        for term in selector.split(",") if selector else []:
            path, wanted = re.split("!=|==?", term)
            if (value(one, path) == wanted) == ("!=" in term):
                return False
        return True

    return matches


def _stamp(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
