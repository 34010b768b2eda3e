"""Words to build test objects with: the values that do not matter do not appear.

a_service(replicas=3)
a_pod("old").slot(1).ready().streams(3)
seen(a_service(), a_pod().ready(), now=T0)
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from slipway_api import names
from slipway_api.inference_service import InferenceService
from slipway_api.inference_status import InferenceServiceStatus
from slipway_api.lora_adapter import PlacementMode
from slipway_api.model_names import NameConflict
from slipway_operator.core.adapter.observed import AttachedAdapter
from slipway_operator.core.installation import Defaults
from slipway_operator.core.observed import (
    Demand,
    Failure,
    Node,
    Observed,
    PastRecommendation,
    Replica,
    Sample,
    ScalingMemory,
    StoredRevision,
)
from slipway_operator.core.service.replicas.pod import pod_name
from slipway_operator.core.service.rollout.revision import Revision, create_revision, resolve

T0 = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
IMAGE = "slipway/runtime:test"
UID = "uid-of-chat"
DEFAULTS = Defaults(runtime_image=IMAGE, gateway_url="http://gateway:8000", agent_image="slipway/agent:test")


def seconds(count: float) -> timedelta:
    return timedelta(seconds=count)


def minutes(count: float) -> timedelta:
    return timedelta(minutes=count)


def a_service(
    name: str = "chat",
    *,
    uri: str = "file:///opt/slipway/models/tiny",
    generation: int = 1,
    finalizers: tuple[str, ...] = (names.FINALIZER,),
    deleted_at: datetime | None = None,
    status: InferenceServiceStatus | Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    uid: str = UID,
    created_at: datetime | None = None,
    **spec: Any,
) -> InferenceService:
    """A service; every keyword of `spec` is a field of its spec as the user writes it, None leaves it out."""
    fields = {key: value for key, value in spec.items() if value is not None}
    service = InferenceService.model_validate(
        {
            "metadata": {
                "name": name,
                "namespace": "demo",
                "uid": uid,
                "generation": generation,
                "creationTimestamp": created_at,
                "finalizers": finalizers,
                "deletionTimestamp": deleted_at,
            },
            "spec": {"model": {"uri": uri, **(model or {})}, **fields},
        }
    )
    if status is None:
        return service
    if not isinstance(status, InferenceServiceStatus):
        status = InferenceServiceStatus.model_validate(status)
    return service.model_copy(update={"status": status})


def edited(service: InferenceService, **spec: Any) -> InferenceService:
    """The same service after the user changed these fields of its spec: a new generation, the same status."""
    raw = service.spec.to_json()
    for key, value in spec.items():
        if value is None:
            raw.pop(key, None)
        else:
            raw[key] = value
    metadata = service.metadata.model_copy(update={"generation": service.metadata.generation + 1})
    parsed = InferenceService.model_validate({"metadata": {"name": "x"}, "spec": raw})
    return service.model_copy(update={"spec": parsed.spec, "metadata": metadata})


def promised(service: InferenceService, desired: int, **status: Any) -> InferenceService:
    """The service with a status that already carries its revision and the number of replicas."""
    revision = resolve(service, IMAGE)
    known = InferenceServiceStatus.model_validate(
        {
            "observedGeneration": service.metadata.generation,
            "desiredReplicas": desired,
            "currentRevision": revision.hash,
            "updateRevision": revision.hash,
            "revisions": [{"name": f"{service.metadata.name}-{revision.short}", "hash": revision.hash, "image": IMAGE}],
            **status,
        }
    )
    return service.model_copy(update={"status": known})


def stored(service: InferenceService, *, owner_uid: str = "", image: str = IMAGE) -> StoredRevision:
    """What the store holds of the revision that the service asks for."""
    revision = resolve(service, image)
    (action,) = create_revision(service, revision, ())
    return StoredRevision(
        name=action.name,
        uid=f"uid-of-{action.name}",
        owner_uid=owner_uid or service.metadata.uid,
        hash=revision.hash,
        number=action.manifest["revision"],
        data=action.manifest["data"],
    )


def revision_of(service: InferenceService) -> Revision:
    return resolve(service, IMAGE)


@dataclass(frozen=True)
class APod:
    """A replica in the making; every method gives a new one."""

    replica: Replica

    def but(self, **facts: Any) -> "APod":
        return APod(replace(self.replica, **facts))

    def named(self, name: str) -> "APod":
        return self.but(name=name, uid=f"uid-of-{name}")

    def slot(self, slot: int, attempt: int = 0) -> "APod":
        name = pod_name("chat", Revision(self.replica.revision, IMAGE), slot, attempt)
        return self.but(slot=slot, attempt=attempt).named(name)

    def created(self, at: datetime) -> "APod":
        return self.but(created_at=at)

    def ready(self, since: datetime | None = None) -> "APod":
        return self.but(
            phase="Running",
            ready=True,
            ready_since=since or self.replica.created_at,
            pod_ip="10.0.0.1",
            safe_to_evict="true",
            do_not_disrupt="",
        )

    def loading(self) -> "APod":
        return self.but(phase="Running", ready=False, ready_since=None)

    def unready(self, *, since: datetime) -> "APod":
        """Its server was ready, and its readiness probe has failed since then."""
        return self.but(phase="Running", ready=False, ready_since=None, started=True, unready_since=since)

    def says(
        self, *, kv: float = 0.0, running: int = 0, waiting: int = 0, draining: bool = False, at: datetime = T0
    ) -> "APod":
        return self.but(sample=Sample(at=at, kv_usage=kv, running=running, waiting=waiting, draining=draining))

    def streams(self, running: int, at: datetime = T0) -> "APod":
        return self.says(running=running, at=at)

    def silent(self) -> "APod":
        return self.but(sample=None)

    def draining(self, since: datetime = T0, reason: str = "scaling down") -> "APod":
        return self.but(state=names.STATE_DRAINING, drain_started=since, drain_reason=reason)

    def deleted(self, at: datetime = T0) -> "APod":
        return self.but(deleted_at=at)

    def failed(self, reason: str = "Error") -> "APod":
        return self.but(phase="Failed", phase_reason=reason, ready=False, ready_since=None)

    def crashing(self, restarts: int = 1) -> "APod":
        return self.loading().but(waiting_reason="CrashLoopBackOff", restarts=restarts, last_exit="Error (exit code 1)")

    def cannot_pull(self) -> "APod":
        return self.but(waiting_reason="ImagePullBackOff", waiting_message="not found", ready=False)

    def unschedulable(self) -> "APod":
        return self.but(unschedulable="0/2 nodes are available: 2 Insufficient nvidia.com/gpu.", node="")

    def on(self, node: str) -> "APod":
        return self.but(node=node)

    def owned_by(self, uid: str) -> "APod":
        return self.but(owner_uid=uid)


def a_pod(revision: str | Revision = "", *, service: InferenceService | None = None) -> APod:
    """The replica of slot 0 of a revision: `a_pod("old")`, `a_pod(service=service)`; Pending, created at T0."""
    if service is not None:
        revision = resolve(service, IMAGE)
    hash = revision.hash if isinstance(revision, Revision) else revision
    replica = Replica(
        name="",
        uid="",
        owner_uid=UID,
        revision=hash,
        slot=0,
        attempt=0,
        created_at=T0,
        node="node-1",
        safe_to_evict="false",
        do_not_disrupt="true",
    )
    return APod(replica).slot(0)


def seen(
    service: InferenceService,
    *pods: APod,
    nodes: tuple[Node, ...] = (),
    recommendations: tuple[PastRecommendation, ...] = (),
    taken_names: frozenset[str] = frozenset(),
    failures: tuple[Failure, ...] = (),
    applied: Mapping[str, str] | None = None,
    name_conflict: NameConflict | None = None,
    fault: str = "",
    ready_before: frozenset[str] | None = None,
    disrupted: bool = False,
    revisions: tuple[StoredRevision, ...] | None = None,
    demand: Demand | None = None,
    scaling_memory: ScalingMemory | None = None,
) -> Observed:
    """The snapshot of a service and these pods; what the spec asks for is stored, unless `revisions` says otherwise."""
    return Observed(
        service=service,
        disrupted=disrupted,
        revisions=(stored(service),) if revisions is None else revisions,
        replicas=tuple(pod.replica for pod in pods),
        nodes={node.name: node for node in nodes},
        defaults=DEFAULTS,
        token_digests=digests,
        serving_digests=serving_digests,
        kernels_key=kernels_key,
        nonce_seed=b"a seed for tests",
        recommendations=recommendations,
        taken_names=taken_names,
        failures=failures,
        applied=applied or {},
        name_conflict=name_conflict,
        fault=fault,
        ready_before=ready_before,
        demand=demand,
        scaling_memory=scaling_memory or ScalingMemory(),
    )


def digests(namespace: str, pod: str, nonce: str) -> tuple[str, ...]:
    """What a pod would know of its admin token."""
    return (f"digest-of-{namespace}/{pod}/{nonce}",)


def serving_digests(namespace: str, service: str) -> tuple[str, ...]:
    """What a pod would know of the serving tokens of its service."""
    return (f"digest-of-{namespace}/{service}",)


def kernels_key(namespace: str, service: str) -> str:
    """A key that names its service."""
    return f"kernels-of-{namespace}/{service}"


def an_attached_adapter(name: str, **facts: Any) -> AttachedAdapter:
    """An adapter as the plan of its base sees it: of all replicas, and loaded."""
    given = {
        "uri": f"file:///models/{name}",
        "digest": "",
        "version": "v1",
        "pinned": False,
        "mode": PlacementMode.ALL,
        "has_credentials": False,
        "is_ready": True,
        "is_refused": False,
    }
    return AttachedAdapter(name=name, **(given | facts))
