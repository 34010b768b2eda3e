"""Applies and deletes the children of our objects: Service, PodDisruptionBudget, NetworkPolicy, ConfigMap.

A child is compared with the API server once per object, at the start of a leader and at a resync, and written only
where it differs. A child that other clients have edited or deleted is compared again (`inputs.child_watch`), and each
correction is returned as a sentence. A new leader compares all children, so it lists them instead of asking for each.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from slipway_api import names
from slipway_api.conditions import Reason
from slipway_kube import resources
from slipway_kube.client import Client
from slipway_kube.errors import Conflict, KubeError, NotFound
from slipway_kube.objects import Object
from slipway_kube.resources import Resource
from slipway_kube.writer import Writer
from slipway_operator.controller.kinds import Key, Memory
from slipway_operator.core.actions import ABSENT, ApplyChild, DeleteChild

log = structlog.get_logger()

CHILDREN: Mapping[str, Resource] = {
    resource.kind: resource
    for resource in (
        resources.SERVICES,
        resources.CONFIG_MAPS,
        resources.DISRUPTION_BUDGETS,
        resources.NETWORK_POLICIES,
    )
}
LISTED = (resources.SERVICES, resources.DISRUPTION_BUDGETS, resources.NETWORK_POLICIES)  # every service has these
_SELECTORS = frozenset({"selector", "podSelector", "namespaceSelector"})  # atomic for server-side apply too
LIST_IS_FRESH_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Applied:
    """The result of applying a child."""

    is_written: bool
    """False: it was as it should be."""
    correction: str = ""
    """What another client had done to it, for an event; empty: nothing."""


class Children:
    """Applies and deletes children; a child of another owner is reported and never touched."""

    def __init__(self, client: Client, writer: Writer, *, monotonic: Callable[[], float]) -> None:
        self._client = client
        self._writer = writer
        self._monotonic = monotonic
        self._listed: dict[str, Any] = {}  # by path, each used once
        self._listed_at = float("-inf")

    async def list_all(self, namespaces: tuple[str, ...]) -> None:
        """List the children that Slipway made, for the first comparison of each; () means all namespaces.

        What cannot be listed is asked for one by one instead.
        """
        at, listed = self._monotonic(), {}
        for resource in LISTED:
            for namespace in namespaces or ("",):
                path = resource.path(namespace)
                try:
                    async for page in self._client.list_pages(
                        path, label_selector=f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY}"
                    ):
                        for item in page.items or ():
                            child = msgspec.json.decode(item)
                            meta = child["metadata"]
                            child |= {"apiVersion": resource.api_version, "kind": resource.kind}  # lists leave them out
                            listed[resource.path(meta["namespace"], meta["name"])] = child
                        await asyncio.sleep(0)
                except KubeError as error:
                    log.debug("children are not listed", path=path, error=str(error))
        self._listed, self._listed_at = listed, at

    async def apply(self, key: Key, action: ApplyChild, memory: Memory) -> Applied:
        """Apply the child if it differs. Raises Conflict if another owner has an object of that name."""
        correction = ""
        resource, name = CHILDREN[action.manifest["kind"]], action.manifest["metadata"]["name"]
        manifest = with_digest(action)
        if action.key not in memory.applied:
            there = await self._read(resource, key.namespace, name)
            if there is not None and not is_ours(key, msgspec.convert(there, Object)):
                kind = action.manifest["kind"]
                advice = f"rename it, or name the {key.kind} otherwise"
                sentence = f"there is a {kind} {name} that Slipway did not make; {advice}"
                raise Conflict(409, sentence, reason=Reason.NAME_CONFLICT)
            # A resync and a new leader compare every child: one that is as it should be causes no write.
            if there is not None and contains(there, manifest):
                memory.applied[action.key] = action.digest
                memory.unchecked.discard(action.key)
                return Applied(is_written=False)
            correction = find_correction(there, manifest, was_applied=action.key in memory.unchecked)
        await self._writer.apply(resource, key.namespace, name, manifest, field_manager=names.FIELD_MANAGER)
        memory.applied[action.key] = action.digest
        memory.unchecked.discard(action.key)
        return Applied(is_written=True, correction=correction)

    async def delete(self, key: Key, action: DeleteChild, memory: Memory) -> None:
        """Delete the child where it exists and Slipway made it."""
        resource = CHILDREN[action.key.partition("/")[0]]
        with suppress(NotFound):
            there = msgspec.json.decode(await self._client.get(resource.path(key.namespace, action.name)), type=Object)
            if is_ours(key, there):
                await self._writer.delete(resource, key.namespace, action.name, uid=there.uid)
        memory.applied[action.key] = ABSENT

    async def _read(self, resource: Resource, namespace: str, name: str) -> Any | None:
        """The live child: as it was listed, once and while the list is fresh, else by a GET."""
        path = resource.path(namespace, name)
        if self._monotonic() - self._listed_at > LIST_IS_FRESH_SECONDS:
            self._listed.clear()
        if (listed := self._listed.pop(path, None)) is not None:
            return listed
        try:
            return msgspec.json.decode(await self._client.get(path))
        except NotFound:
            return None


def find_correction(there: Any | None, manifest: Mapping[str, Any], *, was_applied: bool) -> str:
    """What another client has done to a child that this manifest replaces; empty: nothing that is known.

    was_applied: this process had applied it. If the live object has the digest of this very manifest, and other
    values, somebody has edited it; with another digest, it is our own child of an earlier spec.
    """
    name = f"{manifest['kind']} {manifest['metadata']['name']}"
    if there is None:
        return f"{name} had been deleted, and is created again" if was_applied else ""
    digest = manifest["metadata"]["annotations"][names.ANNOTATION_APPLIED]
    if (there["metadata"].get("annotations") or {}).get(names.ANNOTATION_APPLIED) != digest:
        return ""
    edited = [
        *(
            f"metadata.{field}"
            for field, value in manifest["metadata"].items()
            if not _has(there["metadata"], field, value)
        ),
        *(field for field, value in manifest.items() if field != "metadata" and not _has(there, field, value)),
    ]
    return f"{name} had been edited ({', '.join(edited)}), and is restored"


def _has(there: Mapping[str, Any], field: str, value: Any) -> bool:
    if field in _SELECTORS:
        return bool(there.get(field) == value)
    return field in there and contains(there[field], value)


def is_ours(key: Key, there: Object) -> bool:
    """Whether Slipway made the object for this owner: by its owner reference, because people edit labels.

    One without a controller was orphaned (`--cascade=orphan`): then its label shows who made it.
    """
    controller = next((owner for owner in there.metadata.owner_references if owner.controller), None)
    if controller is None:
        return there.labels.get(names.LABEL_MANAGED_BY) == names.MANAGED_BY
    is_kind = controller.kind == key.kind and controller.api_version.startswith(f"{names.GROUP}/")
    return is_kind and controller.name == key.name


def with_digest(action: ApplyChild) -> dict[str, Any]:
    """The manifest with its own digest as an annotation, which tells whether our last apply was this manifest.

    Without it, a field that the manifest no longer has could not be told from one that another client added.
    """
    metadata = action.manifest["metadata"]
    annotations = metadata.get("annotations", {}) | {names.ANNOTATION_APPLIED: action.digest}
    return action.manifest | {"metadata": metadata | {"annotations": annotations}}


def contains(there: Any, wanted: Any) -> bool:
    """Whether a live object has every value of a manifest; the API server adds defaults, also within list items.

    A selector has to be equal: an entry that somebody added selects other pods.
    """
    if isinstance(wanted, Mapping):
        return isinstance(there, Mapping) and all(_has(there, name, value) for name, value in wanted.items())
    if isinstance(wanted, list | tuple):
        return (
            isinstance(there, list)
            and len(there) == len(wanted)
            and all(contains(one, other) for one, other in zip(there, wanted, strict=True))
        )
    return bool(there == wanted)
