"""Claims waiting pods of a WarmPool for a service and returns them; asks them to load a model and to give it back.

A claim is one JSON patch whose `test` operations hold only while the pod waits for a claim in the pool that the plan
saw. When a test fails, the pod is read: it may be ours already, because the reply to an earlier patch was lost. A
return is the reverse patch; where its tests fail, the service looks at the pod again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import structlog

from slipway_api import names
from slipway_api.pod_labels import PodState, read_state
from slipway_api.runtime_api import LoadModelRequest
from slipway_kube import resources
from slipway_kube.client import Client
from slipway_kube.errors import Conflict, Invalid, NotFound
from slipway_kube.objects import Pod
from slipway_kube.writer import Writer
from slipway_operator.controller.isolation import BackgroundCalls
from slipway_operator.controller.kinds import Key, Memory, StoredObject
from slipway_operator.core.actions import ClaimPod, ReturnPod
from slipway_operator.replica_client import ReplicaClient, address_of

log = structlog.get_logger()

# Of a pod as long as it lives: its admin token is derived from the nonce; the others say what it was made as.
_KEPT = frozenset({names.ANNOTATION_ADMIN_NONCE, names.ANNOTATION_WARM_SHAPE, names.ANNOTATION_WARM_TEMPLATE})
_OF_NODE_SCALERS = frozenset({names.ANNOTATION_SAFE_TO_EVICT, names.ANNOTATION_DO_NOT_DISRUPT})


class Claimer:
    """Executes ClaimPod, LoadModel, ReturnPod and GiveModelBack."""

    def __init__(
        self,
        client: Client,
        writer: Writer,
        replicas: ReplicaClient,
        calls: BackgroundCalls[Key],
        pod_of: Callable[[str, str], Pod | None],
    ) -> None:
        self._client = client
        self._writer = writer
        self._replicas = replicas
        self._calls = calls
        self._pod_of = pod_of

    async def claim(self, key: Key, stored: StoredObject, action: ClaimPod, memory: Memory) -> bool:
        """Make the pod ours; False when it is lost, which is recorded so that the next plan takes another one."""
        try:
            operations = claim_operations(action)
            raw = await self._writer.json_patch(resources.PODS, key.namespace, action.name, operations)
        except (NotFound, Conflict, Invalid) as refused:
            raw = await self._read(key, action)
            if not raw or not _is_claimed_by(raw, stored, action):
                log.info("a claim came too late", object=str(key), pod=action.name, reason=str(refused))
                memory.lost_claims |= {action.uid}
                return False
        pod = msgspec.json.decode(raw, type=Pod)
        seen = self._pod_of(key.namespace, action.name)
        if seen is None or seen.labels.get(names.LABEL_SERVICE) != action.labels[names.LABEL_SERVICE]:
            # The next plan must see the new replica, or it would start another one: so its label is expected.
            service = action.labels[names.LABEL_SERVICE]
            self._writer.expect_label(key, action.uid, names.LABEL_SERVICE, service)
        self._ask(key, pod, action.request)
        return True

    async def give_back(self, key: Key, stored: StoredObject, action: ReturnPod) -> bool:
        """Make the replica a waiting pod of its pool; False where it has changed since the plan saw it."""
        pod = self._pod_of(key.namespace, action.name)
        if pod is None or pod.uid != action.uid:
            return False
        operations = return_operations(pod, stored.uid, action)
        try:
            await self._writer.json_patch(resources.PODS, key.namespace, action.name, operations)
        except (NotFound, Conflict, Invalid) as refused:
            log.info("a pod is not returned", object=str(key), pod=action.name, reason=str(refused))
            return False
        # The next plan must not see it as a draining replica any more.
        now = self._pod_of(key.namespace, action.name)
        if now is not None and read_state(now.labels) is PodState.DRAINING:
            self._writer.expect_label(key, action.uid, names.LABEL_STATE, names.STATE_WARM)
        return True

    def ask_for_model(self, key: Key, stored: StoredObject, name: str, uid: str) -> None:
        """DELETE /model in the background. To a pod that the object does not control, no token is ever sent."""
        pod = self._pod_of(key.namespace, name)
        if pod is None or pod.uid != uid or not pod.status.pod_ip or address_of(pod).owner_uid != stored.uid:
            return
        self._calls.start(key, uid, partial(self._replicas.give_model_back, address_of(pod)))

    def ask_to_load(self, key: Key, stored: StoredObject, name: str, uid: str, request: LoadModelRequest) -> None:
        """POST /model in the background. To a pod that the object does not control, no token is ever sent."""
        pod = self._pod_of(key.namespace, name)
        if pod is None or pod.uid != uid or not pod.status.pod_ip or address_of(pod).owner_uid != stored.uid:
            return
        self._ask(key, pod, request)

    def _ask(self, key: Key, pod: Pod, request: LoadModelRequest) -> None:
        self._calls.start(key, pod.uid, partial(self._replicas.load_model, address_of(pod), request))

    async def _read(self, key: Key, action: ClaimPod) -> bytes:
        try:
            return await self._client.get(resources.PODS.path(key.namespace, action.name))
        except NotFound:
            return b""


def claim_operations(action: ClaimPod) -> list[dict[str, Any]]:
    """The JSON patch of a claim: tests first, then owner, labels and annotations."""
    operations: list[dict[str, Any]] = [
        {"op": "test", "path": "/metadata/uid", "value": action.uid},
        {"op": "test", "path": f"/metadata/labels/{_escaped(names.LABEL_STATE)}", "value": names.STATE_WARM},
        {"op": "test", "path": "/metadata/ownerReferences/0/uid", "value": action.pool_uid},
        {"op": "replace", "path": "/metadata/ownerReferences", "value": [dict(action.owner)]},
    ]
    for field, values in (("labels", action.labels), ("annotations", action.annotations)):
        for name, value in values.items():
            operations.append({"op": "add", "path": f"/metadata/{field}/{_escaped(name)}", "value": value})
    return operations


def return_operations(pod: Pod, owner_uid: str, action: ReturnPod) -> list[dict[str, Any]]:
    """The JSON patch of a return: tests first, then owner, labels and annotations.

    What others have put on the pod stays, such as the annotations of its network.
    """
    operations: list[dict[str, Any]] = [
        {"op": "test", "path": "/metadata/uid", "value": action.uid},
        {"op": "test", "path": "/metadata/resourceVersion", "value": pod.metadata.resource_version},
        {"op": "test", "path": f"/metadata/labels/{_escaped(names.LABEL_STATE)}", "value": names.STATE_DRAINING},
        {"op": "test", "path": "/metadata/ownerReferences/0/uid", "value": owner_uid},
        {"op": "replace", "path": "/metadata/ownerReferences", "value": [dict(action.pool_owner)]},
    ]
    for field, has, wanted in (
        ("labels", pod.labels, action.labels),
        ("annotations", pod.metadata.annotations, action.annotations),
    ):
        for name in has:
            is_ours = name.startswith(f"{names.GROUP}/") or name in _OF_NODE_SCALERS or name in action.dropped
            if is_ours and name not in wanted and name not in _KEPT:
                operations.append({"op": "remove", "path": f"/metadata/{field}/{_escaped(name)}"})
        for name, value in wanted.items():
            operations.append({"op": "add", "path": f"/metadata/{field}/{_escaped(name)}", "value": value})
    return operations


def _is_claimed_by(raw: bytes, stored: StoredObject, action: ClaimPod) -> bool:
    """Whether the pod is this object's replica in this slot: an earlier patch of ours arrived, its reply did not."""
    pod = msgspec.json.decode(raw, type=Pod)
    owners = {owner.uid for owner in pod.metadata.owner_references if owner.controller}
    slot = (names.LABEL_REVISION, names.LABEL_SLOT, names.LABEL_ATTEMPT)
    same_slot = all(pod.labels.get(label) == action.labels[label] for label in slot)
    return pod.uid == action.uid and owners == {stored.uid} and same_slot


def _escaped(name: str) -> str:
    """A name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
