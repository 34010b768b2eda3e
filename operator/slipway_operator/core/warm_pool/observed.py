"""The snapshot of one WarmPool from which its core decides; frozen. `inputs.warm_pools` fills it from caches."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from slipway_api.warm_pool import WarmPool
from slipway_operator.core.actions import Failure
from slipway_operator.core.installation import Defaults
from slipway_operator.core.observed import Node, Replica, TokenDigests
from slipway_operator.core.warm_pool.supply import CLAIMABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPod:
    """One pod that the pool made, or that was started cold because the pool had none."""

    replica: Replica
    resource_version: str = ""
    shape: str = ""  # annotation slipway.dev/warm-shape
    template: str = ""  # annotation slipway.dev/warm-template
    returned_at: datetime | None = None  # annotation slipway.dev/returned-at; None: no service has had it
    service: str = ""  # of a claimed pod, and of one that was started cold
    is_miss: bool = False  # started cold by a service that names the pool

    @property
    def name(self) -> str:
        """Its name."""
        return self.replica.name

    @property
    def is_booted(self) -> bool:
        """Whether it has started as far as its level says, and waits for a claim."""
        sample = self.replica.sample
        return sample is not None and sample.starting in CLAIMABLE

    @property
    def has_service_model(self) -> bool:
        """Whether it has returned, and its process still has the model of the service."""
        sample = self.replica.sample
        return self.returned_at is not None and sample is not None and not sample.starting

    @property
    def has_ended(self) -> bool:
        """Whether its process will never run again."""
        return self.replica.phase in ("Failed", "Succeeded")

    def waits_for(self, pool_uid: str) -> bool:
        """Whether it belongs to the pool, and nobody has claimed it."""
        return self.replica.owner_uid == pool_uid


@dataclass(frozen=True, slots=True, kw_only=True)
class HungryReplica:
    """A replica of a service of the namespace that no node has room for."""

    name: str
    gpu_resource: str  # empty: it asks for none
    gpus: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPool:
    """One pool, its pods and their nodes at one moment."""

    pool: WarmPool  # its status as last written or read, whichever is newer
    fault: str = ""
    pods: tuple[PoolPod, ...] = ()
    nodes: Mapping[str, Node] = field(default_factory=dict)
    hungry: tuple[HungryReplica, ...] = ()
    defaults: Defaults
    token_digests: TokenDigests
    nonce_seed: bytes
    booted_before: frozenset[str] | None = None  # `PoolPlan.booted` of the last pass; None after a takeover
    taken_names: frozenset[str] = frozenset()
    failures: tuple[Failure, ...] = ()
    certificate_fault: str = ""  # why the namespace has no TLS certificate, or will soon have none

    @property
    def hungry_for_our_gpus(self) -> tuple[HungryReplica, ...]:
        """The replicas for which the pool gives up pods, and for which it starts none meanwhile."""
        gpu = self.pool.spec.resources.gpu
        if not self.pool.spec.yield_ or not gpu.count:
            return ()
        return tuple(one for one in self.hungry if one.gpu_resource == gpu.resource_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """How often pods ended in a row before they could be claimed, and until when no other is started."""

    failures: int = 0
    not_before: datetime | None = None
