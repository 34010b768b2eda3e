"""A model of a cluster around one service, in virtual time: it does what plans ask for, and misbehaves on demand.

It checks the laws that must hold at every single step, so a story or a random walk only has to move it.
"""

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from slipway_api import names
from slipway_api.inference_service import InferenceService
from slipway_operator.core.actions import (
    AddFinalizer,
    ApplyChild,
    CreatePod,
    DeletePod,
    DrainPod,
    Event,
    RemoveFinalizer,
)
from slipway_operator.core.observed import Failure, Node, Observed, PastRecommendation, Replica, Sample
from slipway_operator.core.service.plan import Plan, plan
from tests.builders import DEFAULTS, T0, UID, digests, serving_digests

TICK = timedelta(seconds=1)


@dataclass
class ModelPod:
    """A pod, and what its kubelet and its runtime know beyond the API."""

    replica: Replica  # without its sample, which is new at each second
    loads_for: float
    sample: Sample | None = None
    running: int = 0
    kv: float = 0.0
    waiting: int = 0
    drains: bool = False  # the runtime was told
    answers: bool = True
    ends_at: Any = None  # when its kubelet is done with it
    hangs: bool = False  # its kubelet is gone: a deletion never ends

    @property
    def is_live(self) -> bool:
        return (
            self.replica.owner_uid == UID
            and self.replica.deleted_at is None
            and self.replica.phase not in ("Failed", "Succeeded")
            and self.replica.state != names.STATE_DRAINING
        )


