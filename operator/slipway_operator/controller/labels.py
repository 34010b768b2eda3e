"""Executes RestoreLabels: one merge patch, guarded by the object's uid."""

from collections.abc import Mapping

import structlog

from slipway_kube import resources
from slipway_kube.errors import Conflict, KubeError, NotFound
from slipway_kube.writer import Writer
from slipway_operator.controller.executor import Perform, Result
from slipway_operator.controller.kinds import Key, StoredObject
from slipway_operator.core.actions import RestoreLabels

log = structlog.get_logger()

RESOURCES = {one.kind: one for one in (resources.PODS, resources.CONTROLLER_REVISIONS)}


class LabelWriter:
    """Writes labels of pods and ControllerRevisions back."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    @property
    def performers(self) -> Mapping[type, Perform]:
        """For the executor."""
        return {RestoreLabels: self.restore}

    async def restore(self, key: Key, _stored: StoredObject, action: RestoreLabels) -> Result:
        """Set and remove the labels. With the uid in the body, another object of that name is left alone."""
        label, value = next(iter(action.labels.items()))
        # The next plan must see the labels, or it would write and report them again.
        self._writer.expect_label(key, action.uid, label, value)
        body = {"metadata": {"uid": action.uid, "labels": dict(action.labels)}}
        try:
            await self._writer.merge_patch(RESOURCES[action.kind], key.namespace, action.name, body)
        except (NotFound, Conflict):
            self._writer.expectations.retract_label(action.uid)
            log.info("nothing left to label", object=str(key), kind=action.kind, name=action.name)
            return Result.NOT_NEEDED
        except KubeError:
            self._writer.expectations.retract_label(action.uid)
            raise
        return Result.DONE
