"""Restores edited labels of what a service controls: its replicas, pods that pull, and ControllerRevisions. Pure.

The state of a replica is written back as the operator recorded it in the annotations of a drain. A replica that should
serve, but drains in its runtime, because its label said so for a while, is asked to serve first: the label follows when
the runtime accepts requests again.
"""

from datetime import datetime, timedelta
from typing import Final

from slipway_api import names
from slipway_operator.core.actions import Steps, UndrainPod
from slipway_operator.core.labels import restore_labels
from slipway_operator.core.observed import Observed, Replica

ASK_AGAIN: Final = timedelta(seconds=2)


def restore_edited(observed: Observed, now: datetime) -> Steps:
    """The steps after which all labels are as they should be."""
    uid = observed.service.metadata.uid
    replicas = [one for one in observed.replicas if one.owner_uid == uid and one.edited_labels]
    draining = [one for one in replicas if _drains_by_mistake(one)]
    steps = restore_labels(replicas, but_state_of=frozenset(one.uid for one in draining))
    for one in draining:
        reason = f"the label {names.LABEL_STATE} of {one.name} was edited, and nothing asks it to drain"
        steps += Steps(actions=(UndrainPod(name=one.name, uid=one.uid, reason=reason),), again_at=now + ASK_AGAIN)
    pulls = observed.pulls.pods if observed.pulls is not None else ()
    steps += restore_labels(one for one in pulls if one.owner_uid == uid)
    return steps + restore_labels(
        (one for one in observed.revisions if one.owner_uid == uid), kind="ControllerRevision"
    )


def _drains_by_mistake(replica: Replica) -> bool:
    is_edited = any(one.label == names.LABEL_STATE for one in replica.edited_labels)
    drains = replica.sample is not None and replica.sample.draining
    return is_edited and drains and replica.state == names.STATE_SERVING and replica.deleted_at is None
