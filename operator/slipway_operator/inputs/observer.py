"""Converts pods and nodes into the structs from which the core decides, and indexes pods by service.

It only reads, and only from memory. A pod is indexed under the service that controls it, whatever its labels say. A pod
that nothing of ours controls is indexed under the service of its label, so that its name is avoided; the core compares
the owner's uid.
"""

from collections import defaultdict
from datetime import UTC, datetime
from typing import NamedTuple, cast

from slipway_api import internal_tls, names
from slipway_api.moments import read_moment
from slipway_api.pod_labels import ROUTING_LABELS, read_identity
from slipway_api.types import ServiceKey
from slipway_kube.informer import Change
from slipway_kube.objects import ContainerStatus, Node, Pod, Terminated
from slipway_operator.core import observed as seen
from slipway_operator.core.node_taints import find_departure, is_shut_down
from slipway_operator.inputs.labels import (
    controller_of,
    edited_labels,
    intended_state,
    pool_name,
    pulls,
    service_name,
)

_STARTING = ("", "ContainerCreating", "PodInitializing")  # reasons of `waiting` of a container without a problem
TERMINATION_MESSAGE_SHOWN = 300  # characters of it that go into a condition


class PoolKey(NamedTuple):
    """Which WarmPool."""

    namespace: str
    name: str


class PodIndex:
    """Pods by the service that they belong to, and services by node, so that no event walks over all pods."""

    def __init__(self) -> None:
        self._pods: defaultdict[ServiceKey, dict[str, Pod]] = defaultdict(dict)
        self._on_node: defaultdict[str, dict[ServiceKey, int]] = defaultdict(dict)  # how many pods of each

    def saw(self, change: Change, old: Pod | None, new: Pod | None) -> set[ServiceKey]:
        """Apply one change; returns the services that it concerns: two, if the pod changed hands."""
        concerned = set()
        if old is not None and (key := service_of(old)) is not None:
            concerned.add(key)
            if self._pods[key].pop(old.name, None) is not None:
                self._count(old.spec.node_name, key, -1)
            if not self._pods[key]:
                del self._pods[key]
        if change is not Change.DELETED and new is not None and (key := service_of(new)) is not None:
            concerned.add(key)
            self._pods[key][new.name] = new
            self._count(new.spec.node_name, key, +1)
        return concerned

    def of(self, key: ServiceKey) -> list[Pod]:
        """The pods of one service, by name."""
        pods = self._pods.get(key, {})
        return [pods[name] for name in sorted(pods)]

    def services(self) -> list[ServiceKey]:
        """Every service that has a pod, whether or not the service itself still exists."""
        return list(self._pods)

    def on_node(self, node: str) -> set[ServiceKey]:
        """The services with a pod on this node."""
        return set(self._on_node.get(node, ()))

    def _count(self, node: str, key: ServiceKey, change: int) -> None:
        if not node:
            return
        counts = self._on_node[node]
        counts[key] = counts.get(key, 0) + change
        if not counts[key]:
            del counts[key]
        if not counts:
            del self._on_node[node]


def service_of(pod: Pod) -> ServiceKey | None:
    """The service whose replica the pod is; if nothing of ours controls the pod, the service that its label names."""
    if pulls(pod):
        return None
    name = service_name(pod) if controller_of(pod) is not None else pod.labels.get(names.LABEL_SERVICE)
    return ServiceKey(pod.namespace, name) if name else None


def pool_of(pod: Pod) -> PoolKey | None:
    """The WarmPool for which the pod waits, or waited; the pods of a service that the pool had no pod for, too."""
    name = pool_name(pod) or pod.metadata.annotations.get(names.ANNOTATION_POOL_MISSED)
    if controller_of(pod) is None:
        name = pod.labels.get(names.LABEL_POOL)  # its name is avoided
    return PoolKey(pod.namespace, name) if name else None


