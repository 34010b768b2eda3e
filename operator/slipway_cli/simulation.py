"""Simulates one service under a load: the operator's own `plan` decides, replicas serve by a simple model. Pure.

Time is virtual and moves in steps of two seconds, the interval at which the operator samples busy replicas. A replica
is ready `cold_start` seconds after its pod was created. It runs at most `maxNumSeqs` requests, as long as their tokens
fit its KV cache; a request holds `prompt + output` tokens and takes `output × token_seconds` once it runs. What does
not fit waits. A draining replica finishes what it has and takes nothing new.

The model is no benchmark of an engine: it answers what the autoscaler would do with such a load, when, and why.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from slipway_api import names
from slipway_api.engine_fields import SLIPWAY
from slipway_api.inference_service import InferenceService
from slipway_operator.core.actions import Action, CreatePod, CreateRevision, DeletePod, DrainPod, Event
from slipway_operator.core.installation import Defaults
from slipway_operator.core.observed import Capacity, Observed, Replica, Sample, StoredRevision
from slipway_operator.core.service.plan import plan

STEP: Final = timedelta(seconds=2)
START: Final = datetime(2026, 1, 1, tzinfo=UTC)
MOST_PASSES: Final = 20  # without time moving on; a plan that wants more than that does not settle


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load from one moment of a trace until the next."""

    seconds: float
    """Since the start of the trace."""
    requests_per_second: float
    prompt_tokens: int = 500
    output_tokens: int = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaModel:
    """How fast a replica starts and serves."""

    cold_start: timedelta = timedelta(seconds=60)
    token_seconds: float = 0.03
    kv_tokens: int = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The state of the fleet at one moment."""

    seconds: float
    desired: int
    ready: int
    replicas: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What happened: the state at each step, the changes with their reasons, and how long requests waited."""

    moments: tuple[Moment, ...]
    changes: tuple[tuple[float, str, str], ...]
    """Seconds since the start, the reason of the event, its message."""
    requests: int
    unfinished: int
    wait_p50: float
    wait_p95: float
    replica_hours: float


@dataclass(slots=True)
class _Request:
    arrived: datetime
    tokens: int
    seconds: float


@dataclass(slots=True)
class _Pod:
    replica: Replica
    ready_at: datetime
    running: list[tuple[datetime, int]] = field(default_factory=list)  # (ends at, tokens)
    waiting: deque[_Request] = field(default_factory=deque)

    @property
    def takes_requests(self) -> bool:
        return self.replica.ready and self.replica.state == names.STATE_SERVING

    @property
    def requests(self) -> int:
        return len(self.running) + len(self.waiting)


def simulate(service: InferenceService, trace: Sequence[Load], model: ReplicaModel, *, seconds: float) -> Result:
    """Runs the service under the trace for so many seconds, beginning with no replica."""
    return _Simulation(service, model).run(trace, timedelta(seconds=seconds))


