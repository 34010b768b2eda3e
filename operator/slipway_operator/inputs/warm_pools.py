"""The controller's kind WarmPool: builds `ObservedPool` from caches, returns the core's plan as a `Decision`."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, cast

from pydantic import ValidationError

from slipway_api import names
from slipway_api.inference_service import GPU
from slipway_api.service_template import with_inherited
from slipway_api.warm_pool import WarmPool
from slipway_kube.informer import Change
from slipway_kube.objects import Node, Pod
from slipway_kube.resources import INFERENCE_SERVICES, WARM_POOLS, Resource
from slipway_operator.controller.kinds import Decision, Key, Memory, StoredObject
from slipway_operator.controller.queue import Urgency
from slipway_operator.core.observed import Sample
from slipway_operator.core.warm_pool.observed import HungryReplica, ObservedPool, PoolPod
from slipway_operator.core.warm_pool.plan import plan
from slipway_operator.inputs.caches import Inputs
from slipway_operator.inputs.labels import service_name
from slipway_operator.inputs.observer import PoolKey, moment_of, node_facts, replica, service_of
from slipway_operator.inputs.pool_index import PoolIndex

KIND = WARM_POOLS.kind


class WarmPools:
    """Observes one WarmPool, and plans for it."""

    name: str = KIND
    resource: Resource = WARM_POOLS

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._index = PoolIndex()
        inputs.caches.on_pod_change(self._saw_pod)
        inputs.caches.on_node_change(self._saw_node)
        inputs.caches.on_object_change(KIND, self._saw_pool)

    # --- changes of the caches ----------------------------------------------------------------------------------------

    def _saw_pod(self, change: Change, old: Pod | None, new: Pod | None, _services: Any) -> None:
        pools, namespaces = self._index.saw(old, None if change is Change.DELETED else new)
        known = self._inputs.caches.stores[KIND].keys()
        pools |= {PoolKey(key.namespace, key.name) for key in known if key.namespace in namespaces}
        for pool in pools:
            self._inputs.wake(Key(KIND, *pool), Urgency.NORMAL)

    def _saw_pool(self, key: Key, _old: StoredObject | None, new: StoredObject | None) -> None:
        """Show the pool's counts as metrics."""
        status = (new.body.get("status") or {}) if new is not None else {}
        for state in ("ready", "warming", "claimed"):
            if new is None:
                with contextlib.suppress(KeyError):
                    self._inputs.metrics.warm_pods.remove(key.namespace, key.name, state)
            else:
                self._inputs.metrics.warm_pods.labels(key.namespace, key.name, state).set(status.get(state) or 0)

    def _saw_node(self, old: Node | None, new: Node | None) -> None:
        before = node_facts(old) if old is not None else None
        after = node_facts(new) if new is not None else None
        node = new or old
        if before == after or node is None:
            return
        for pool in self._index.pools():
            if any(pod.spec.node_name == node.name for pod in self._index.of(pool)):
                self._inputs.wake(Key(KIND, *pool), Urgency.NORMAL)

    # --- the interface `Kind` -----------------------------------------------------------------------------------------

    def observe(self, key: Key, stored: StoredObject, memory: Memory) -> ObservedPool:
        """Build the snapshot from which the core decides."""
        reading = read_pool(stored.body)
        caches = self._inputs.caches
        pods = self._index.of(PoolKey(key.namespace, key.name))
        observed = ObservedPool(
            pool=reading.pool,
            fault=reading.fault,
            pods=tuple(
                pool_pod(pod, self._inputs.sample_of(pod.uid), self._inputs.mount_failure_of(pod.uid)) for pod in pods
            ),
            nodes={
                name: node_facts(node)
                for name in sorted({pod.spec.node_name for pod in pods if pod.spec.node_name})
                if (node := caches.nodes.get(("", name))) is not None
            },
            hungry=tuple(self._hungry_facts(pod) for pod in self._index.hungry(key.namespace)),
            defaults=self._inputs.defaults,
            token_digests=self._inputs.token_digests,
            nonce_seed=self._inputs.random_bytes(32),
            certificate_fault=self._inputs.certificate_fault_of(key.namespace),
        )
        return self.with_memory(observed, memory)

    def with_memory(self, observed: ObservedPool, memory: Memory) -> ObservedPool:
        """The same observation with the results of earlier passes and of the executor."""
        return replace(
            observed,
            booted_before=cast("frozenset[str] | None", memory.carried),
            taken_names=memory.taken_names,
            failures=memory.failures,
        )

    def plan(self, observed: ObservedPool, now: datetime) -> Decision:
        """Run the core's `plan`."""
        decided = plan(observed, now)
        return Decision(
            actions=decided.actions,
            status=decided.status.to_json() if decided.status is not None else None,
            status_before=observed.pool.status.to_json(),
            notes=decided.notes,
            pod_uids={pod.name: pod.replica.uid for pod in observed.pods},
            requeue_after=decided.requeue_after,
            carried=decided.booted,
        )

    def _hungry_facts(self, pod: Pod) -> HungryReplica:
        """With the GPUs that its service asks for; none where the service is gone, or cannot be read."""
        service = service_of(pod)
        store = self._inputs.caches.stores.get(INFERENCE_SERVICES.kind)
        stored = store.get(Key(INFERENCE_SERVICES.kind, *service)) if store is not None and service else None
        spec = with_inherited(stored.body).get("spec") if stored is not None else None
        resources = spec.get("resources") if isinstance(spec, dict) else None
        try:
            gpu = GPU.model_validate((resources or {}).get("gpu") or {})
        except ValidationError:
            gpu = GPU(count=0)
        has_gpus = stored is not None and gpu.count > 0
        return HungryReplica(name=pod.name, gpu_resource=gpu.resource_name if has_gpus else "", gpus=gpu.count)


def pool_pod(pod: Pod, sample: Sample | None, mount_failure: str = "") -> PoolPod:
    """The facts of one pod of a pool."""
    annotations = pod.metadata.annotations
    return PoolPod(
        replica=replace(replica(pod, sample), mount_failure=mount_failure),
        resource_version=pod.metadata.resource_version,
        shape=annotations.get(names.ANNOTATION_WARM_SHAPE, ""),
        template=annotations.get(names.ANNOTATION_WARM_TEMPLATE, ""),
        returned_at=moment_of(pod, names.ANNOTATION_RETURNED_AT),
        service=service_name(pod),
        is_miss=names.ANNOTATION_POOL_MISSED in annotations,
    )


@dataclass(frozen=True, slots=True)
class PoolReading:
    """One WarmPool as far as it can be read."""

    pool: WarmPool
    fault: str = ""


def read_pool(body: Mapping[str, Any]) -> PoolReading:
    """The typed resource. One that was stored before the schema had a rule that it breaks gets no further pods."""
    try:
        return PoolReading(WarmPool.model_validate(body))
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
    mended = {**body, "spec": {"size": 0}, "status": {}}
    return PoolReading(WarmPool.model_validate(mended), f"{where} is not valid: {first['msg']}")