def replica(pod: Pod, sample: seen.Sample | None) -> seen.Replica:
    """The facts of one pod."""
    owner = next((reference.uid for reference in pod.metadata.owner_references if reference.controller), "")
    ready = pod.condition("Ready")
    scheduled = pod.condition("PodScheduled")
    is_unschedulable = scheduled is not None and scheduled.status == "False" and scheduled.reason == "Unschedulable"
    server = pod.container(names.SERVER_CONTAINER)
    failing = find_failing(pod)
    subject = failing or server
    waiting = subject.state.waiting if subject is not None else None
    annotations = pod.metadata.annotations
    # The API server always sets a creation time; a pod without one is as old as can be.
    created_at = pod.metadata.creation_timestamp or datetime.min.replace(tzinfo=UTC)
    claimed_at = read_moment(annotations.get(names.ANNOTATION_CLAIMED_AT))
    returned_at = moment_of(pod, names.ANNOTATION_RETURNED_AT)
    if sample is not None and returned_at is not None and sample.at < returned_at:
        sample = None  # it tells of the service that had the pod before
    running = server.state.running if server is not None else None
    unready_since = ready.last_transition_time if ready is not None and not pod.is_ready else None
    digests = annotations.get(names.ANNOTATION_SERVING_TOKEN_SHA256, "")
    identity, edited = read_identity(pod.name, pod.labels, annotations), edited_labels(pod)
    return seen.Replica(
        name=pod.name,
        uid=pod.uid,
        owner_uid=owner,
        revision=identity.revision,
        slot=identity.slot,
        attempt=identity.attempt,
        state=intended_state(pod).value,
        edited_labels=edited,
        is_routed=not any(one.label in ROUTING_LABELS for one in edited),
        created_at=claimed_at or created_at,
        deleted_at=pod.metadata.deletion_timestamp,
        phase=cast(seen.Phase, pod.status.phase or "Pending"),
        phase_reason=pod.status.reason,
        phase_message=pod.status.message,
        node=pod.spec.node_name,
        unschedulable=scheduled.message if scheduled is not None and is_unschedulable else "",
        held=_hold(pod),
        initializing=_initializing(pod),
        is_creating=bool(pod.spec.node_name) and not has_begun(pod),
        ready=pod.is_ready,
        server_ready=server is not None and server.ready,
        unready_message=f"{ready.reason}: {ready.message}" if ready is not None and not pod.is_ready else "",
        ready_since=ready.last_transition_time if ready is not None and pod.is_ready else None,
        unready_since=unready_since,
        # The kubelet remembers that a container was ready once. One that has returned to its pool and was claimed again
        # has to start for the new service: it has, if it was ready after the claim.
        started=server is not None
        and bool(server.started)
        and not (claimed_at is not None and unready_since is not None and unready_since < claimed_at),
        scheduled_at=scheduled.last_transition_time if scheduled is not None and scheduled.status == "True" else None,
        container=failing.name if failing is not None else "",
        waiting_reason=waiting.reason if waiting is not None else "",
        waiting_message=waiting.message if waiting is not None else "",
        is_terminated=subject is not None and subject.state.terminated is not None,
        restarts=subject.restart_count if subject is not None else 0,
        last_exit=_last_exit(subject),
        termination_message=_termination_message(pod),
        pod_ip=pod.status.pod_ip,
        speaks_tls=pod.spec.secret_of(internal_tls.VOLUME) == internal_tls.REPLICAS_SECRET,
        drain_started=read_moment(annotations.get(names.ANNOTATION_DRAIN_STARTED)),
        drain_reason=annotations.get(names.ANNOTATION_DRAIN_REASON, ""),
        leaving_since=read_moment(annotations.get(names.ANNOTATION_NODE_LEAVING_SINCE)),
        drain_forced=read_moment(annotations.get(names.ANNOTATION_NODE_DRAIN_FORCED)),
        replace_requested=read_moment(annotations.get(names.ANNOTATION_REPLACE)),
        safe_to_evict=annotations.get(names.ANNOTATION_SAFE_TO_EVICT, ""),
        do_not_disrupt=annotations.get(names.ANNOTATION_DO_NOT_DISRUPT, ""),
        claimed_at=claimed_at,
        pool=pool_name(pod),
        warm_shape=annotations.get(names.ANNOTATION_WARM_SHAPE, ""),
        claims=_number(annotations.get(names.ANNOTATION_CLAIMS)),
        pod_created_at=created_at,
        serving_digests=tuple(part for part in digests.split(",") if part),
        running_since=running.started_at if running is not None else None,
        sample=sample,
    )


