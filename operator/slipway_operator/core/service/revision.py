"""Which revision the spec asks for: a hash of what the user wrote about the pods, and of nothing else.

Operator version, certificates, scale, drain and rollout settings are not in it, so none of them restarts a pod.
Values equal to their default are left out before hashing: a newer operator with a new field, or a default written out
by the API server, gives the same hash. An empty `runtime.image` stays empty in the hash; which image that means is
frozen in status when the revision is first seen.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Final

from slipway_api.inference_service import InferenceService, InferenceServiceSpec
from slipway_api.inference_status import RevisionStatus

HASH_LENGTH: Final = 10
SHORT_LENGTH: Final = 5  # in the names of pods
# Kubernetes' alphabet for generated names: no vowels, so no words; no digit that looks like a letter.
_ALPHABET: Final = "bcdfghjklmnpqrstvwxz2456789"
_INPUTS: Final[dict[str, bool | set[str]]] = {
    "model": True,
    "runtime": True,
    "resources": True,
    "template": True,
    "routing": {"direct_access"},  # pods are told at their start which callers they answer
}


@dataclass(frozen=True, slots=True)
class Revision:
    """A set of user-visible inputs, and the runtime image that it got."""

    hash: str
    image: str

    @property
    def short(self) -> str:
        """The part of the hash that names pods."""
        return self.hash[:SHORT_LENGTH]


def inputs(spec: InferenceServiceSpec) -> str:
    """What is hashed: canonical JSON of what the user wrote about the pods, without defaults."""
    written = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude_none=True, include=_INPUTS)
    written = {section: values for section, values in written.items() if values}
    return json.dumps(written, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def digest(text: str, collisions: int = 0) -> str:
    """The hash of such inputs; `collisions` counts revisions whose short form was taken."""
    number = int.from_bytes(hashlib.sha256(f"{collisions}\n{text}".encode()).digest())
    letters = []
    for _ in range(HASH_LENGTH):
        number, letter = divmod(number, len(_ALPHABET))
        letters.append(_ALPHABET[letter])
    return "".join(letters)


def resolve(service: InferenceService, default_image: str) -> Revision:
    """The revision that the spec asks for; a known one keeps its hash and its image."""
    known = {revision.hash: revision for revision in service.status.revisions}
    text = inputs(service.spec)
    chosen = digest(text)
    if chosen not in known:
        chosen = _find(text, service.status.revisions)
    frozen = known[chosen].image if chosen in known else ""
    return Revision(hash=chosen, image=frozen or service.spec.runtime.image or default_image)


def _find(text: str, revisions: tuple[RevisionStatus, ...]) -> str:
    """The hash whose short form, which names pods, no other revision has.

    A known hash wins over a free one: it may owe its collision count to a revision that is forgotten by now. At most
    six revisions are known, so one of sixteen candidates is free.
    """
    candidates = [digest(text, collisions) for collisions in range(16)]
    known = {revision.hash for revision in revisions}
    taken = {revision.hash[:SHORT_LENGTH] for revision in revisions}
    remembered = [candidate for candidate in candidates if candidate in known]
    free = [candidate for candidate in candidates if candidate[:SHORT_LENGTH] not in taken]
    return (remembered or free)[0]
