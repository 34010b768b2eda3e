"""Indexes the ControllerRevisions of services, and converts them into the structs from which the core decides."""

from collections import defaultdict
from typing import Any

import msgspec

from slipway_api import names
from slipway_api.types import ServiceKey
from slipway_kube.informer import Change
from slipway_kube.objects import Object
from slipway_operator.core.observed import StoredRevision
from slipway_operator.inputs.labels import edited_labels_of_revision, service_name


class ControllerRevision(Object, frozen=True):
    """A ControllerRevision: an immutable body with a number."""

    revision: int = 0
    data: dict[str, Any] = msgspec.field(default_factory=dict)


class RevisionIndex:
    """ControllerRevisions by the service that controls them; of those that none controls, by their label."""

    def __init__(self) -> None:
        self._revisions: defaultdict[ServiceKey, dict[str, ControllerRevision]] = defaultdict(dict)

    def saw(self, change: Change, old: ControllerRevision | None, new: ControllerRevision | None) -> set[ServiceKey]:
        """Apply one change; returns the services that it concerns."""
        concerned = set()
        if old is not None and (key := _service_of(old)) is not None:
            concerned.add(key)
            self._revisions[key].pop(old.name, None)
            if not self._revisions[key]:
                del self._revisions[key]
        if change is not Change.DELETED and new is not None and (key := _service_of(new)) is not None:
            concerned.add(key)
            self._revisions[key][new.name] = new
        return concerned

    def of(self, key: ServiceKey) -> tuple[StoredRevision, ...]:
        """One service's revisions, oldest first, without those that are being deleted."""
        revisions = self._revisions.get(key, {}).values()
        facts = [revision_facts(one) for one in revisions if not one.is_terminating]
        return tuple(sorted(facts, key=lambda one: (one.number, one.name)))


def revision_facts(revision: ControllerRevision) -> StoredRevision:
    """The facts of one revision."""
    owner = next((reference.uid for reference in revision.metadata.owner_references if reference.controller), "")
    hash = revision.name.removeprefix(f"{service_name(revision)}-")
    return StoredRevision(
        name=revision.name,
        uid=revision.uid,
        owner_uid=owner,
        hash=hash if service_name(revision) else revision.labels.get(names.LABEL_REVISION, ""),
        edited_labels=edited_labels_of_revision(revision, hash),
        number=revision.revision,
        data=revision.data,
    )


def _service_of(revision: ControllerRevision) -> ServiceKey | None:
    name = service_name(revision) or revision.labels.get(names.LABEL_SERVICE)
    return ServiceKey(revision.namespace, name) if name else None
