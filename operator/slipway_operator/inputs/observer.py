"""From the caches to `Observed`: one service, its pods, their nodes and signals, frozen at one moment.

Only reading happens here, and only from memory. A pod belongs to the service that its label names; whether it is
really ours is for the core to say, by the owner's uid.
"""

import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import cast

from slipway_api import names
from slipway_api.inference_service import InferenceService
from slipway_api.types import ServiceKey
from slipway_kube.informer import Change
from slipway_kube.objects import Key, Node, Pod, Terminated
from slipway_operator.controller.memory import Memory
from slipway_operator.controller.store import StoredService, key_of
from slipway_operator.core import observed as seen
from slipway_operator.inputs.disruption import NodeCounts
from slipway_operator.inputs.revisions import RevisionIndex

SampleOf = Callable[[str], seen.Sample | None]
NamesakesOf = Callable[[ServiceKey], Iterable[StoredService]]


LAST_WORDS_SHOWN = 300  # characters of a termination message that go into a condition


class PodIndex:
    """Which pods carry which service's label: kept by the informer's changes, so no pass walks over all pods."""

    def __init__(self) -> None:
        self._pods: defaultdict[ServiceKey, dict[str, Pod]] = defaultdict(dict)

    def saw(self, change: Change, old: Pod | None, new: Pod | None) -> set[ServiceKey]:
        """Take in one change, and say whose business it is. A pod that changes its label concerns two services."""
        concerned = set()
        if old is not None and (key := service_of(old)) is not None:
            concerned.add(key)
            self._pods[key].pop(old.name, None)
            if not self._pods[key]:
                del self._pods[key]
        if change is not Change.DELETED and new is not None and (key := service_of(new)) is not None:
            concerned.add(key)
            self._pods[key][new.name] = new
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
        return {key for key, pods in self._pods.items() if any(pod.spec.node_name == node for pod in pods.values())}

    def all(self) -> Iterable[tuple[ServiceKey, Pod]]:
        """Every pod with its service."""
        return [(key, pod) for key, pods in self._pods.items() for pod in pods.values()]


