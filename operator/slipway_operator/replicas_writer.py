"""Writes `spec.replicas` of services in mode External if the manifest leaves it out, under its own field manager."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import structlog

from slipway_api import names
from slipway_kube.errors import Conflict
from slipway_kube.resources import INFERENCE_SERVICES
from slipway_kube.writer import Writer
from slipway_operator.controller.kinds import Key, StoredObject
from slipway_operator.core.actions import SetReplicas

log = structlog.get_logger()


def replicas_performers(writer: Writer) -> Mapping[type, Callable[[Key, StoredObject, Any], Awaitable[None]]]:
    """The function that executes SetReplicas."""

    async def set_replicas(key: Key, stored: StoredObject, action: SetReplicas) -> None:
        metadata = {"uid": stored.uid, "resourceVersion": stored.body["metadata"]["resourceVersion"]}
        body = {"metadata": metadata, "spec": {"replicas": action.replicas}}
        manager = names.FIELD_MANAGER_REPLICAS
        try:
            # Unforced, and only to the version that was read: a number that somebody else wrote stays.
            await writer.apply(INFERENCE_SERVICES, key.namespace, key.name, body, field_manager=manager, force=False)
        except Conflict:
            log.info("the service changed before its replicas were set", object=str(key))

    return {SetReplicas: set_replicas}
