"""Marks replicas as draining or serving: the label `state` and the annotations of a drain, by server-side apply.

An apply takes away what its field manager set earlier and does not name any more. Two applies of one manager with
different fields would undo each other, so all that the manager slipway-operator-meta owns is named in one place:
`state_metadata`, as a function of the state. Metadata for another purpose gets another manager, as adapters have.
"""

from collections.abc import Callable
from datetime import datetime
from typing import Any

import structlog

from slipway_api import names
from slipway_api.pod_labels import PodState, read_state
from slipway_api.types import rfc3339
from slipway_kube import resources
from slipway_kube.errors import Conflict, NotFound
from slipway_kube.objects import Pod
from slipway_kube.writer import Writer
from slipway_operator.controller.kinds import Key

log = structlog.get_logger()

REASONS_SHOWN = 200  # characters of a drain reason that go into an annotation


def state_metadata(*, drain_started: datetime | None = None, drain_reason: str = "") -> dict[str, dict[str, str]]:
    """All labels and annotations that slipway-operator-meta sets on a pod; without a drain, those of a serving one."""
    if drain_started is None:
        return {"labels": {names.LABEL_STATE: names.STATE_SERVING}}
    return {
        "labels": {names.LABEL_STATE: names.STATE_DRAINING},
        "annotations": {
            names.ANNOTATION_DRAIN_STARTED: rfc3339(drain_started),
            names.ANNOTATION_DRAIN_REASON: drain_reason[:REASONS_SHOWN],
        },
    }


class PodStates:
    """Writes the state of pods."""

    def __init__(self, writer: Writer, pod_of: Callable[[str, str], Pod | None]) -> None:
        """`pod_of` finds a cached pod by namespace and name."""
        self._writer = writer
        self._pod_of = pod_of

    async def mark_draining(self, key: Key, name: str, uid: str, *, started: datetime, reason: str) -> bool:
        """Label the pod as draining, and note since when and why; False if the pod is gone, so nothing drains."""
        pod = self._pod_of(key.namespace, name)
        is_shown = pod is not None and read_state(pod.labels) is PodState.DRAINING
        metadata = state_metadata(drain_started=started, drain_reason=reason)
        try:
            # The next plan must see this label, or it would drain a second replica: so the label is expected.
            await self._apply(key, name, uid, metadata, owner=None if is_shown else key)
        except (NotFound, Conflict):
            # The pod is deleted, or another one has its name: nothing is left to drain.
            log.info("nothing left to drain", object=str(key), pod=name)
            return False
        return True

    async def mark_serving(self, key: Key, name: str, uid: str) -> None:
        """Label the pod as serving; the annotations of its drain go."""
        await self._apply(key, name, uid, state_metadata(), owner=key)

    async def _apply(
        self, key: Key, name: str, uid: str, metadata: dict[str, dict[str, str]], *, owner: Key | None
    ) -> None:
        """With the pod's uid in the body, a deleted pod is never created anew."""
        identity = {"name": name, "namespace": key.namespace, "uid": uid}
        body: dict[str, Any] = {"apiVersion": "v1", "kind": "Pod", "metadata": {**identity, **metadata}}
        await self._writer.label(
            resources.PODS,
            key.namespace,
            name,
            body,
            label=names.LABEL_STATE,
            field_manager=names.FIELD_MANAGER_META,
            owner=owner,
        )
