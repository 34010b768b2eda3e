"""The few fields of Pods, Nodes and EndpointSlices that Slipway reads, as slim structs: 13 µs an event.

Fields are named in snake case and decoded from camelCase; everything else in the object is skipped unread.
The structs are frozen and shared: caches hand them out without copying.
"""

from datetime import datetime
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")

Key = tuple[str, str]  # (namespace, name); the namespace of a cluster-scoped object is ""


class Slim(msgspec.Struct, rename="camel", frozen=True, gc=False):
    """Base of all projections; unknown fields are ignored, so newer servers do no harm."""


class OwnerReference(Slim, frozen=True):
    """Who an object belongs to."""

    kind: str
    name: str
    uid: str
    api_version: str = ""
    controller: bool = False


class Metadata(Slim, frozen=True):
    """What every object carries."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    finalizers: tuple[str, ...] = ()
    owner_references: tuple[OwnerReference, ...] = ()
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None

    @property
    def key(self) -> Key:
        """Where caches file this object."""
        return self.namespace, self.name


class Object(Slim, frozen=True):
    """Any object, metadata only.

    Projections for an informer derive from it, say `frozen=True` and add what they read, each with a default.
    """

    metadata: Metadata = Metadata()

    @property
    def key(self) -> Key:
        """(namespace, name)."""
        return self.metadata.key

    @property
    def name(self) -> str:
        """metadata.name."""
        return self.metadata.name

    @property
    def namespace(self) -> str:
        """metadata.namespace."""
        return self.metadata.namespace

    @property
    def uid(self) -> str:
        """metadata.uid."""
        return self.metadata.uid

    @property
    def labels(self) -> dict[str, str]:
        """metadata.labels."""
        return self.metadata.labels

    @property
    def is_terminating(self) -> bool:
        """Someone asked for its deletion; finalizers or a grace period keep it."""
        return self.metadata.deletion_timestamp is not None


class Condition(Slim, frozen=True):
    """One condition, of whatever object."""

    type: str
    status: str = "Unknown"
    reason: str = ""
    message: str = ""
    last_transition_time: datetime | None = None


class Waiting(Slim, frozen=True):
    """A container that does not run yet, and why (ImagePullBackOff, CrashLoopBackOff, …)."""

    reason: str = ""
    message: str = ""


class Running(Slim, frozen=True):
    """A container that runs."""

    started_at: datetime | None = None


class Terminated(Slim, frozen=True):
    """A container that ended, and how."""

    exit_code: int = 0
    reason: str = ""
    message: str = ""
    started_at: datetime | None = None
    finished_at: datetime | None = None


class ContainerState(Slim, frozen=True):
    """At most one of the three is set."""

    waiting: Waiting | None = None
    running: Running | None = None
    terminated: Terminated | None = None


class ContainerStatus(Slim, frozen=True):
    """What the kubelet says of one container."""

    name: str
    ready: bool = False
    started: bool | None = None  # its startup probe has succeeded
    restart_count: int = 0
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()


class PodSpec(Slim, frozen=True):
    """Where a pod was placed."""

    node_name: str = ""


class PodStatus(Slim, frozen=True):
    """What became of a pod."""

    phase: str = ""
    reason: str = ""
    message: str = ""
    pod_ip: str = msgspec.field(name="podIP", default="")
    start_time: datetime | None = None
    conditions: tuple[Condition, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()


class Pod(Object, frozen=True):
    """A pod, slim."""

    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    def condition(self, kind: str) -> Condition | None:
        """The condition of that type, where the pod has it."""
        return next((condition for condition in self.status.conditions if condition.type == kind), None)

    @property
    def is_ready(self) -> bool:
        """Its Ready condition is True. A terminating pod may still be."""
        ready = self.condition("Ready")
        return ready is not None and ready.status == "True"

    def container(self, name: str) -> ContainerStatus | None:
        """The status of one container, once the kubelet has written it."""
        return next((status for status in self.status.container_statuses if status.name == name), None)


class Taint(Slim, frozen=True):
    """What keeps pods off a node."""

    key: str
    effect: str = ""
    value: str = ""


class NodeSpec(Slim, frozen=True):
    """What an administrator says of a node."""

    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()


class NodeStatus(Slim, frozen=True):
    """What the kubelet says of a node."""

    conditions: tuple[Condition, ...] = ()


class Node(Object, frozen=True):
    """A node, slim."""

    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()

    @property
    def is_ready(self) -> bool:
        """Its Ready condition is True; Unknown means that the kubelet went silent."""
        return any(condition.type == "Ready" and condition.status == "True" for condition in self.status.conditions)


class EndpointConditions(Slim, frozen=True):
    """Null means true for `ready` and `serving`, and false for `terminating`."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class ObjectReference(Slim, frozen=True):
    """A pointer to another object."""

    kind: str = ""
    namespace: str = ""
    name: str = ""
    uid: str = ""


class Endpoint(Slim, frozen=True):
    """One backend behind a Kubernetes Service."""

    addresses: tuple[str, ...] = ()
    conditions: EndpointConditions = EndpointConditions()
    target_ref: ObjectReference | None = None


class EndpointSlice(Object, frozen=True):
    """Some of the backends behind a Kubernetes Service."""

    endpoints: tuple[Endpoint, ...] | None = None  # the server writes null, not [], when there are none


class WatchEvent(msgspec.Struct, Generic[T], frozen=True, gc=False):
    """One line of a watch. Only bookmarks and errors carry something else than the watched kind."""

    type: str
    object: T


class ListMetadata(Slim, frozen=True):
    """Where a list stands in history, and how to go on."""

    resource_version: str = ""
    continue_: str = msgspec.field(name="continue", default="")


class Page(Slim, frozen=True):
    """One page of a list, its items still undecoded."""

    metadata: ListMetadata
    items: tuple[msgspec.Raw, ...] | None = None
