"""A simulated cluster around one service, in virtual time: it does what plans ask for, and fails on demand.

Its caches may be stale, each object by another delay; readiness may flap, engines hang, nodes and zones leave and come
back, device plugins refuse, admin ports stay silent or answer late. It checks the laws that must hold at every single
step, so a story or a random walk only has to move it.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from slipway_api import names
from slipway_api.inference_service import InferenceService
from slipway_api.vocabulary import CONDITIONS
from slipway_operator.core.actions import Action, Event, SmokeResult, describe, events_of
from slipway_operator.core.engines import see_engine
from slipway_operator.core.lanes import in_order, lane_of, waits_for
from slipway_operator.core.observed import (
    AccountingMemory,
    Demand,
    Failure,
    Node,
    Observed,
    OutcomesSince,
    PastRecommendation,
    Replica,
    Sample,
    ScalingMemory,
    StoredRevision,
    is_disruption,
)
from slipway_operator.core.service.plan import Plan, plan
from slipway_operator.core.templates import Inheritance, StoredTemplate, TemplatesSeen, inherit
from tests.builders import DEFAULTS, T0, digests, kernels_key, serving_digests
from tests.operator.core import laws, quiet_time
from tests.operator.core.backoff_law import BackoffLaw
from tests.operator.core.simulated_executor import TICK, execute, is_write
from tests.operator.core.simulated_faults import Faults
from tests.operator.core.simulated_pod import SimulatedPod
from tests.operator.core.simulated_traffic import SimulatedTraffic
from tests.operator.core.stale_cache import StaleCache

REFUSED_PAUSE = timedelta(seconds=5)
HANG_LIMIT = timedelta(seconds=120)  # the runtime's --hang-seconds
DOCUMENTED = {(row.type.value, row.status.value, row.reason.value) for row in CONDITIONS}


class SimulatedCluster(Faults):
    """One service, its pods and nodes, and an operator that can be killed."""

    def __init__(self, service: InferenceService, *, nodes: int = 4, load_seconds: float = 20, gpus: int = 100) -> None:
        self.now = T0
        self.service: InferenceService | None = service
        self.pods: dict[str, SimulatedPod] = {}
        self.nodes = {f"node-{n}": Node(name=f"node-{n}") for n in range(nodes)}
        self.load_seconds = load_seconds
        self.gpus = gpus
        self.events: list[Event] = []
        self.log: list[str] = []
        self.writes = 0
        self.applied: dict[str, str] = {}
        self.children: dict[str, dict[str, Any]] = {}
        self.taken: frozenset[str] = frozenset()
        self.failures: tuple[Failure, ...] = ()
        self.refused: dict[str, str] = {}  # by type of action: the reason with which the API server refuses its write
        self.has_refused = False  # in the last pass
        self.has_news = False  # the last pass was refused something else than the one before
        self.recommendations: tuple[PastRecommendation, ...] = ()
        self.scaling_memory = ScalingMemory()
        self.demand: Callable[[SimulatedCluster], Demand | None] = lambda world: None  # what gateways report
        self.accounting_memory = AccountingMemory()
        self.outcomes_since: OutcomesSince | None = None
        self.asking_since = T0
        self.ready_before: frozenset[str] | None = None
        self.told: set[tuple[str, str, str]] = set()  # type, status and reason of every condition that there ever was
        self.load = lambda world: None  # sets running, waiting and kv of the ready pods
        self.lose_status_writes = False
        self.lose_labels = False  # a runtime takes requests again, and its pod's label is not written
        self.image_is_broken = False
        self.faults = 0  # those that take replicas away: what is left may be less than the rollout wants
        self.was_cordoned = False  # a replica may have been doubled to move it
        self.due: Any = None  # when the plan asked to be asked again
        self.revisions: dict[str, StoredRevision] = {}
        self.lost_revisions: dict[str, StoredRevision] = {}  # records that people have deleted
        self.broken_revisions: set[str] = set()  # those whose image cannot be pulled
        self.manifests: dict[str, dict[str, Any]] = {}  # by pod, the last one
        self.default_image = DEFAULTS.runtime_image
        self.internal_tls = False
        self.engines: dict[str, dict[str, Any]] = {}  # spec of each Engine by name
        self.templates: dict[str, StoredTemplate] = {}  # ServiceTemplates by name
        self.created = 0
        self.refusing: set[str] = set()  # nodes whose device plugin refuses every pod
        self.cache = StaleCache()
        self.backoffs = BackoffLaw()
        self._facts: Any = None
        self.next_uid = 0
        self.traffic: SimulatedTraffic | None = None  # None: no gateway reports
        self.smoke_results: dict[str, SmokeResult] = {}
        self.admits_pod: Callable[[SimulatedCluster], bool] = lambda _world: True  # as a quota does
        self.fails_smoke: set[str] = set()  # revisions that answer smoke tests wrongly
        self.silent_to_smoke: set[str] = set()  # ... or not at all
        self.doubled_since: dict[tuple[str, int], Any] = {}  # by slot: since when it has two live replicas

    # --- what the operator sees and does -----------------------------------------------------------------------------

    def observed(self) -> Observed:
        service, inheritance = self._inherit()
        return Observed(
            service=service,
            inheritance=inheritance,
            replicas=tuple(
                replace(replica, sample=self.pods[name].sample if name in self.pods else None)
                for name, replica in self.cache.view(self._actual(), self.now).items()
            ),
            nodes=dict(self.nodes),
            disrupted=self.disrupted,
            revisions=tuple(self.revisions.values()),
            defaults=replace(DEFAULTS, runtime_image=self.default_image, internal_tls=self.internal_tls),
            engine=see_engine(service.spec.runtime.engine, self.engines),
            token_digests=digests,
            serving_digests=serving_digests,
            kernels_key=kernels_key,
            nonce_seed=b"a seed for tests",
            recommendations=self.recommendations,
            scaling_memory=self.scaling_memory,
            demand=self.demand(self),
            outcomes_since=self.traffic.since if self.traffic else self.outcomes_since,
            service_outcomes=self.traffic.of_service() if self.traffic else None,
            accounting_memory=self.accounting_memory,
            asking_since=self.asking_since,
            ready_before=self.ready_before,
            taken_names=self.taken,
            applied=dict(self.applied),
            failures=self.failures,
            smoke_results=dict(self.smoke_results),
        )

    @property
    def planned_service(self) -> InferenceService:
        """The service with what it inherits."""
        return self._inherit()[0]

    def _inherit(self) -> tuple[InferenceService, Inheritance]:
        assert self.service is not None
        return inherit(self.service, TemplatesSeen(by_name=self.templates))

    @property
    def cache_lag(self) -> int:
        """Seconds by which caches are behind."""
        return self.cache.lag

    @cache_lag.setter
    def cache_lag(self, seconds: int) -> None:
        self.cache.set_lag(seconds, self._actual())

    def _actual(self) -> dict[str, Replica]:
        return {name: pod.replica for name, pod in self.pods.items()}

    @property
    def disrupted(self) -> bool:
        lost = sum(not node.ready for node in self.nodes.values())
        return is_disruption(lost, len(self.nodes))

    def reconcile(self, *, die_after: int | None = None) -> Plan | None:
        """Passes until the operator would sleep; with `die_after`, it is killed after so many actions of the first."""
        made = None
        for _ in range(10):
            if self.service is None:
                return made
            if self.cache.is_waited_for(self._actual(), self.now):
                self.due = self.now + TICK
                return made
            made = self._one_pass(die_after)
            if self.lose_status_writes:
                self.due = self.now  # the shell sees the write fail and tries again
                return made
            if die_after is not None or (made.requeue_after != 0.0 and not self.has_news):
                return made
        raise AssertionError("the plan never comes to rest")

    def _one_pass(self, die_after: int | None) -> Plan:
        observed = self.observed()
        made = plan(observed, self.now)
        self.due = None if made.requeue_after is None else self.now + timedelta(seconds=made.requeue_after)
        assert made == plan(observed, self.now), "the same facts must give the same plan"
        laws.check_victims(made, observed)
        laws.check_weights(made, observed)
        laws.check_records(made, observed)
        laws.check_words(made, observed)
        laws.check_refusals_change_no_other_decision(made, observed, self.now)
        done, failures, stopped = list[Action](), list[Failure](), set[str]()
        for position, action in enumerate(in_order(made.actions) if self.refused else made.actions):
            if die_after is not None and position >= die_after:
                self.restart_operator()
                return made
            if lane_of(action) in stopped or waits_for(action) & stopped:
                stopped.add(lane_of(action))
            elif is_write(action) and (reason := self.refused.get(type(action).__name__)):
                stopped.add(lane_of(action))
                sentence = f"the API server refuses it: {reason}"
                failures.append(Failure(action=describe(action), reason=reason, message=sentence, at=self.now))
            else:
                execute(self, action, observed)
                done.append(action)
        self._note_refusals(failures)
        if die_after is not None:
            self.restart_operator()
            return made
        self.recommendations, self.scaling_memory = made.recommendations, made.scaling_memory
        self.accounting_memory = made.accounting.memory
        if self.service is not None and made.status is not None and not self.lose_status_writes:
            # Through JSON, as the API server would give it back: whole seconds, no absent fields.
            status = type(made.status).model_validate_json(
                made.status.model_dump_json(by_alias=True, exclude_none=True)
            )
            if status != self.service.status:
                self.writes += 1
                before = self.service.status
                if (before.desired_replicas, before.update_revision) != (
                    status.desired_replicas,
                    status.update_revision,
                ):
                    self.backoffs.start_anew()
                self.log.append(f"{self.clock} status: {status.desired_replicas} wanted, {status.ready_replicas} ready")
                self.service = self.service.model_copy(update={"status": status})
            self.events += (*events_of(done), *made.notes)
            self.told |= {(one.type, one.status.value, one.reason) for one in status.conditions}
            assert self.told <= DOCUMENTED, self.told - DOCUMENTED
            self.backoffs.end_pass(self.service.status, self.pods)
        self.ready_before = self.ready_before if self.lose_status_writes else made.ready
        laws.check_slots(self)
        return made

    def _note_refusals(self, failures: list[Failure]) -> None:
        """As the executor does: the next plan reports them, and what was refused is tried again after a pause."""
        if not self.refused and not self.has_refused:
            self.has_news = False
            return  # a story that states the failures itself keeps them
        self.has_refused = bool(self.refused)
        if failures:
            again_at = self.now + REFUSED_PAUSE
            self.due = again_at if self.due is None else min(self.due, again_at)
        was = [(one.action, one.reason) for one in self.failures]
        self.failures = tuple(failures)
        self.has_news = was != [(one.action, one.reason) for one in failures]

    def restart_operator(self) -> None:
        """A new leader: nothing that lived in memory is left."""
        self.recommendations, self.applied, self.taken, self.failures = (), {}, frozenset(), ()
        self.ready_before, self.scaling_memory, self.accounting_memory = None, ScalingMemory(), AccountingMemory()
        self.smoke_results = {}
        if self.traffic:
            self.traffic.known_from = self.now
        self.asking_since = self.now
        for pod in self.pods.values():
            pod.sample = None  # what replicas told the leader before
        self.due = self.now  # it looks at everything once

    # --- what the cluster does ---------------------------------------------------------------------------------------

    def tick(self, seconds: int = 1, *, reconcile: bool = True) -> None:
        """One second passes, or as many in which nothing happens before the last of them."""
        self.now += TICK * seconds
        self.load(self)
        if self.traffic and self.service:
            self.traffic.tick(self.service, self.now, seconds)
        in_use = sum(bool(pod.replica.node) for pod in self.pods.values())
        for name, pod in list(self.pods.items()):
            if pod.ends_at is not None:
                if self.now >= pod.ends_at and not pod.hangs:
                    del self.pods[name]
                continue
            if not pod.replica.node and pod.replica.phase == "Pending":
                in_use += self._schedule(pod, in_use)
            self._run(pod, seconds)
        laws.check_doubles_end(self)
        if reconcile and self._is_woken():
            self.reconcile()

    def _is_woken(self) -> bool:
        """As in the shell: by a change of service, engine, pod, node or demand, a sample that matters, or the clock."""
        demand = self.demand(self)
        facts = (
            demand and (demand.waiting_requests, demand.open_requests, demand.complete),
            self.service and (self.service.metadata, self.service.spec),
            tuple(self.cache.view(self._actual(), self.now).values()),
            tuple(self.nodes.values()),
            dict(self.engines),
            dict(self.templates),
            [pod.outdated_certificate_ends for pod in self.live],
        )
        samples = [pod.sample for pod in self.pods.values() if pod.sample and pod.answers]
        is_busy = any(sample.draining or sample.requests for sample in samples) and self.now.second % 2 == 0
        is_due = self.due is not None and self.now >= self.due
        is_woken = facts != self._facts or is_busy or is_due
        self._facts = facts
        return is_woken

    def _schedule(self, pod: SimulatedPod, in_use: int) -> int:
        usable = [node.name for node in self.nodes.values() if node.ready and not node.cordoned]
        if in_use >= self.gpus or not usable:
            pod.replica = replace(pod.replica, unschedulable="0/4 nodes are available: 4 Insufficient nvidia.com/gpu.")
            return 0
        load = {name: sum(other.replica.node == name for other in self.pods.values()) for name in usable}
        node = min(usable, key=lambda name: (load[name], name))
        pod.replica = replace(
            pod.replica, node=node, unschedulable="", scheduled_at=self.now, unready_since=self.now, pod_ip="10.0.0.1"
        )
        if node in self.refusing:
            self.fail(pod.replica.name, "UnexpectedAdmissionError")
        return 1

    def _run(self, pod: SimulatedPod, seconds: int) -> None:
        node = self.nodes.get(pod.replica.node)
        if node is None or pod.replica.phase in ("Failed", "Succeeded"):
            return
        if not node.ready:
            self._set_ready(pod, is_ready=False)
            return
        is_broken = self.image_is_broken or pod.replica.revision in self.broken_revisions
        if is_broken and not pod.replica.ready and not pod.replica.started:
            pod.replica = replace(pod.replica, waiting_reason="ImagePullBackOff")
            return
        if pod.replica.phase == "Pending":
            pod.replica = replace(pod.replica, phase="Running", waiting_reason="", running_since=self.now)
        pod.loads_for -= seconds
        if pod.drain_arrives_at is not None and self.now >= pod.drain_arrives_at:
            pod.drains = True
        flaps = pod.flaps_until is not None and self.now < pod.flaps_until
        is_started = pod.loads_for <= 0 and not pod.replica.waiting_reason
        was_started = pod.replica.started  # the kubelet writes Ready a moment after `started`
        if is_started != was_started:
            pod.replica = replace(pod.replica, started=is_started)
        self._set_ready(pod, is_ready=is_started and was_started and not (pod.drains or flaps or pod.is_hung))
        if pod.drains and pod.running and self.now.second % 3 == 0 and not pod.is_hung:
            pod.running -= 1
        if pod.drains:
            pod.waiting = 0  # what waits gets its turn
            if pod.is_hung and self.now >= pod.hung_since + HANG_LIMIT:
                pod.running = 0  # its runtime ends what cannot finish
        if pod.answers and pod.loads_for <= 0:
            answer = Sample(at=self.now, kv_usage=pod.kv, running=pod.running, waiting=pod.waiting, draining=pod.drains)
            answer = replace(answer, outdated_certificate_ends=pod.outdated_certificate_ends)
            for ago in reversed(range(min(seconds, pod.late_by + 1))):
                pod.said.append(replace(answer, at=self.now - TICK * ago))
            pod.said = pod.said[-1 - pod.late_by :]
            pod.sample = pod.said[0]

    def _set_ready(self, pod: SimulatedPod, *, is_ready: bool) -> None:
        if is_ready == pod.replica.ready:
            return
        since, until = (self.now, None) if is_ready else (None, self.now)
        pod.replica = replace(pod.replica, ready=is_ready, ready_since=since, unready_since=until)

    def run(self, seconds: float) -> "SimulatedCluster":
        for _ in range(int(seconds)):
            self.tick()
        return self

    def skip(self, seconds: int) -> None:
        """As `run`, but from one moment at which something is due to the next."""
        end = self.now + TICK * seconds
        before: Any = None
        while self.now < end:
            facts = quiet_time.all_that_may_move(self)
            quiet = quiet_time.seconds_until_due(self) if facts == before else 1
            before = facts
            self.tick(min(quiet, int((end - self.now) / TICK)))

    # --- what is so --------------------------------------------------------------------------------------------------

    @property
    def clock(self) -> str:
        return f"+{int((self.now - T0).total_seconds())}s"

    @property
    def live(self) -> list[SimulatedPod]:
        return [pod for pod in self.pods.values() if pod.is_live]

    @property
    def ready(self) -> list[SimulatedPod]:
        return [pod for pod in self.live if pod.replica.ready]

    @property
    def draining(self) -> list[SimulatedPod]:
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
