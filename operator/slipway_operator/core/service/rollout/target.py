"""Chooses the revision that replicas are rolled to: the one that the spec asks for, or the one before it.

| what is so                                                        | rolled to                               |
|-------------------------------------------------------------------|-----------------------------------------|
| annotation rollback-to names another revision in status           | that one; the spec's counts as failed   |
| annotation abort names the spec's revision                        | the stable one; the spec's has failed   |
| annotation promote names it                                       | the spec's, without further steps       |
| its analysis or its smoke tests failed                            | the stable one; the spec's has failed   |
| otherwise                                                         | the spec's                              |

`status.failedRevision` remembers the decision, so that the spec, which still asks for the failed revision, does not
bring it back. It holds until the spec asks for another revision. A rollback-to that stays on the object after that is
stale, and has no effect until it is removed and set again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slipway_api import names
from slipway_api.inference_service import InferenceService
from slipway_operator.core.service.rollout.revision import Revision


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The revision that replicas are rolled to, and the one that serves meanwhile."""

    revision: Revision
    asked: Revision
    """The one that the spec asks for."""
    stable: Revision | None
    """The last that served completely, while another is rolled to; lost replicas of it are rebuilt. None: not stored,
    or it never served."""
    failed: str = ""
    """Hash for status.failedRevision."""
    reason: str = ""
    """Why it is not the one that the spec asks for."""
    is_promoted: bool = False

    @property
    def is_rollback(self) -> bool:
        """Whether it is another revision than the spec's."""
        return self.revision.hash != self.asked.hash


def choose_target(service: InferenceService, asked: Revision, stored: Sequence[Revision]) -> Target:
    """Choose by the table above. Only stored revisions can be rolled back to."""
    status, annotations = service.status, service.metadata.annotations
    by_hash = {one.hash: one for one in stored}
    served = {one.hash for one in status.revisions if one.served}
    current = by_hash.get(status.current_revision) if status.current_revision in served else None
    others = {one.hash for one in status.revisions} - {asked.hash}
    named = annotations.get(names.ANNOTATION_ROLLBACK_TO, "")
    failed = status.failed_revision
    if failed != asked.hash and not named:
        failed = ""  # the spec asks for another revision
    if named in others and named in by_hash and failed in ("", asked.hash):
        back = by_hash[named]
        why = f"the annotation {names.ANNOTATION_ROLLBACK_TO} asks for {named}"
        stable = current if current and current.hash != named else None
        return Target(revision=back, asked=asked, stable=stable, failed=asked.hash, reason=why)

    is_complete = status.current_revision == asked.hash
    stable = None if is_complete else current
    if is_complete and failed == asked.hash:
        failed = ""  # a rollback from it was taken back
    is_aborted = annotations.get(names.ANNOTATION_ABORT) == asked.hash
    if annotations.get(names.ANNOTATION_PROMOTE) == asked.hash and stable and not is_aborted:
        forgotten = "" if failed == asked.hash else failed
        return Target(revision=asked, asked=asked, stable=stable, failed=forgotten, is_promoted=True)
    if stable and (is_aborted or failed == asked.hash):
        why = f"the annotation {names.ANNOTATION_ABORT} names {asked.hash}" if is_aborted else ""
        return Target(revision=stable, asked=asked, stable=None, failed=asked.hash, reason=why)
    return Target(revision=asked, asked=asked, stable=stable, failed=failed)