class Observer:
    """Reads the caches into snapshots."""

    def __init__(
        self,
        pods: PodIndex,
        nodes: Mapping[Key, Node],
        sample_of: SampleOf,
        namesakes: NamesakesOf,
        revisions: RevisionIndex,
        node_counts: NodeCounts,
        *,
        defaults: seen.Defaults,
        token_digests: seen.TokenDigests,
        serving_digests: seen.ServingDigests,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._pods = pods
        self._nodes = nodes
        self._sample_of = sample_of
        self._namesakes = namesakes
        self._revisions = revisions
        self._node_counts = node_counts
        self._defaults = defaults
        self._token_digests = token_digests
        self._serving_digests = serving_digests
        self._random_bytes = random_bytes

    def observe(self, key: ServiceKey, service: InferenceService, memory: Memory, *, fault: str = "") -> seen.Observed:
        """Everything that a decision about `service` may know, now."""
        pods = self._pods.of(key)
        node_names = {pod.spec.node_name for pod in pods if pod.spec.node_name}
        return seen.Observed(
            service=service,
            fault=fault,
            namesakes=tuple(
                seen.Namesake(key=key_of(other.body), created_at=other.created_at) for other in self._namesakes(key)
            ),
            replicas=tuple(replica(pod, self._sample_of(pod.uid)) for pod in pods),
            nodes={
                name: node_facts(node)
                for name in sorted(node_names)
                if (node := self._nodes.get(("", name))) is not None
            },
            disrupted=self._node_counts.disrupted,
            revisions=self._revisions.of(key),
            defaults=self._defaults,
            token_digests=self._token_digests,
            serving_digests=self._serving_digests,
            nonce_seed=self._random_bytes(32),
            recommendations=memory.recommendations,
            taken_names=memory.taken_names,
            applied=dict(memory.applied),
            failures=memory.failures,
        )


def service_of(pod: Pod) -> ServiceKey | None:
    """Whose replica the pod says it is."""
    name = pod.labels.get(names.LABEL_SERVICE)
    return ServiceKey(pod.namespace, name) if name else None


def replica(pod: Pod, sample: seen.Sample | None) -> seen.Replica:
    """The facts of one pod."""
    owner = next((reference.uid for reference in pod.metadata.owner_references if reference.controller), "")
    ready = pod.condition("Ready")
    scheduled = pod.condition("PodScheduled")
    is_unschedulable = scheduled is not None and scheduled.status == "False" and scheduled.reason == "Unschedulable"
    server = pod.container(names.SERVER_CONTAINER)
    waiting = server.state.waiting if server is not None else None
    annotations = pod.metadata.annotations
    # The API server always sets a creation time; a pod without one is as old as can be.
    created_at = pod.metadata.creation_timestamp or datetime.min.replace(tzinfo=UTC)
    return seen.Replica(
        name=pod.name,
        uid=pod.uid,
        owner_uid=owner,
        revision=pod.labels.get(names.LABEL_REVISION, ""),
        slot=_number(pod.labels.get(names.LABEL_SLOT)),
        attempt=_number(pod.labels.get(names.LABEL_ATTEMPT)),
        state=pod.labels.get(names.LABEL_STATE, names.STATE_SERVING),
        created_at=created_at,
        deleted_at=pod.metadata.deletion_timestamp,
        phase=cast(seen.Phase, pod.status.phase or "Pending"),
        phase_reason=pod.status.reason,
        phase_message=pod.status.message,
        node=pod.spec.node_name,
        unschedulable=scheduled.message if scheduled is not None and is_unschedulable else "",
        ready=pod.is_ready,
        ready_since=ready.last_transition_time if ready is not None and pod.is_ready else None,
        unready_since=ready.last_transition_time if ready is not None and not pod.is_ready else None,
        started=server is not None and bool(server.started),
        scheduled_at=scheduled.last_transition_time if scheduled is not None and scheduled.status == "True" else None,
        waiting_reason=waiting.reason if waiting is not None else "",
        waiting_message=waiting.message if waiting is not None else "",
        restarts=server.restart_count if server is not None else 0,
        last_exit=_last_exit(pod),
        last_word=_last_word(pod),
        pod_ip=pod.status.pod_ip,
        drain_started=_moment(annotations.get(names.ANNOTATION_DRAIN_STARTED)),
        drain_reason=annotations.get(names.ANNOTATION_DRAIN_REASON, ""),
        sample=sample,
    )


def node_facts(node: Node) -> seen.Node:
    """The facts of one node."""
    ready = next((condition for condition in node.status.conditions if condition.type == "Ready"), None)
    is_ready = ready is not None and ready.status == "True"
    return seen.Node(
        name=node.name,
        ready=is_ready,
        not_ready_since=ready.last_transition_time if ready is not None and not is_ready else None,
        ready_since=ready.last_transition_time if ready is not None and is_ready else None,
        cordoned=node.spec.unschedulable,
    )


def _last_exit(pod: Pod) -> str:
    """How the server's last run ended: `OOMKilled (exit code 137)`, with the word that it left, where it did."""
    ended = _last_end(pod)
    if ended is None:
        return ""
    how, word = f"{ended.reason or 'Error'} (exit code {ended.exit_code})", _last_word(pod)
    return f"{how}: {word}" if word else how


def _last_word(pod: Pod) -> str:
    ended = _last_end(pod)
    return " ".join(ended.message.split())[:LAST_WORDS_SHOWN] if ended is not None else ""


def _last_end(pod: Pod) -> Terminated | None:
    server = pod.container(names.SERVER_CONTAINER)
    return (server.state.terminated or server.last_state.terminated) if server is not None else None


def _number(text: str | None) -> int:
    """A label that should be a number; somebody may have written nonsense into it."""
    return int(text) if text is not None and text.isdecimal() else 0


def _moment(text: str | None) -> datetime | None:
    """An annotation that should be a moment in RFC 3339."""
    try:
        moment = datetime.fromisoformat(text) if text else None
    except ValueError:
        return None
    return moment.replace(tzinfo=UTC) if moment is not None and moment.tzinfo is None else moment
