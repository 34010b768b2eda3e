"""The snapshot of one service, its pods, nodes and revisions from which the core decides; frozen.

`inputs.observer` fills it from caches. Nothing here is computed from a decision; what a decision has to remember is
stored in `service.status` or in pod metadata, because those survive the operator.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple

from slipway_api import names
from slipway_api.conditions import Reason
from slipway_api.inference_service import InferenceService
from slipway_api.model_names import NameConflict
from slipway_api.model_spec import Shape
from slipway_api.runtime_api import Signals, StartupTimes, State
from slipway_operator.core.actions import Failure as Failure
from slipway_operator.core.actions import SmokeResult
from slipway_operator.core.adapter.observed import AttachedAdapter
from slipway_operator.core.engines import EngineSeen
from slipway_operator.core.installation import Defaults
from slipway_operator.core.labels import EditedLabel
from slipway_operator.core.pulls import PullsSeen
from slipway_operator.core.templates import NOTHING, Inheritance
from slipway_operator.core.warm_pool.supply import WarmSupply

Hold = Literal["", "Gated", "Unseen"]
Phase = Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]

TokenDigests = Callable[[str, str, str], tuple[str, ...]]
"""(namespace, pod name, nonce) -> the SHA-256 digests of the admin tokens that the pod shall accept, one per master."""
ServingDigests = Callable[[str, str], tuple[str, ...]]
"""(namespace, service) -> the SHA-256 digests of the serving tokens that its pods shall accept, one per key."""

KernelsKeys = Callable[[str, str], str]
"""(namespace, service) -> the key by which its replicas seal the compiled kernels that they share on a node."""


class FailedAdapter(NamedTuple):
    """An adapter that a replica could not load."""

    name: str
    reason: str  # in one word, an AdapterReason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The capacity of one replica, fixed from its start to its end, and the result of its start."""

    max_sequences: int
    """Requests of full length at once: as many as fit the KV cache, at most `maxNumSeqs`."""
    kv_blocks: int
    bytes_per_token: int
    startup: StartupTimes = field(default_factory=StartupTimes)
    """Where the time of its start went; the same until the engine starts again."""
    warnings: tuple[str, ...] = ()
    """What costs quality or speed in the way that the model is loaded; sentences."""
    failed_adapters: tuple[FailedAdapter, ...] = ()
    """Those that it could not load before it was ready."""

    @classmethod
    def of(cls, state: State) -> "Capacity | None":
        """From a `/state` answer; None while the model is loading.

        1,000 blocks of 16 tokens, 4,096 tokens in a request: 1000 // 256 = 3 of them.
        """
        if not (state.blocks.total and state.block_size and state.max_model_len):
            return None
        blocks_of_one = -(-state.max_model_len // state.block_size)
        return cls(
            max_sequences=min(state.max_num_seqs, state.blocks.total // blocks_of_one),
            kv_blocks=state.blocks.total,
            bytes_per_token=state.bytes_per_token,
            startup=state.startup,
            warnings=state.warnings,
            failed_adapters=tuple(
                FailedAdapter(one.name, one.reason, one.message) for one in state.adapters if one.state == "failed"
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The load that one replica reported, with the time of the report."""

    at: datetime
    boot_id: str = ""
    kv_usage: float
    running: int
    waiting: int
    draining: bool = False
    starting: str = ""  # until it is ready for the first time: Downloading, Loading or WarmingUp
    not_ready: str = ""  # why it is not, once it was: StepLoopStalled or EngineDead
    invalid_logits: int = 0  # answers since its start that ended because the logits were NaN or infinite
    outdated_certificate_ends: datetime | None = None  # of a certificate that its engine should no longer serve
    capacity: Capacity | None = None  # None: it is loading, or has not reported it yet

    @classmethod
    def of(cls, signals: Signals, at: datetime, capacity: Capacity | None = None) -> "Sample":
        """The part of a `/signals` answer that decisions use, with the capacity that the replica reported earlier."""
        end = signals.outdated_certificate_ends
        return cls(
            at=at,
            boot_id=signals.boot_id,
            kv_usage=signals.kv_usage,
            running=signals.running,
            waiting=signals.waiting,
            draining=signals.draining,
            starting=signals.starting,
            not_ready=signals.not_ready,
            invalid_logits=signals.invalid_logits,
            outdated_certificate_ends=datetime.fromtimestamp(end, UTC) if end else None,
            capacity=capacity,
        )

    @property
    def requests(self) -> int:
        """Accepted and unfinished."""
        return self.running + self.waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """The facts of one pod of a service, or with its label; `owner_uid` tells whether the service controls it.

    Revision, slot, attempt and state are as the operator gave them to the pod, also while its labels are edited.
    """

    name: str
    uid: str
    owner_uid: str  # uid of the controlling ownerReference; "" when there is none
    revision: str  # the whole hash; "": unknown
    slot: int  # a number within one revision
    attempt: int
    state: str = names.STATE_SERVING  # serving | draining, or warm while it waits in a WarmPool
    edited_labels: tuple[EditedLabel, ...] = ()
    is_routed: bool = True  # none of the labels by which gateway, Service and disruption budget find it is edited
    created_at: datetime  # of a pod that was claimed from a WarmPool: when it was claimed
    deleted_at: datetime | None = None  # metadata.deletionTimestamp

    phase: Phase = "Pending"
    phase_reason: str = ""  # status.reason: Evicted, NodeShutdown, UnexpectedAdmissionError ...
    phase_message: str = ""
    node: str = ""  # spec.nodeName; "" while unscheduled
    unschedulable: str = ""  # the scheduler's message while PodScheduled=False with reason Unschedulable
    held: Hold = ""  # why no scheduler places it: a scheduling gate, or none has looked at it yet
    initializing: str = ""  # the init container that runs, or is about to; "": none, or it has no node
    is_creating: bool = False  # it has a node, and the kubelet has started none of its containers
    mount_failure: str = ""  # why a volume cannot be mounted, by the kubelet's newest event; only while is_creating
    ready: bool = False  # condition Ready
    server_ready: bool = False  # containerStatuses[server].ready: other containers keep the pod from being ready
    unready_message: str = ""  # reason and message of condition Ready while it is not True
    ready_since: datetime | None = None  # lastTransitionTime of condition Ready while it is True
    unready_since: datetime | None = None  # ... while it is not True
    started: bool = False  # containerStatuses[server].started: this run of the server was ready once
    scheduled_at: datetime | None = None  # lastTransitionTime of condition PodScheduled while it is True
    # The container that keeps the pod from being ready: `server`, or another one that fails, or an init container.
    container: str = ""  # its name; "": the server
    waiting_reason: str = ""  # its state.waiting: ImagePullBackOff, CrashLoopBackOff ...
    waiting_message: str = ""
    is_terminated: bool = False  # the present run has ended, and the kubelet has not written the next state yet
    restarts: int = 0
    last_exit: str = ""  # how the last container run ended, for people: "OOMKilled (exit code 137)"
    termination_message: str = ""  # the termination message that the runtime left when it last ended
    pod_ip: str = ""
    speaks_tls: bool = False  # its pod was created with the certificate of its namespace

    drain_started: datetime | None = None  # annotation slipway.dev/drain-started
    drain_reason: str = ""  # annotation slipway.dev/drain-reason
    leaving_since: datetime | None = None  # annotation slipway.dev/node-leaving-since
    drain_forced: datetime | None = None  # annotation slipway.dev/node-drain-forced
    replace_requested: datetime | None = None  # annotation slipway.dev/replace
    safe_to_evict: str = ""  # annotation of cluster-autoscaler; "": absent
    do_not_disrupt: str = ""  # annotation of Karpenter; "": absent
    claimed_at: datetime | None = None  # annotation slipway.dev/claimed-at; None: it was created for the service
    pool: str = ""  # label: the WarmPool that made it; "": none did
    warm_shape: str = ""  # annotation slipway.dev/warm-shape
    claims: int = 0  # annotation slipway.dev/claims: how often it was claimed and returned before
    pod_created_at: datetime | None = None  # metadata.creationTimestamp, also of a claimed pod
    serving_digests: tuple[str, ...] = ()  # annotation slipway.dev/serving-token-sha256
    running_since: datetime | None = None  # containerStatuses[server].state.running.startedAt
    refuses_token: bool = False  # it answered 401 when the operator last asked for its signals
    sample: Sample | None = None  # the newest one, however old; None: never answered


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The facts of one node that runs a replica."""

    name: str
    ready: bool = True
    not_ready_since: datetime | None = None  # lastTransitionTime of its Ready condition while that is not True
    ready_since: datetime | None = None  # ... while it is True
    cordoned: bool = False  # to be emptied: spec.unschedulable, or a taint that says so
    leaving: str = ""  # the taint that says so; "": it is cordoned
    notice: timedelta | None = None  # the node goes so long after that taint was set; None: when it is empty
    is_shut_down: bool = False  # a taint says that nothing runs there any more


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayCount:
    """How many gateways of the release namespace answer the operator."""

    answering: int
    running: int
    """Gateways whose container runs."""
    namespace: str
    selector: str
    """Labels of the pods of gateways, for `kubectl get pods -l`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUSupply:
    """The GPUs that the nodes of the cluster have in all, used or free, of the resource that a service asks for."""

    nodes: int
    """Nodes with that resource."""
    largest: int
    """The most of them on one node."""
    largest_of_product: int
    """The most of them on one node with the product that the service asks for; it asks for none: `largest`."""
    products: tuple[str, ...] = ()
    """The products of the nodes with that resource."""
    may_grow: bool = False
    """Whether a node autoscaler may add nodes of a kind that is not there yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRevision:
    """The facts of one ControllerRevision of the service, or with its label."""

    name: str
    uid: str
    owner_uid: str
    hash: str  # in its name
    edited_labels: tuple[EditedLabel, ...] = ()
    number: int  # .revision: counts up, newest highest
    data: Mapping[str, Any]  # .data, as `core.service.revision` built it


@dataclass(frozen=True, slots=True)
class PastRecommendation:
    """A number of replicas that was wanted at some moment; the stabilisation windows look back over these."""

    at: datetime
    desired: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What clients ask of one service at all gateways."""

    at: datetime
    """When the oldest of the reports that were added up was received."""
    waiting_requests: int = 0
    """Requests that gateways hold because no replica is ready."""
    waiting_bytes: int = 0
    longest_wait: timedelta = timedelta()
    refused_requests: int = 0
    """Requests that gateways refused because their waiting rooms were full, since these were last empty."""
    open_requests: int = 0
    """Requests sent to replicas and unfinished."""
    idle_since: datetime | None = None
    """When the last request arrived or ended; None: no gateway has seen one since its start."""
    complete: bool = True
    """Whether every gateway that is known has reported within the last seconds; else nothing may count as idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """The outcomes of requests that one revision answered between two moments, added up over all gateways."""

    requests: int = 0
    errors: int = 0
    ttft: tuple[int, ...] = ()
    """Time to first token: counts per bucket of `gateway_api.OUTCOME_BUCKETS`, and one above; not cumulated."""
    itl: tuple[int, ...] = ()
    output_tokens: int = 0
    good: int = 0
    """Of a service: requests without an error and within the latency limits of `spec.slo`."""


OutcomesSince = Callable[[datetime], Mapping[str, Outcomes]]
"""Since a moment -> outcomes by hash of the revision; gateways that do not answer are missing from the sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOutcomes:
    """The requests of a service as its clients saw them, added up over all gateways (`gateway_api.ServiceOutcomes`)."""

    began: datetime
    """Since when this leader counts; another moment means that the total began anew."""
    total: Outcomes
    """All of them since then; it only grows."""
    since: Callable[[datetime], Outcomes]
    """Those since a moment, at most six hours ago."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountingMemory:
    """What the accounting of SLO and cost remembers from one pass to the next; a new leader starts without it."""

    began: datetime | None = None
    """`ServiceOutcomes.began` that the totals below belong to."""
    recorded: tuple[tuple[datetime | None, Outcomes], ...] = ()
    """Values that `status.slo.recordedTime` may have, the newest last, each with what had been counted then."""
    counted: Outcomes = field(default_factory=Outcomes)
    """What had been counted in the last pass."""
    objectives_from: datetime | None = None
    """Requests before this moment do not count for objectives: the service had never served. None: all count."""
    cost_written: datetime | None = None
    """When the price of tokens in status was last changed."""
    at: datetime | None = None
    """When the last pass was."""
    gpus: int = 0
    """GPUs that replicas held then."""
    marks: tuple["CostMark", ...] = ()
    """The sums about once a minute for an hour, oldest first; the last is of the last pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostMark:
    """Sums at one moment, since this leader began."""

    at: datetime
    gpu_seconds: float = 0.0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingMemory:
    """What autoscaling remembers from one pass to the next; a new leader starts without it, and waits longer."""

    quiet_since: datetime | None = None
    """Since when this leader knows of no request; None: there are some, or nothing is known yet."""
    unheard_since: datetime | None = None
    """Since when not every gateway reports; None: they do."""
    waiting: int = 0
    """Requests that gateways held in the last pass."""
    refused: int = 0
    """Requests that full gateways had refused by the last pass."""
    asked_back: Mapping[str, datetime] = field(default_factory=dict)
    """uid of a draining replica -> when it was first asked to serve again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubAnswer:
    """What a hub that may be asked has told of the sizes of the model."""

    asked_at: datetime | None = None  # None: it was not asked, or so long ago that it may be asked again
    shape: Shape | None = None
    is_done: bool = False  # without a shape: it does not answer, or does not tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One service, its pods, nodes and revisions at one moment."""

    service: InferenceService  # its status as last written or read, whichever is newer
    fault: str = ""
    """Why the stored spec cannot be followed, naming the field; `service.spec` then holds only what could be read."""
    fault_reason: Reason = Reason.INVALID_SPEC
    """The reason of conditions for that fault."""
    inheritance: Inheritance = NOTHING
    """What `service.spec` has from ServiceTemplates."""
    engine: EngineSeen | None = None
    """The Engine that the spec names; None: our own runtime, or Engines are not read yet."""
    name_conflict: NameConflict | None = None
    """Why the gateway does not serve it under its served name; None: it does."""
    certificate_fault: str = ""
    """Why the replicas of the namespace have no certificate, or will soon have none; empty: all is well."""
    tls_is_settled: bool = True
    """Whether all gateways can call replicas that speak TLS, so that those in plain text may be replaced."""
    lacks_fallback: bool = False
    """Whether the service that `spec.routing.fallback` names does not exist."""
    replicas: tuple[Replica, ...] = ()
    nodes: Mapping[str, Node] = field(default_factory=dict)  # by name; a node that is not known is taken for healthy
    disrupted: bool = False
    """Whether most nodes of the cluster look lost at once, so that the fault is more likely between us and them."""
    revisions: tuple[StoredRevision, ...] = ()  # ControllerRevisions with the service's label, whatever their owner
    defaults: Defaults
    token_digests: TokenDigests
    serving_digests: ServingDigests
    kernels_key: KernelsKeys
    nonce_seed: bytes
    """Random bytes of this pass, from which the core derives nonces."""

    demand: Demand | None = None
    """Requests at the gateways; None: no gateway has reported since this operator began to lead."""
    outcomes_since: OutcomesSince | None = None
    """Outcomes of requests by revision; None: no gateway has reported since this operator began to lead."""
    service_outcomes: ServiceOutcomes | None = None
    """Outcomes of the service's requests; None: no gateway has counted any since this operator began to lead."""
    accounting_memory: AccountingMemory = field(default_factory=AccountingMemory)
    """`Plan.accounting.memory` of the last pass; empty after a takeover."""

    warm: WarmSupply | None = None
    """The WarmPool that the spec names, and its waiting pods; None: the spec names none."""
    lost_claims: frozenset[str] = frozenset()  # uids of pods whose claim failed: others have them, or they are going

    gateways: GatewayCount | None = None
    """None: this operator has not led for long enough to know."""
    gpu_supply: GPUSupply | None = None
    """What the nodes have, while a replica with GPUs finds no node; None: all are placed, or nodes are not readable."""
    hub: HubAnswer | None = None
    """The sizes of the model by its hub; None: no hub may be asked."""
    pulls: PullsSeen | None = None
    """Nodes, and pods that pull image and model to them; None: the spec asks for none, and there are none."""
    adapters: tuple[AttachedAdapter, ...] = ()
    """The LoRAAdapters whose base is the service, by name."""
    recommendations: tuple[PastRecommendation, ...] = ()  # `Plan.recommendations` of the last pass; () after a takeover
    scaling_memory: ScalingMemory = field(default_factory=ScalingMemory)
    """`Plan.scaling_memory` of the last pass; empty after a takeover."""
    ready_before: frozenset[str] | None = None  # `Plan.ready` of the last pass; None after a takeover
    asking_since: datetime | None = None  # when this operator began to ask replicas for signals; None: long ago
    taken_names: frozenset[str] = frozenset()  # pod names whose POST met a 409 by a pod that is not ours
    applied: Mapping[str, str] = field(default_factory=dict)
    """`ApplyChild.key` -> `ApplyChild.digest` of applied children; emptied on resync, which corrects drift."""
    failures: tuple[Failure, ...] = ()
    smoke_results: Mapping[str, SmokeResult] = field(default_factory=dict)
    """By uid of the replica that was asked; empty after a takeover."""


def is_disruption(not_ready: int, nodes: int) -> bool:
    """Whether so many nodes look lost that the fault is more likely between us and them; `Observed.disrupted`.

    All of them, or at least three that are 55 percent: the limits of Kubernetes' node-lifecycle-controller.
    """
    return not_ready > 0 and (not_ready == nodes or (not_ready >= 3 and not_ready * 100 >= nodes * 55))
