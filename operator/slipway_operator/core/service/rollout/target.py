"""Chooses the revision that replicas are rolled to: the one that the spec asks for, or the one before it.

| what is so                                                        | rolled to                               |
|-------------------------------------------------------------------|-----------------------------------------|
| annotation rollback-to names another revision in status           | that one; the spec's counts as failed   |
| annotation abort names the spec's revision                        | the stable one; the spec's has failed   |
| annotation promote names it                                       | the spec's, without further steps       |
| its analysis or its smoke tests failed                            | the stable one; the spec's has failed   |
| otherwise                                                         | the spec's                              |

**A missing record holds.** If the ControllerRevision that the choice needs is missing or cannot be read, nothing is
chosen: `Target.held` says which one, and replicas, weights and gates stay as they are. A service whose
`status.currentRevision` has served is never taken for a first start. `promote` is a person's decision to continue
without the stable revision.

`status.failedRevision` remembers the decision, so that the spec, which still asks for the failed revision, does not
bring it back. It holds until the spec asks for another revision. A rollback-to that stays on the object after that is
stale, and has no effect until it is removed and set again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slipway_api import names
from slipway_api.inference_service import InferenceService
from slipway_operator.core.service.rollout.revision import Revision, record_name


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
    held: str = ""
    """Which record of a revision is missing or unreadable, and the remedy; the rollout is held until it is there."""

    @property
    def is_rollback(self) -> bool:
        """Whether it is another revision than the spec's."""
        return self.revision.hash != self.asked.hash


def choose_target(
    service: InferenceService, asked: Revision, stored: Sequence[Revision], unreadable: Mapping[str, str]
) -> Target:
    """Choose by the table above. `unreadable` maps the hash of a record that cannot be read to the reason."""
    status, annotations = service.status, service.metadata.annotations
    by_hash = {one.hash: one for one in stored}
    current = by_hash.get(status.current_revision) if _has_served(service) else None
    others = {one.hash for one in status.revisions} - {asked.hash}
    named = annotations.get(names.ANNOTATION_ROLLBACK_TO, "")
    failed = status.failed_revision
    if failed != asked.hash and not named:
        failed = ""  # the spec asks for another revision
    if named in others and failed in ("", asked.hash):
        if named not in by_hash:
            return _hold(service, asked, named, unreadable, which="requested", failed=asked.hash)
        back = by_hash[named]
        why = f"the annotation {names.ANNOTATION_ROLLBACK_TO} asks for {named}"
        stable = current if current and current.hash != named else None
        return Target(revision=back, asked=asked, stable=stable, failed=asked.hash, reason=why)

    if asked.hash in unreadable:
        return _hold(service, asked, asked.hash, unreadable, which="present", failed=failed)
    is_complete = status.current_revision == asked.hash
    stable = None if is_complete else current
    if is_complete and failed == asked.hash:
        failed = ""  # a rollback from it was taken back
    is_aborted = annotations.get(names.ANNOTATION_ABORT) == asked.hash
    is_promoted = annotations.get(names.ANNOTATION_PROMOTE) == asked.hash and not is_aborted
    if is_promoted and not is_complete and _has_served(service):
        forgotten = "" if failed == asked.hash else failed
        return Target(revision=asked, asked=asked, stable=stable, failed=forgotten, is_promoted=True)
    if not is_complete and current is None and _has_served(service):
        failed = asked.hash if is_aborted else failed
        return _hold(service, asked, status.current_revision, unreadable, which="stable", failed=failed)
    if stable and (is_aborted or failed == asked.hash):
        why = f"the annotation {names.ANNOTATION_ABORT} names {asked.hash}" if is_aborted else ""
        return Target(revision=stable, asked=asked, stable=None, failed=asked.hash, reason=why)
    return Target(revision=asked, asked=asked, stable=stable, failed=failed)


def _has_served(service: InferenceService) -> bool:
    """Whether the current revision has served completely. One that status.revisions no longer lists has."""
    current = service.status.current_revision
    listed = {one.hash: one.served for one in service.status.revisions}
    return bool(current) and listed.get(current, True)


def _hold(
    service: InferenceService, asked: Revision, needed: str, unreadable: Mapping[str, str], *, which: str, failed: str
) -> Target:
    """Stay at the present revisions until the record of the revision `needed` can be read."""
    fault = f"cannot be read ({unreadable[needed]})" if needed in unreadable else "is missing"
    record = f"ControllerRevision {record_name(service, needed)} of the {which} revision {fault}"
    read_it = "run the version of the operator that wrote it" if needed in unreadable else "restore it"
    if needed == asked.hash:
        remedy = f"{read_it}, or delete it: it is then stored again from the spec"
    else:
        name, namespace = service.metadata.name, service.metadata.namespace
        accept = f"kubectl annotate infsvc {name} -n {namespace} {names.ANNOTATION_PROMOTE}={asked.hash}"
        back = f"set the spec back to that of revision {needed}, which stores it again"
        if needed in unreadable:
            back = f"delete it and {back}"
        remedy = f"{read_it}, {back}, or accept revision {asked.hash} untested: {accept}"
    sentence = f"the rollout is held: {record}; {remedy}"
    return Target(revision=asked, asked=asked, stable=None, failed=failed, held=sentence)