class _Simulation:
    def __init__(self, service: InferenceService, model: ReplicaModel) -> None:
        metadata = service.metadata.model_copy(
            update={"uid": "simulated", "generation": 1, "finalizers": (names.FINALIZER,)}
        )
        # The model of a replica stands for every engine, and which engines there are only a cluster knows.
        runtime = service.spec.runtime.model_copy(update={"engine": SLIPWAY})
        spec = service.spec.model_copy(update={"runtime": runtime})
        self._service = service.model_copy(update={"metadata": metadata, "spec": spec})
        self._model = model
        self._now = START
        self._pods: dict[str, _Pod] = {}
        self._revisions: dict[str, StoredRevision] = {}
        self._held: deque[_Request] = deque()  # no replica is ready
        self._memory: dict[str, Any] = {}
        self._changes: list[tuple[float, str, str]] = []
        self._waits: list[float] = []
        self._arrived = 0

    def run(self, trace: Sequence[Load], length: timedelta) -> Result:
        moments = []
        owed = 0.0  # requests that have not become a whole one yet
        replica_seconds = 0.0
        while self._now < START + length:
            load = _load_at(trace, self._elapsed)
            owed += load.requests_per_second * STEP.total_seconds()
            arriving, owed = int(owed), owed - int(owed)
            self._serve(load, arriving)
            self._reconcile()
            moments.append(self._moment())
            replica_seconds += len(self._pods) * STEP.total_seconds()
            self._now += STEP
        waits = sorted(self._waits) or [0.0]
        return Result(
            moments=tuple(moments),
            changes=tuple(self._changes),
            requests=self._arrived,
            unfinished=len(self._held) + sum(pod.requests for pod in self._pods.values()),
            wait_p50=waits[len(waits) // 2],
            wait_p95=waits[min(len(waits) - 1, len(waits) * 95 // 100)],
            replica_hours=replica_seconds / 3600,
        )

    @property
    def _elapsed(self) -> float:
        return (self._now - START).total_seconds()

    # --- replicas -----------------------------------------------------------------------------------------------------

    def _serve(self, load: Load, arriving: int) -> None:
        for pod in self._pods.values():
            if not pod.replica.ready and self._now >= pod.ready_at:
                pod.replica = replace(pod.replica, ready=True, started=True, ready_since=self._now, unready_since=None)
            pod.running = [one for one in pod.running if one[0] > self._now]
        tokens = load.prompt_tokens + load.output_tokens
        for _ in range(arriving):
            self._arrived += 1
            self._held.append(_Request(self._now, tokens, load.output_tokens * self._model.token_seconds))
        open_pods = [pod for pod in self._pods.values() if pod.takes_requests]
        while self._held and open_pods:
            min(open_pods, key=lambda pod: (pod.requests, pod.replica.name)).waiting.append(self._held.popleft())
        for pod in self._pods.values():
            self._admit(pod)
            pod.replica = replace(pod.replica, sample=self._sample(pod))

    def _admit(self, pod: _Pod) -> None:
        limit = self._service.spec.runtime.max_num_seqs
        used = sum(tokens for _, tokens in pod.running)
        while pod.waiting and len(pod.running) < limit:
            request = pod.waiting[0]
            if pod.running and used + request.tokens > self._model.kv_tokens:
                return
            pod.waiting.popleft()
            used += request.tokens
            pod.running.append((self._now + timedelta(seconds=request.seconds), request.tokens))
            self._waits.append((self._now - request.arrived).total_seconds())

    def _sample(self, pod: _Pod) -> Sample | None:
        if not pod.replica.ready:
            return None
        used = sum(tokens for _, tokens in pod.running)
        return Sample(
            at=self._now,
            boot_id=pod.replica.uid,
            kv_usage=min(1.0, used / self._model.kv_tokens),
            running=len(pod.running),
            waiting=len(pod.waiting),
            draining=pod.replica.state == names.STATE_DRAINING,
            capacity=Capacity(
                max_sequences=self._service.spec.runtime.max_num_seqs,
                kv_blocks=self._model.kv_tokens // self._service.spec.runtime.block_size,
                bytes_per_token=0,
            ),
        )

    # --- the operator -------------------------------------------------------------------------------------------------

    def _reconcile(self) -> None:
        for _ in range(MOST_PASSES):
            made = plan(self._observed(), self._now)
            for action in made.actions:
                self._execute(action)
            self._memory = {"recommendations": made.recommendations, "ready_before": made.ready}
            if made.status is not None:
                self._service = self._service.model_copy(update={"status": made.status})
            self._note(made.events)
            if made.requeue_after != 0.0:
                return
        raise AssertionError("the plan does not settle")

    def _observed(self) -> Observed:
        return Observed(
            service=self._service,
            replicas=tuple(pod.replica for pod in self._pods.values()),
            revisions=tuple(self._revisions.values()),
            defaults=Defaults(runtime_image="simulated", gateway_url="http://gateway"),
            token_digests=lambda _namespace, _pod, _nonce: (),
            serving_digests=lambda _namespace, _service: (),
            kernels_key=lambda _namespace, _service: "",
            nonce_seed=b"simulated",
            asking_since=START - timedelta(hours=1),
            **self._memory,
        )

    def _execute(self, action: Action) -> None:
        match action:
            case CreatePod(name=name, manifest=manifest):
                self._pods[name] = _Pod(self._new_replica(name, manifest), self._now + self._model.cold_start)
            case CreateRevision(name=name, manifest=manifest):
                self._revisions[name] = StoredRevision(
                    name=name,
                    uid=name,
                    owner_uid="simulated",
                    hash=manifest["metadata"]["labels"][names.LABEL_REVISION],
                    number=manifest["revision"],
                    data=manifest["data"],
                )
            case DrainPod(name=name, started=started, reason=reason) if name in self._pods:
                pod = self._pods[name]
                pod.replica = replace(
                    pod.replica, state=names.STATE_DRAINING, drain_started=started, drain_reason=reason
                )
            case DeletePod(name=name):
                gone = self._pods.pop(name, None)
                if gone is not None:
                    self._held.extend(gone.waiting)
            case _:
                pass  # children and finalizers change nothing here

    def _new_replica(self, name: str, manifest: dict[str, Any]) -> Replica:
        labels = manifest["metadata"]["labels"]
        return Replica(
            name=name,
            uid=name,
            owner_uid="simulated",
            revision=labels[names.LABEL_REVISION],
            slot=int(labels[names.LABEL_SLOT]),
            attempt=int(labels[names.LABEL_ATTEMPT]),
            created_at=self._now,
            unready_since=self._now,
            phase="Running",
            node="simulated",
            scheduled_at=self._now,
            pod_ip="10.0.0.1",
        )

    def _note(self, events: Iterable[Event]) -> None:
        shown = ("ScaledUp", "ScaledDown", "ScaledToZero", "Activated", "ScalingLimited", "ScalingHeld")
        for event in events:
            if event.reason.value in shown:
                self._changes.append((self._elapsed, event.reason.value, event.message))

    def _moment(self) -> Moment:
        pods = self._pods.values()
        return Moment(
            seconds=self._elapsed,
            desired=self._service.status.desired_replicas or 0,
            ready=sum(pod.replica.ready and pod.replica.state == names.STATE_SERVING for pod in pods),
            replicas=len(pods),
            running=sum(len(pod.running) for pod in pods),
            waiting=len(self._held) + sum(len(pod.waiting) for pod in pods),
        )


def _load_at(trace: Sequence[Load], elapsed: float) -> Load:
    begun = [load for load in trace if load.seconds <= elapsed]
    return begun[-1] if begun else replace(trace[0], requests_per_second=0.0)
