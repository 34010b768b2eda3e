"""Computes the revision that a spec asks for, and stores its inputs so that its pods can be built again.

The hash covers what the user wrote about the pods, and nothing else. Operator version, certificates, scale, drain and
rollout settings are not in it, so none of them restarts a pod. Values equal to their default are left out before
hashing: a newer operator with a new field, or a default written out by the API server, gives the same hash.

What is stored, in a ControllerRevision (apps/v1) owned by the service, is everything that a pod is built from: model,
runtime, resources and template with all their defaults as they were, and the image that an empty `runtime.image` was
resolved to, and of another engine than our own runtime the Engine itself. Pods are built from what is stored, never
from the spec or an Engine, so a changed default touches no revision that exists. It is never changed; its name is made
of the hash.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from pydantic import ValidationError

from slipway_api import names
from slipway_api.engine_fields import SLIPWAY
from slipway_api.inference_service import DirectAccess, InferenceService, InferenceServiceSpec
from slipway_api.inference_status import RevisionStatus
from slipway_operator.core.actions import CreateRevision, DeleteRevision
from slipway_operator.core.engines import PinnedEngine, engine_inputs, fill_resources
from slipway_operator.core.observed import StoredRevision
from slipway_operator.core.profiles import apply_profile

HASH_LENGTH: Final = 10
SHORT_LENGTH: Final = 5  # in the names of pods
_NOT_INPUTS: Final[dict[str, Any]] = {
    "model": {"shape"},  # it plans; it changes no pod
    "runtime": {"upgrade_policy", "upgrade_window"},  # they decide when an image is taken
}
# Kubernetes' alphabet for generated names: no vowels, so no words; no digit that looks like a letter.
_ALPHABET: Final = "bcdfghjklmnpqrstvwxz2456789"
_INPUTS: Final[dict[str, Any]] = {
    "model": True,
    "runtime": True,
    "resources": True,
    "template": True,
    "profile": True,
    "routing": {"direct_access"},  # pods get the digests of their callers' tokens when they are created
    "availability": {"priority_class_name"},  # a live pod keeps its priority
}


@dataclass(frozen=True, slots=True)
class Revision:
    """A set of user-visible inputs, and the runtime image that it got."""

    hash: str
    image: str
    spec: InferenceServiceSpec | None = field(default=None, compare=False)
    """The inputs as stored; None: not stored yet."""
    engine: PinnedEngine | None = field(default=None, compare=False)
    """The engine as the revision covers it; None: our own runtime."""

    @property
    def short(self) -> str:
        """The part of the hash that names pods."""
        return self.hash[:SHORT_LENGTH]

    def apply_to(self, service: InferenceService) -> InferenceService:
        """The service with the inputs of this revision; fields outside a revision keep their present value."""
        if self.spec is None:
            return service
        frozen = {
            part: getattr(self.spec, part)
            if fields is True
            # Of these only some fields belong to the revision; the others keep their present value.
            else getattr(service.spec, part).model_copy(
                update={field: getattr(getattr(self.spec, part), field) for field in fields}
            )
            for part, fields in _INPUTS.items()
        }
        # The sizes describe the model that the spec names now; those of another one are not known.
        shape = service.spec.model.shape if self.spec.model.uri == service.spec.model.uri else None
        frozen["model"] = self.spec.model.model_copy(update={"shape": shape})
        return service.model_copy(update={"spec": service.spec.model_copy(update=frozen)})


def inputs(spec: InferenceServiceSpec, engine: PinnedEngine | None = None) -> str:
    """The hash's input: canonical JSON of what the user wrote about the pods, without defaults, and of the engine."""
    written = spec.model_dump(
        mode="json", by_alias=True, exclude_defaults=True, exclude_none=True, include=_INPUTS, exclude=_NOT_INPUTS
    )
    if written.get("routing", {}).get("directAccess") == DirectAccess.OPEN:
        del written["routing"]["directAccess"]  # once the default of the schema, which wrote it into every object
    written = {section: values for section, values in written.items() if values}
    text = json.dumps(written, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return text if engine is None else f"{text}\n{engine_inputs(engine, spec)}"


def digest(text: str, collisions: int = 0) -> str:
    """The hash of such inputs; `collisions` counts revisions whose short form was taken."""
    number = int.from_bytes(hashlib.sha256(f"{collisions}\n{text}".encode()).digest())
    letters = []
    for _ in range(HASH_LENGTH):
        number, letter = divmod(number, len(_ALPHABET))
        letters.append(_ALPHABET[letter])
    return "".join(letters)


def resolve(
    service: InferenceService,
    default_image: str,
    stored: Iterable[Revision] = (),
    engine: PinnedEngine | None = None,
) -> Revision:
    """The revision that the spec asks for; a known one keeps its hash, its image and its defaults."""
    kept = {revision.hash: revision for revision in stored}
    known = {revision.hash: revision for revision in service.status.revisions}
    text = inputs(service.spec, engine)
    chosen = _upgraded_to(text, service)
    if not chosen:
        chosen = digest(text)
        if chosen not in known:
            chosen = _find(text, service.status.revisions)
    if chosen in kept:
        return kept[chosen]
    frozen = known[chosen].image if chosen in known else ""
    return Revision(hash=chosen, image=frozen or service.spec.runtime.image or default_image, engine=engine)


def find_stored(service: InferenceService, stored: Sequence[Revision]) -> Revision | None:
    """The revision of the present spec with the engine that it names, as an earlier version of the Engine gave it.

    Where several do, the one that was asked for last.
    """
    of_spec = [
        one
        for one in stored
        if one.engine is not None
        and one.engine.name == service.spec.runtime.engine
        and one.hash in _candidates(inputs(service.spec, one.engine))
    ]
    order = [service.status.update_revision, service.status.current_revision]
    order += [one.hash for one in service.status.revisions]  # newest first
    return min(of_spec, key=lambda one: order.index(one.hash) if one.hash in order else len(order), default=None)


def upgraded(service: InferenceService, image: str) -> Revision:
    """The revision of the same spec with a newer runtime image; its hash covers the image."""
    return Revision(hash=_find(_with_image(inputs(service.spec), image), service.status.revisions), image=image)


def is_upgrade(service: InferenceService, revision: Revision) -> bool:
    """Whether the revision of the present spec came from an upgrade of its runtime image."""
    return revision.hash in _candidates(_with_image(inputs(service.spec), revision.image))


def _with_image(text: str, image: str) -> str:
    return f"{text}\nimage {image}"


def _upgraded_to(text: str, service: InferenceService) -> str:
    """The newest known revision of this spec that is an upgrade; empty where none is, or an older one came back."""
    if service.spec.runtime.image:
        return ""
    for one in service.status.revisions:  # newest first: what the spec asked for last
        if one.hash in _candidates(_with_image(text, one.image)):
            return one.hash
        if one.hash in _candidates(text):
            return ""
    return ""


@dataclass(frozen=True, slots=True)
class Records:
    """The ControllerRevisions of a service."""

    readable: tuple[Revision, ...] = ()
    """The revisions whose pods can be built again."""
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Hash -> why the record cannot be followed: an unknown value, or a field that is missing."""


def load_revisions(service: InferenceService, stored: Iterable[StoredRevision]) -> Records:
    """Read the records that the service controls. An unknown value makes a record unreadable; unknown fields do not."""
    loaded, unreadable = list[Revision](), dict[str, str]()
    for one in stored:
        if one.owner_uid != service.metadata.uid:
            continue
        try:
            spec = InferenceServiceSpec.model_validate(one.data.get("spec"))
            engine = PinnedEngine.of_record(one.data["engine"]) if "engine" in one.data else None
        except ValidationError as exc:
            unreadable[one.hash] = _first_fault(exc)
            continue
        if engine is None and spec.runtime.engine != SLIPWAY:
            unreadable[one.hash] = f"the engine {spec.runtime.engine} is not in it"
            continue
        loaded.append(Revision(one.hash, str(one.data.get("image", "")), spec, engine))
    return Records(tuple(loaded), unreadable)


def record_name(service: InferenceService, hash: str) -> str:
    """The name of the ControllerRevision that stores a revision."""
    return f"{service.metadata.name}-{hash}"


def _first_fault(exc: ValidationError) -> str:
    """`spec.rollout.strategy: Input should be …`"""
    first = exc.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(('spec', *map(str, first['loc'])))}: {first['msg']}"[:200]


def create_revision(
    service: InferenceService, revision: Revision, stored: Sequence[StoredRevision]
) -> tuple[CreateRevision, ...]:
    """Store the revision that the spec asks for, before its first pod. A record that is there is never changed."""
    has_record = any(one.owner_uid == service.metadata.uid and one.hash == revision.hash for one in stored)
    if revision.spec is not None or has_record:
        return ()
    filled = fill_resources(apply_profile(service.spec), revision.engine)
    spec = filled.model_dump(mode="json", by_alias=True, exclude_none=True, include=_INPUTS, exclude=_NOT_INPUTS)
    engine = {} if revision.engine is None else {"engine": revision.engine.to_json()}
    name = record_name(service, revision.hash)
    manifest = {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {
            "name": name,
            "namespace": service.metadata.namespace,
            "labels": {
                names.LABEL_MANAGED_BY: names.MANAGED_BY,
                "app.kubernetes.io/name": service.metadata.name,
                names.LABEL_SERVICE: service.metadata.name,
                names.LABEL_REVISION: revision.hash,
            },
            "ownerReferences": [owner_reference(service)],
        },
        "revision": max((one.number for one in stored), default=0) + 1,
        "data": _sorted({"image": revision.image, "spec": spec} | engine),
    }
    reason = f"pods of revision {revision.hash} can be built again from what it holds"
    return (CreateRevision(name=name, manifest=manifest, reason=reason),)


def _sorted(value: Any) -> Any:
    """The same JSON with sorted keys.

    The API server writes `data` of a ControllerRevision with sorted keys after a strategic merge patch, and refuses the
    patch if the bytes differ: then the garbage collector could not orphan it.
    """
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def delete_revisions(
    service: InferenceService, stored: Sequence[StoredRevision], *, populated: Iterable[str]
) -> tuple[DeleteRevision, ...]:
    """Delete the revisions that status no longer lists (by `revisionHistoryLimit`), never one that has pods."""
    status = service.status
    kept = {*populated, status.update_revision, status.current_revision, *(one.hash for one in status.revisions)}
    return tuple(
        DeleteRevision(name=one.name, uid=one.uid, reason=f"revision {one.hash} is beyond revisionHistoryLimit")
        for one in stored
        if one.owner_uid == service.metadata.uid and one.hash not in kept
    )


def owner_reference(service: InferenceService) -> dict[str, Any]:
    """The owner reference of a child: it identifies our children, and lets the garbage collector delete them."""
    return {
        "apiVersion": service.api_version,
        "kind": service.kind,
        "name": service.metadata.name,
        "uid": service.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _find(text: str, revisions: tuple[RevisionStatus, ...]) -> str:
    """Find a hash whose short form, which is part of pod names, no other revision has.

    A known hash wins over a free one: it may owe its collision count to a revision that is forgotten by now. At most
    six revisions are known, so one of sixteen candidates is free.
    """
    candidates = _candidates(text)
    known = {revision.hash for revision in revisions}
    taken = {revision.hash[:SHORT_LENGTH] for revision in revisions}
    remembered = [candidate for candidate in candidates if candidate in known]
    free = [candidate for candidate in candidates if candidate[:SHORT_LENGTH] not in taken]
    return (remembered or free)[0]


@lru_cache(maxsize=4096)
def _candidates(text: str) -> tuple[str, ...]:
    return tuple(digest(text, collisions) for collisions in range(16))