def moment_of(pod: Pod, annotation: str) -> datetime | None:
    """An annotation of a pod as a time; None where it is absent, or is none."""
    return read_moment(pod.metadata.annotations.get(annotation))


def node_facts(node: Node) -> seen.Node:
    """The facts of one node."""
    ready = next((condition for condition in node.status.conditions if condition.type == "Ready"), None)
    is_ready = ready is not None and ready.status == "True"
    taints = [taint.key for taint in node.spec.taints]
    departure = find_departure(taints)
    return seen.Node(
        name=node.name,
        ready=is_ready,
        not_ready_since=ready.last_transition_time if ready is not None and not is_ready else None,
        ready_since=ready.last_transition_time if ready is not None and is_ready else None,
        cordoned=node.spec.unschedulable or departure is not None,
        leaving=departure[0] if departure is not None else "",
        notice=departure[1].notice if departure is not None else None,
        is_shut_down=is_shut_down(taints),
    )


def find_failing(pod: Pod) -> ContainerStatus | None:
    """The container other than the server that keeps the pod from being ready, by what the kubelet says; None: none.

    An init container comes first: while it fails, nothing else starts. If the server fails itself, it is the server.
    """
    others = [one for one in pod.status.container_statuses if one.name != names.SERVER_CONTAINER]
    server = pod.container(names.SERVER_CONTAINER)
    for one in pod.status.init_container_statuses:
        if _fails(one):
            return one
    if pod.is_ready or (server is not None and _fails(server)):
        return None
    return next((one for one in others if _fails(one)), None)


def _fails(container: ContainerStatus) -> bool:
    """Whether it cannot start, or ended with an error and has not been ready since."""
    state = container.state
    if state.waiting is not None and state.waiting.reason not in _STARTING:
        return True
    if state.terminated is not None:
        return state.terminated.exit_code != 0
    ended = container.last_state.terminated
    return not container.ready and ended is not None and ended.exit_code != 0


def _hold(pod: Pod) -> seen.Hold:
    """Why no scheduler places the pod: a scheduling gate, or no scheduler has looked at it."""
    scheduled = pod.condition("PodScheduled")
    if pod.spec.node_name or (scheduled is not None and scheduled.status == "True"):
        return ""
    if scheduled is None:
        return "Unseen"
    return "Gated" if scheduled.reason == "SchedulingGated" else ""


def has_begun(pod: Pod) -> bool:
    """Whether a container of the pod runs, ran, or has a problem of its own."""
    statuses = (*pod.status.init_container_statuses, *pod.status.container_statuses)
    return any(one.state.waiting is None or one.state.waiting.reason not in _STARTING for one in statuses)


def _initializing(pod: Pod) -> str:
    """The name of the first init container that has not finished; a sidecar has, once it has started."""
    server = pod.container(names.SERVER_CONTAINER)
    if server is None or server.state.waiting is None or server.state.waiting.reason != "PodInitializing":
        return ""
    unfinished = (one for one in pod.status.init_container_statuses if not (one.ready or one.started))
    return next((one.name for one in unfinished), "")


def _last_exit(container: ContainerStatus | None) -> str:
    """How the container's last run ended: `OOMKilled (exit code 137)`, with its termination message if it left one."""
    ended = _last_end(container)
    if ended is None:
        return ""
    how, word = f"{ended.reason or 'Error'} (exit code {ended.exit_code})", _shortened(ended.message)
    return f"{how}: {word}" if word else how


def _termination_message(pod: Pod) -> str:
    ended = _last_end(pod.container(names.SERVER_CONTAINER))
    return _shortened(ended.message) if ended is not None else ""


def _shortened(message: str) -> str:
    return " ".join(message.split())[:TERMINATION_MESSAGE_SHOWN]


def _last_end(container: ContainerStatus | None) -> Terminated | None:
    return (container.state.terminated or container.last_state.terminated) if container is not None else None


def _number(text: str | None) -> int:
    """An annotation as a number; 0 if it was edited to something else."""
    return int(text) if text is not None and text.isdecimal() else 0
