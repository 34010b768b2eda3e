"""Decides when a service takes the runtime image of a newer installation. Pure.

A revision keeps the image that it began with. Where the installation's image is another one by now, the policy decides:

| policy       | what happens                                                                             |
|--------------|------------------------------------------------------------------------------------------|
| OnSpecChange | nothing; the next new revision gets the new image                                        |
| Auto         | the same inputs become a new revision with the new image, which rolls out as any other   |
| Window       | likewise, while the window is open; a rollout that began in it goes on after it          |

An upgrade waits until the present revision serves completely, and it is not tried again where it was rolled back: the
hash of the upgraded revision covers the image, and `status.failedRevision` remembers it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from slipway_api.inference_service import InferenceService
from slipway_api.inference_status import PendingUpgrade
from slipway_api.upgrade_spec import UpgradePolicy, UpgradeWindow
from slipway_operator.core.engines import PinnedEngine
from slipway_operator.core.scaling.schedules import starts_around
from slipway_operator.core.service.rollout.revision import Revision, is_upgrade, resolve, upgraded


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The revision that the spec and the upgrade policy ask for, and the upgrade that is still to come."""

    revision: Revision
    pending: PendingUpgrade | None = None
    """For status.pendingUpgrade."""
    again_at: datetime | None = None
    """When the window opens."""


def choose_revision(
    service: InferenceService,
    offered: str,
    stored: Sequence[Revision],
    now: datetime,
    engine: PinnedEngine | None = None,
) -> Asked:
    """Choose the revision; `offered` is the runtime image of the installation.

    The hash covers a foreign engine with its image: another one is another revision, and there is nothing to upgrade.
    """
    if engine is not None:
        return Asked(revision=resolve(service, engine.spec.image, stored, engine))
    revision = resolve(service, offered, stored)
    spec, status = service.spec.runtime, service.status
    if spec.image or not offered or revision.image == offered:
        return Asked(revision=revision)

    def wait(reason: str, not_before: datetime | None = None) -> Asked:
        pending = PendingUpgrade(image=offered, from_image=revision.image, not_before=not_before, reason=reason)
        return Asked(revision=revision, pending=pending, again_at=not_before)

    if spec.upgrade_policy is UpgradePolicy.ON_SPEC_CHANGE:
        return wait("upgradePolicy OnSpecChange: the next new revision takes it")
    if service.paused_by:
        return wait(service.paused_by)
    if status.failed_revision == revision.hash:
        if not is_upgrade(service, revision):
            return wait(f"revision {revision.hash} was rolled back: the next new revision takes it")
    elif status.current_revision != revision.hash:
        return wait(f"the rollout of revision {revision.hash} has to be complete")
    if spec.upgrade_policy is UpgradePolicy.WINDOW and spec.upgrade_window:
        is_open, opens_at = _look_at(spec.upgrade_window, now)
        if not is_open:
            return wait("upgradePolicy Window: it starts when upgradeWindow opens", opens_at)
    return Asked(revision=upgraded(service, offered))


def _look_at(window: UpgradeWindow, now: datetime) -> tuple[bool, datetime | None]:
    """Whether the window is open, and when it opens next."""
    last, following = starts_around(window.schedule, window.time_zone, now)
    is_open = last is not None and now < last + timedelta(seconds=window.duration_seconds)
    return is_open, following
