"""The actions of a plan for an adapter, as data: calls to one replica, and the routing annotation of its pod.

Each is safe to repeat. They are executed in the background: their results are part of the next observation.
"""

from dataclasses import dataclass

from slipway_operator.core.actions import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCall(Action):
    """A call about one replica of a service."""

    name: str
    """Name of the pod."""
    uid: str
    service: str
    owner_uid: str
    """uid of the service: a pod that it does not control gets no call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListAdapters(ReplicaCall):
    """GET /adapters: what the replica has. Adapters of one base share the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAdapter(ReplicaCall):
    """POST /adapters: make a name mean the files at an address."""

    adapter: str
    """The LoRAAdapter's model name: the result is reported under it."""
    load_as: str
    """The name on the replica: `adapter`, or that of a new version beside the one that serves."""
    uri: str
    version: str
    digest: str = ""
    pinned: bool = False
    credentials_secret: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAdapter(ReplicaCall):
    """POST /v1/completions on the serving port: one token, to know that the adapter answers before it is routed."""

    adapter: str
    probed_as: str
    version: str
    digest: str
    boot_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteAdapter(ReplicaCall):
    """Add the adapter to the annotation by which the gateway routes. Changes of one pod are written in one patch."""

    adapter: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnrouteAdapter(ReplicaCall):
    """Remove the adapter from the annotation by which the gateway routes."""

    adapter: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadAdapter(ReplicaCall):
    """DELETE /adapters/{name}: running requests finish, new ones get a 404."""

    adapter: str
    unloaded_as: str


AdapterCall = ListAdapters | LoadAdapter | ProbeAdapter | RouteAdapter | UnrouteAdapter | UnloadAdapter
