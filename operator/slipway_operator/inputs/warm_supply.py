"""What services see of the WarmPools that they name, and wakes a service when its pool has another pod to claim."""

from collections import defaultdict
from typing import Any

from pydantic import ValidationError

from slipway_api import names
from slipway_api.inference_service import InferenceService
from slipway_api.pod_labels import PodState, read_state
from slipway_api.warm_pool import WarmPool
from slipway_kube.informer import Change
from slipway_kube.objects import Pod
from slipway_kube.resources import INFERENCE_SERVICES, WARM_POOLS
from slipway_operator.controller.kinds import Key, StoredObject
from slipway_operator.controller.queue import Urgency
from slipway_operator.core.warm_pool.supply import WarmPod, WarmSupply
from slipway_operator.inputs.caches import Inputs
from slipway_operator.inputs.observer import PoolKey, node_facts, replica
from slipway_operator.inputs.pool_index import PoolIndex


class WarmSupplies:
    """The waiting pods of pools, by the service that may claim them."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._index = PoolIndex()
        self._users: defaultdict[PoolKey, set[Key]] = defaultdict(set)
        inputs.caches.on_pod_change(self._saw_pod)
        inputs.caches.on_object_change(INFERENCE_SERVICES.kind, self._saw_service)
        inputs.caches.on_object_change(WARM_POOLS.kind, self._saw_pool_object)
        inputs.on_pool_sample(self._wake_users)

    def of(self, service: InferenceService) -> WarmSupply | None:
        """The pool that a service names; None where it names none."""
        wanted = service.spec.warm_pool
        if wanted is None:
            return None
        key = PoolKey(service.metadata.namespace, wanted.name)
        store = self._inputs.caches.stores.get(WARM_POOLS.kind)
        pool = store.get(Key(WARM_POOLS.kind, *key)) if store is not None else None
        if pool is None or pool.body["metadata"].get("deletionTimestamp"):
            is_unreadable = WARM_POOLS.plural in self._inputs.caches.access.refused_in(key.namespace)
            return WarmSupply(pool=wanted.name, is_unreadable=is_unreadable)
        pods = tuple(self._facts(pod) for pod in self._index.of(key) if waits(pod, pool.uid))
        return WarmSupply(pool=wanted.name, pool_uid=pool.uid, pods=pods, resource=_read(pool))

    def _facts(self, pod: Pod) -> WarmPod:
        sample = replica(pod, self._inputs.sample_of(pod.uid)).sample
        node = self._inputs.caches.nodes.get(("", pod.spec.node_name))
        facts = node_facts(node) if node is not None else None
        return WarmPod(
            name=pod.name,
            uid=pod.uid,
            shape=pod.metadata.annotations.get(names.ANNOTATION_WARM_SHAPE, ""),
            starting=sample.starting if sample is not None else "",
            sampled_at=sample.at if sample is not None else None,
            on_bad_node=facts is not None and (facts.cordoned or not facts.ready),
            is_over=pod.is_terminating or pod.status.phase in ("Failed", "Succeeded"),
        )

    def _saw_pod(self, change: Change, old: Pod | None, new: Pod | None, _services: Any) -> None:
        self._index.saw(old, None if change is Change.DELETED else new)

    def _saw_service(self, key: Key, old: StoredObject | None, new: StoredObject | None) -> None:
        for stored, change in ((old, set.discard), (new, set.add)):
            name = _pool_name(stored)
            if name:
                change(self._users[PoolKey(key.namespace, name)], key)

    def _saw_pool_object(self, key: Key, old: StoredObject | None, new: StoredObject | None) -> None:
        """A service that requires the pool is Stalled while there is none."""
        if (old is None) != (new is None):
            self._wake_users(PoolKey(key.namespace, key.name))

    def _wake_users(self, pool: PoolKey) -> None:
        """A pod of the pool has a news: a service that waits for one may have it."""
        for key in self._users.get(pool, ()):
            self._inputs.wake(key, Urgency.NORMAL)


def _read(pool: StoredObject) -> WarmPool | None:
    try:
        return WarmPool.model_validate(pool.body)
    except ValidationError:
        return None


def waits(pod: Pod, pool_uid: str) -> bool:
    """Whether the pod waits for a claim in the pool of this uid."""
    owners = {owner.uid for owner in pod.metadata.owner_references if owner.controller}
    return owners == {pool_uid} and read_state(pod.labels) is PodState.WARM


def _pool_name(stored: StoredObject | None) -> str:
    """The pool that a stored service names; also where its spec cannot be read."""
    spec = stored.body.get("spec") if stored is not None else None
    reference = spec.get("warmPool") if isinstance(spec, dict) else None
    name = reference.get("name") if isinstance(reference, dict) else ""
    return name if isinstance(name, str) else ""
