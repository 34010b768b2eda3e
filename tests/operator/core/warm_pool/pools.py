"""Words to build WarmPools and their pods with: the values that do not matter do not appear."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from slipway_api import names
from slipway_api.warm_pool import WarmPool, WarmPoolStatus
from slipway_operator.core.observed import Node, Replica, Sample
from slipway_operator.core.service.replicas.access import PortAccess
from slipway_operator.core.warm_pool.observed import HungryReplica, ObservedPool, PoolPod
from slipway_operator.core.warm_pool.pod import build_pool_pod
from slipway_operator.core.warm_pool.shape import shape_of_pool, write_shape
from tests.builders import DEFAULTS, IMAGE, T0, digests

POOL_UID = "uid-of-pool"


def a_pool(*, status: WarmPoolStatus | None = None, **spec: Any) -> WarmPool:
    """A pool; every keyword is a field of its spec as the user writes it."""
    fields = {"resources": {"gpu": {"count": 1}}, "refill": {"maxConcurrent": 100, "delaySeconds": 0}} | spec
    if "autosize" not in fields:
        fields.setdefault("size", 2)
    metadata = {"name": "pool", "namespace": "demo", "uid": POOL_UID, "generation": 1}
    pool = WarmPool.model_validate({"metadata": metadata, "spec": fields})
    return pool if status is None else pool.model_copy(update={"status": status})


@dataclass(frozen=True)
class APoolPod:
    """A pod of the pool in the making; every method gives a new one."""

    facts: PoolPod

    def but(self, **facts: Any) -> "APoolPod":
        return APoolPod(replace(self.facts, replica=replace(self.facts.replica, **facts)))

    def booted(self, at: datetime = T0) -> "APoolPod":
        sample = Sample(at=at, kv_usage=0, running=0, waiting=0, starting="NoModel")
        return self.but(phase="Running", node="node-1", sample=sample)

    def of_shape(self, **spec: Any) -> "APoolPod":
        """As the pool of this spec makes its pods."""
        pool = a_pool(**spec)
        shape = shape_of_pool(pool, IMAGE)
        access = PortAccess(nonce="n", admin_digests=("digest",))
        made = build_pool_pod(
            pool,
            7,
            shape,
            image=spec.get("image", IMAGE),
            access=access,
            user=DEFAULTS.pod_user,
            placement=DEFAULTS.placement,
        )
        template = made["metadata"]["annotations"][names.ANNOTATION_WARM_TEMPLATE]
        return APoolPod(replace(self.facts, shape=write_shape(shape), template=template))

    def returned(self, at: datetime = T0) -> "APoolPod":
        """A service has had it, and its process still has the model."""
        sample = Sample(at=at, kv_usage=0, running=0, waiting=0, draining=True)
        pod = self.but(phase="Running", node="node-1", sample=sample)
        return APoolPod(replace(pod.facts, returned_at=at))

    def claimed_by(self, service: str, at: datetime = T0) -> "APoolPod":
        pod = self.but(owner_uid=f"uid-of-{service}", state=names.STATE_SERVING, claimed_at=at, created_at=at)
        return APoolPod(replace(pod.facts, service=service))

    def ready(self, at: datetime) -> "APoolPod":
        return self.but(ready=True, ready_since=at)


def a_waiting_pod(number: int = 0) -> APoolPod:
    """A pod that starts."""
    name = f"pool-warm-{number}"
    replica = Replica(
        name=name,
        uid=f"uid-of-{name}",
        owner_uid=POOL_UID,
        revision="",
        slot=0,
        attempt=0,
        state=names.STATE_WARM,
        created_at=T0,
        node="node-1",
    )
    return APoolPod(PoolPod(replica=replica, resource_version=str(100 + number))).of_shape()


def a_miss(name: str, at: datetime, service: str = "chat") -> PoolPod:
    """A replica that was started cold because the pool had no pod."""
    pod = a_waiting_pod().but(
        name=name, uid=f"uid-of-{name}", owner_uid=f"uid-of-{service}", state=names.STATE_SERVING, created_at=at
    )
    return replace(pod.facts, service=service, is_miss=True)


def seen(
    pool: WarmPool,
    *pods: APoolPod | PoolPod,
    nodes: Iterable[Node] = (),
    hungry: tuple[HungryReplica, ...] = (),
    **facts: Any,
) -> ObservedPool:
    """The snapshot of a pool and these pods."""
    return ObservedPool(
        pool=pool,
        pods=tuple(pod.facts if isinstance(pod, APoolPod) else pod for pod in pods),
        nodes={node.name: node for node in nodes},
        hungry=hungry,
        defaults=DEFAULTS,
        token_digests=digests,
        nonce_seed=b"a seed for tests",
        **facts,
    )