class ModelCluster:
    """One service, its pods and nodes, and an operator that can be killed."""

    def __init__(self, service: InferenceService, *, nodes: int = 4, load_seconds: float = 20, gpus: int = 100) -> None:
        self.now = T0
        self.service: InferenceService | None = service
        self.pods: dict[str, ModelPod] = {}
        self.nodes = {f"node-{n}": Node(name=f"node-{n}") for n in range(nodes)}
        self.load_seconds = load_seconds
        self.gpus = gpus
        self.events: list[Event] = []
        self.log: list[str] = []
        self.writes = 0
        self.applied: dict[str, str] = {}
        self.taken: frozenset[str] = frozenset()
        self.failures: tuple[Failure, ...] = ()
        self.recommendations: tuple[PastRecommendation, ...] = ()
        self.load = lambda world: None  # sets running, waiting and kv of the ready pods
        self.lose_status_writes = False
        self.image_is_broken = False
        self.faults = 0  # those that take replicas away: what is left may be less than the rollout wants
        self.was_cordoned = False  # a replica may have been doubled to move it
        self.due: Any = None  # when the plan asked to be asked again
        self._facts: Any = None
        self._next_uid = 0

    # --- what the operator sees and does -----------------------------------------------------------------------------

    def observed(self) -> Observed:
        assert self.service is not None
        return Observed(
            service=self.service,
            replicas=tuple(replace(pod.replica, sample=pod.sample) for pod in self.pods.values()),
            nodes=dict(self.nodes),
            defaults=DEFAULTS,
            token_digests=digests,
            serving_digests=serving_digests,
            nonce_seed=b"a seed for tests",
            recommendations=self.recommendations,
            taken_names=self.taken,
            applied=dict(self.applied),
            failures=self.failures,
        )

    def reconcile(self, *, die_after: int | None = None) -> Plan | None:
        """Passes until the operator would sleep; with `die_after`, it is killed after so many actions of the first."""
        made = None
        for _ in range(10):
            if self.service is None:
                return made
            made = self._one_pass(die_after)
            if self.lose_status_writes:
                self.due = self.now  # the shell sees the write fail and tries again
                return made
            if die_after is not None or made.requeue_after != 0.0:
                return made
        raise AssertionError("the plan never comes to rest")

    def _one_pass(self, die_after: int | None) -> Plan:
        observed = self.observed()
        made = plan(observed, self.now)
        self.due = None if made.requeue_after is None else self.now + timedelta(seconds=made.requeue_after)
        assert made == plan(observed, self.now), "the same facts must give the same plan"
        for position, action in enumerate(made.actions):
            if die_after is not None and position >= die_after:
                self.restart_operator()
                return made
            self._do(action, observed)
        if die_after is not None:
            self.restart_operator()
            return made
        self.recommendations = made.recommendations
        if self.service is not None and made.status is not None and not self.lose_status_writes:
            # Through JSON, as the API server would give it back: whole seconds, no absent fields.
            status = type(made.status).model_validate_json(
                made.status.model_dump_json(by_alias=True, exclude_none=True)
            )
            if status != self.service.status:
                self.writes += 1
                self.log.append(f"{self.clock} status: {status.desired_replicas} wanted, {status.ready_replicas} ready")
                self.service = self.service.model_copy(update={"status": status})
            self.events += made.events
        self._check()
        return made

    def restart_operator(self) -> None:
        """A new leader: nothing that lived in memory is left."""
        self.recommendations, self.applied, self.taken, self.failures = (), {}, frozenset(), ()
        self.due = self.now  # it looks at everything once

    def _do(self, action: Any, observed: Observed) -> None:
        self.log.append(f"{self.clock} {type(action).__name__} {getattr(action, 'name', '')} {action.reason}")
        if not isinstance(action, DrainPod) or not action.marked:
            self.writes += 1
        assert self.service is not None
        match action:
            case AddFinalizer(finalizer=finalizer):
                self._finalizers((*self.service.metadata.finalizers, finalizer))
            case RemoveFinalizer():
                gone_or_going = all(pod.replica.deleted_at for pod in self.pods.values())
                assert gone_or_going, "the service went before its replicas"
                self.service = None
            case CreatePod():
                self._create(action, observed)
            case DrainPod():
                self._drain(action)
            case DeletePod():
                self._delete(action)
            case ApplyChild():
                self.applied[action.key] = action.digest

    def _finalizers(self, finalizers: tuple[str, ...]) -> None:
        assert self.service is not None
        metadata = self.service.metadata.model_copy(update={"finalizers": finalizers})
        self.service = self.service.model_copy(update={"metadata": metadata})

    def _create(self, action: CreatePod, observed: Observed) -> None:
        labels = action.manifest["metadata"]["labels"]
        slot, attempt = int(labels[names.LABEL_SLOT]), int(labels[names.LABEL_ATTEMPT])
        status = observed.service.status
        assert names.FINALIZER in observed.service.metadata.finalizers or isinstance(
            next(iter(plan(observed, self.now).actions)), AddFinalizer
        ), "no child before the finalizer"
        if attempt > 0:
            carried = [one.attempt for one in status.attempts if one.slot == slot]
            assert attempt in carried, f"attempt {attempt} of slot {slot} is not in status"
        assert any(one.hash == labels[names.LABEL_REVISION] and one.image for one in status.revisions)
        if action.name in self.pods:
            pod = self.pods[action.name]
            if pod.replica.owner_uid != UID:
                self.taken |= {action.name}
            return  # 409: ours already
        self._next_uid += 1
        self.pods[action.name] = ModelPod(
            Replica(
                name=action.name,
                uid=f"pod-{self._next_uid}",
                owner_uid=UID,
                revision=labels[names.LABEL_REVISION],
                slot=slot,
                attempt=attempt,
                created_at=self.now,
            ),
            loads_for=self.load_seconds,
        )

    def _drain(self, action: DrainPod) -> None:
        pod = self.pods[action.name]
        assert pod.replica.uid == action.uid
        if not action.marked:
            pod.replica = replace(
                pod.replica,
                state=names.STATE_DRAINING,
                drain_started=action.started.replace(microsecond=0),
                drain_reason=action.reason,
            )
        if pod.answers:
            pod.drains = True

    def _delete(self, action: DeletePod) -> None:
        pod = self.pods.get(action.name)
        if pod is None or pod.replica.uid != action.uid or pod.replica.deleted_at:
            return
        assert self.service is not None
        drain = self.service.spec.drain
        if pod.replica.ready:
            assert pod.replica.drain_started, f"{action.name} was deleted without a drain"
        if pod.replica.drain_started and pod.replica.phase == "Running" and pod.answers and pod.running:
            age = (self.now - pod.replica.drain_started).total_seconds()
            assert age >= drain.timeout_seconds, f"{action.name} was deleted with {pod.running} streams after {age}s"
        self.end(action.name, grace=action.grace_seconds, takes=2)

    # --- what the cluster does ---------------------------------------------------------------------------------------

    def tick(self, *, reconcile: bool = True) -> None:
        """One second passes."""
        self.now += TICK
        self.load(self)
        in_use = sum(bool(pod.replica.node) for pod in self.pods.values())
        for name, pod in list(self.pods.items()):
            if pod.ends_at is not None:
                if self.now >= pod.ends_at and not pod.hangs:
                    del self.pods[name]
                continue
            if not pod.replica.node and pod.replica.phase == "Pending":
                in_use += self._schedule(pod, in_use)
            self._run(pod)
        if reconcile and self._is_woken():
            self.reconcile()

    def _is_woken(self) -> bool:
        """As in the shell: by a change of the service, a pod or a node, by a sample that matters, or by the clock."""
        facts = (
            self.service and (self.service.metadata, self.service.spec),
            tuple(pod.replica for pod in self.pods.values()),
            tuple(self.nodes.values()),
        )
        samples = [pod.sample for pod in self.pods.values() if pod.sample and pod.answers]
        is_busy = any(sample.draining or sample.requests for sample in samples) and self.now.second % 2 == 0
        is_due = self.due is not None and self.now >= self.due
        is_woken = facts != self._facts or is_busy or is_due
        self._facts = facts
        return is_woken

    def _schedule(self, pod: ModelPod, in_use: int) -> int:
        usable = [node.name for node in self.nodes.values() if node.ready and not node.cordoned]
        if in_use >= self.gpus or not usable:
            pod.replica = replace(pod.replica, unschedulable="0/4 nodes are available: 4 Insufficient nvidia.com/gpu.")
            return 0
        load = {name: sum(other.replica.node == name for other in self.pods.values()) for name in usable}
        node = min(usable, key=lambda name: (load[name], name))
        pod.replica = replace(pod.replica, node=node, unschedulable="")
        return 1

    def _run(self, pod: ModelPod) -> None:
        node = self.nodes.get(pod.replica.node)
        if node is None or pod.replica.phase in ("Failed", "Succeeded"):
            return
        if not node.ready:
            pod.replica = replace(pod.replica, ready=False, ready_since=None)
            return
        if self.image_is_broken and not pod.replica.ready:
            pod.replica = replace(pod.replica, waiting_reason="ImagePullBackOff")
            return
        if pod.replica.phase == "Pending":
            pod.replica = replace(pod.replica, phase="Running", waiting_reason="")
        pod.loads_for -= 1
        is_ready = pod.loads_for <= 0 and not pod.drains and not pod.replica.waiting_reason
        if is_ready != pod.replica.ready:
            pod.replica = replace(pod.replica, ready=is_ready, ready_since=self.now if is_ready else None)
        if pod.drains and pod.running and self.now.second % 3 == 0:
            pod.running -= 1
        if pod.drains:
            pod.waiting = 0  # what waits gets its turn
        if pod.answers and pod.loads_for <= 0:
            pod.sample = Sample(
                at=self.now, kv_usage=pod.kv, running=pod.running, waiting=pod.waiting, draining=pod.drains
            )

    def run(self, seconds: float) -> "ModelCluster":
        for _ in range(int(seconds)):
            self.tick()
        return self

    # --- what may go wrong -------------------------------------------------------------------------------------------

    def end(self, name: str, *, grace: float = 30, takes: float = 2) -> None:
        """The pod is being deleted, by whomever."""
        pod = self.pods[name]
        pod.replica = replace(pod.replica, deleted_at=self.now + timedelta(seconds=grace), ready=False)
        pod.ends_at = self.now + timedelta(seconds=takes)

    def fail(self, name: str, reason: str = "Error") -> None:
        self.faults += 1
        pod = self.pods[name]
        pod.replica = replace(pod.replica, phase="Failed", phase_reason=reason, ready=False, ready_since=None)

    def crash_loop(self, name: str, restarts: int, last_word: str = "") -> None:
        self.faults += 1
        pod = self.pods[name]
        pod.replica = replace(
            pod.replica,
            ready=False,
            ready_since=None,
            waiting_reason="CrashLoopBackOff",
            restarts=restarts,
            last_word=last_word,
        )

    def lose_node(self, name: str) -> None:
        self.faults += 1
        self.nodes[name] = replace(self.nodes[name], ready=False, not_ready_since=self.now)
        for pod in self.pods.values():
            if pod.replica.node == name:
                pod.answers, pod.hangs = False, True

    def recover_node(self, name: str) -> None:
        self.nodes[name] = replace(self.nodes[name], ready=True, not_ready_since=None)
        for pod in self.pods.values():
            if pod.replica.node == name:
                pod.answers, pod.hangs = True, False

    def cordon(self, name: str, cordoned: bool = True) -> None:
        self.was_cordoned = True
        self.nodes[name] = replace(self.nodes[name], cordoned=cordoned)

    def ask_for_deletion(self) -> None:
        assert self.service is not None
        metadata = self.service.metadata.model_copy(update={"deletion_timestamp": self.now})
        self.service = self.service.model_copy(update={"metadata": metadata})

    # --- what is so --------------------------------------------------------------------------------------------------

    @property
    def clock(self) -> str:
        return f"+{int((self.now - T0).total_seconds())}s"

    @property
    def live(self) -> list[ModelPod]:
        return [pod for pod in self.pods.values() if pod.is_live]

    @property
    def ready(self) -> list[ModelPod]:
        return [pod for pod in self.live if pod.replica.ready]

    @property
    def draining(self) -> list[ModelPod]:
        return [pod for pod in self.pods.values() if pod.replica.state == names.STATE_DRAINING]

    @property
    def desired(self) -> int:
        assert self.service is not None
        return self.service.status.desired_replicas or 0

    def condition(self, type: str) -> Any:
        assert self.service is not None
        return next((one for one in self.service.status.conditions if one.type == type), None)

    def event_reasons(self) -> list[str]:
        return [event.reason.value for event in self.events]

    def _check(self) -> None:
        """The laws that hold at every step."""
        if self.service is None:
            return
        slots: dict[tuple[str, int], int] = {}
        for pod in self.live:
            key = (pod.replica.revision, pod.replica.slot)
            slots[key] = slots.get(key, 0) + 1
        assert all(count <= 2 for count in slots.values()), f"a slot has more than two live replicas: {slots}"
        if not self.faults and not self.was_cordoned:
            assert all(count == 1 for count in slots.values()), f"two live replicas on one slot: {slots}"
