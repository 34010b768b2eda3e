"""What a service sees of the WarmPool that it names: the pods that wait for a claim."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from slipway_api.inference_service import InferenceService, WarmPoolPolicy
from slipway_api.runtime_api import ReadyReason
from slipway_api.warm_pool import WarmPool

# No model, or its model with no name: what the process says while a claim can have it.
CLAIMABLE: Final = (ReadyReason.NO_MODEL, ReadyReason.STANDBY)
# Asked every 15 s while it waits: a pod that missed three answers may be hung.
SILENT_AFTER: Final = timedelta(seconds=60)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmPod:
    """The facts of one pod that waits for a claim."""

    name: str
    uid: str
    shape: str = ""  # annotation slipway.dev/warm-shape
    starting: str = ""  # of its newest sample
    sampled_at: datetime | None = None
    on_bad_node: bool = False  # cordoned, or not ready
    is_over: bool = False  # ended, or being deleted

    def can_be_claimed(self, now: datetime) -> bool:
        """Whether it has started as far as its level says, waits for a claim, and answers."""
        answers = self.sampled_at is not None and now - self.sampled_at <= SILENT_AFTER
        is_booted = answers and self.starting in CLAIMABLE
        return is_booted and not self.on_bad_node and not self.is_over


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmSupply:
    """The pool that a service names."""

    pool: str
    pool_uid: str = ""  # empty: there is no such WarmPool
    is_unreadable: bool = False  # the operator may not list WarmPools in the namespace
    pods: tuple[WarmPod, ...] = ()
    resource: WarmPool | None = None  # None: there is none, it is being deleted, or it cannot be read

    def why_missing(self, service: InferenceService) -> str:
        """Why no replica of this service can start: the WarmPool that it requires does not exist; empty: it does."""
        wanted = service.spec.warm_pool
        if wanted is None or wanted.policy is not WarmPoolPolicy.REQUIRE:
            return ""
        if self.pool != wanted.name or self.pool_uid or self.is_unreadable:
            return ""  # there is one, or a revision names another pool than the spec, and nothing is known of it
        remedy = "create it, correct spec.warmPool.name, or set spec.warmPool.policy to Prefer"
        return f"{no_pool(wanted.name, service.metadata.namespace)}, and spec.warmPool.policy is Require; {remedy}"


def no_pool(name: str, namespace: str) -> str:
    """The beginning of a sentence about a WarmPool that does not exist."""
    return f"there is no WarmPool {name} in the namespace {namespace}"
