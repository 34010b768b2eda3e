"""Objects in a namespace that may not be read: they are left as they are, except while their namespace is deleted.

Without its pods an object cannot be planned: it would get new ones. But a namespace that is being deleted loses our
Role at any moment, and a finalizer that nobody may remove would keep it Terminating: so the finalizer is removed
without a drain. Kubernetes deletes the pods then, and their preStop drains them.
"""

from collections.abc import Mapping
from typing import Final

import msgspec
import structlog

from slipway_api import names
from slipway_kube.client import Client
from slipway_kube.errors import KubeError, NotFound
from slipway_kube.objects import Object
from slipway_kube.resources import NAMESPACES
from slipway_operator.controller.executor import Executor
from slipway_operator.controller.kinds import Key, Memory, StoredObject
from slipway_operator.controller.reconciler import Outcome
from slipway_operator.controller.store import ObjectStore
from slipway_operator.core.actions import RemoveFinalizer

log = structlog.get_logger()

LOOK_AGAIN_SECONDS: Final = 15.0


class HiddenObjects:
    """Reconciles objects whose namespace may not be read."""

    def __init__(self, client: Client, stores: Mapping[str, ObjectStore], executor: Executor) -> None:
        self._client = client
        self._stores = stores
        self._executor = executor

    async def reconcile(self, key: Key) -> Outcome:
        """Remove our finalizer if object and namespace are being deleted; otherwise wait for the right to read."""
        stored = self._stores[key.kind].get(key)
        if stored is None or not _waits_for_us(stored):
            return Outcome()
        if not await self._is_being_deleted(key.namespace):
            return Outcome(LOOK_AGAIN_SECONDS)
        reason = f"namespace {key.namespace} is being deleted, and its pods may not be read any more"
        log.warning("released without a drain", object=str(key), reason=reason)
        action = RemoveFinalizer(finalizer=names.FINALIZER, reason=reason)
        execution = await self._executor.execute(key, stored, (action,), Memory())
        if execution.error is not None:
            raise execution.error
        if not execution.refused:
            return Outcome()
        log.warning("cannot remove the finalizer", object=str(key), error=execution.refused[0].message)
        return Outcome(LOOK_AGAIN_SECONDS)

    async def _is_being_deleted(self, namespace: str) -> bool:
        try:
            found = msgspec.json.decode(await self._client.get(NAMESPACES.path(name=namespace)), type=Object)
        except NotFound:
            return True
        except KubeError as error:
            log.info("cannot look whether a namespace is being deleted", namespace=namespace, error=str(error))
            return False
        return found.is_terminating


def _waits_for_us(stored: StoredObject) -> bool:
    """Whether the object is being deleted and has our finalizer."""
    metadata = stored.body["metadata"]
    return bool(metadata.get("deletionTimestamp")) and names.FINALIZER in (metadata.get("finalizers") or ())
