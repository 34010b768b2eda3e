"""The other side of the benchmark of the operator: a fake API server with a fleet at rest, and the replicas' ports.

Services with their pods, adapters on the replicas of some, and warm pools are as the operator would leave them, by its
own plans.
"""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.fake_replicas import FakeReplica, listen
from slipway_api import names
from slipway_api.inference_service import InferenceService
from slipway_api.lora_adapter import LoRAAdapter
from slipway_api.runtime_api import BootList, LoadAdapterRequest
from slipway_api.warm_pool import WarmPool
from slipway_kube.objects import Pod
from slipway_kube.resources import (
    CONFIG_MAPS,
    CONTROLLER_REVISIONS,
    DISRUPTION_BUDGETS,
    INFERENCE_SERVICES,
    LORA_ADAPTERS,
    NETWORK_POLICIES,
    NODES,
    PODS,
    SERVICES,
    WARM_POOLS,
    Resource,
)
from slipway_operator.controller.children import with_digest
from slipway_operator.controller.kinds import Key, StoredObject
from slipway_operator.core.actions import AddFinalizer, AnnotatePod, ApplyChild, CreatePod, CreateRevision
from slipway_operator.core.adapter.observed import AdapterObserved, AdapterPod, AttachedAdapter, Base, Listing
from slipway_operator.core.adapter.plan import plan as plan_adapter
from slipway_operator.core.installation import Defaults, Network
from slipway_operator.core.observed import Observed, Sample, StoredRevision
from slipway_operator.core.service.plan import plan as plan_service
from slipway_operator.core.warm_pool.observed import ObservedPool
from slipway_operator.core.warm_pool.plan import plan as plan_pool
from slipway_operator.inputs.adapter_index import indexed
from slipway_operator.inputs.lora_adapters import base_of
from slipway_operator.inputs.observer import replica
from slipway_operator.inputs.revisions import ControllerRevision, revision_facts
from slipway_operator.inputs.warm_pools import pool_pod
from slipway_operator.masters import GatewayKeys, Masters
from tests.operator.discovery import DiscoverableApiServer

NAMESPACE: Final = "team"
PODS_OF_A_SERVICE, ADAPTERS_OF_A_SERVICE, PODS_OF_A_POOL = 10, 4, 2
NODES_OF_EIGHT: Final = 8
PASSES: Final = 12  # within which an object settles
SINCE: Final = "2026-01-01T00:00:00Z"
KINDS: Final = {one.kind: one for one in (SERVICES, DISRUPTION_BUDGETS, NETWORK_POLICIES, CONFIG_MAPS)}
DEFAULTS: Final = Defaults(
    runtime_image="slipway/runtime:0.1.0",
    gateway_url="http://gateway",
    network=Network(release_namespace="slipway-system"),
)
ROOM: Final = {"lora": {"maxAdapters": 8, "maxCPUAdapters": 300, "maxRank": 16}}

Object = dict[str, Any]


@dataclass
class Fleet:
    """The API server, the keys, and the replicas by address."""

    server: DiscoverableApiServer
    masters: Masters
    gateway_keys: GatewayKeys
    replicas: dict[str, FakeReplica] = field(default_factory=dict)
    pods: int = 0

    def __post_init__(self) -> None:
        self.busy = FakeReplica()
        self.busy.set_load(running=3, kv_usage=0.4)

    def replica_at(self, address: str) -> FakeReplica:
        """The replica of an address: busy, and without adapters, where nothing else is said."""
        return self.replicas.get(address, self.busy)

    def start(self, manifest: Object, *, is_empty: bool = False, runtime: FakeReplica | None = None) -> Object:
        """The pod as a kubelet would have it a while after; one that `is_empty` waits for a model."""
        ip, node = address(self.pods), f"node-{self.pods // NODES_OF_EIGHT}"
        self.pods += 1
        if runtime is not None:
            self.replicas[ip] = runtime
        status = pod_status(ip, is_ready=not is_empty)
        return self.server.put(PODS, manifest | {"spec": manifest["spec"] | {"nodeName": node}, "status": status})


def settle_service(fleet: Fleet, name: str, attached: Sequence[AttachedAdapter] = ()) -> Object:
    """Put one service with its pods; `attached` are its adapters, which all of its replicas have."""
    spec = {
        "model": {"uri": "file:///models/tiny"},
        "resources": {"gpu": {"count": 0}},
        "replicas": PODS_OF_A_SERVICE,
    } | ({"runtime": ROOM} if attached else {})
    server, now = fleet.server, datetime.now(UTC)
    body = server.put(INFERENCE_SERVICES, {"metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec})
    runtime = loaded_replica(attached) if attached else None
    routes = {names.ANNOTATION_ADAPTERS: ",".join(sorted(one.name for one in attached))} if attached else {}
    pods: dict[str, Object] = {}
    applied: dict[str, str] = {}
    revisions: list[StoredRevision] = []
    for _ in range(PASSES):
        observed = Observed(
            service=InferenceService.model_validate(body),
            replicas=tuple(replica(typed(pod), None) for pod in pods.values()),
            applied=applied,
            revisions=tuple(revisions),
            defaults=DEFAULTS,
            token_digests=fleet.masters.digests,
            serving_digests=fleet.gateway_keys.digests,
            kernels_key=fleet.masters.kernels_key,
            nonce_seed=b"of the benchmark",
            adapters=tuple(attached),
        )
        decided = plan_service(observed, now)
        for action in decided.actions:
            match action:
                case AddFinalizer(finalizer=finalizer):
                    body = with_finalizer(body, finalizer)
                case ApplyChild():
                    server.put(KINDS[action.manifest["kind"]], with_digest(action))
                    applied[action.key] = action.digest
                case CreateRevision():
                    raw = msgspec.json.encode(server.put(CONTROLLER_REVISIONS, action.manifest))
                    revisions.append(revision_facts(msgspec.json.decode(raw, type=ControllerRevision)))
                case AnnotatePod():
                    pods[action.name] = server.put(PODS, annotated(pods[action.name], action.annotations))
                case CreatePod():
                    pods[action.name] = fleet.start(annotated(action.manifest, routes), runtime=runtime)
        assert decided.status is not None
        before, body = body, body | {"status": decided.status.to_json()}
        body = server.put(INFERENCE_SERVICES, dict(body))
        if not decided.actions and before.get("status") == body["status"]:
            return body
    raise AssertionError(f"{name} does not settle")


def settle_adapters(fleet: Fleet, service: str, adapters: Sequence[str]) -> None:
    """Put a service, and its adapters as they are once all of its replicas have them."""
    bodies = [put_adapter(fleet.server, name, service) for name in adapters]
    attached = [attached_facts(body) for body in bodies]
    base = base_of(stored(settle_service(fleet, service, attached)))
    listed = loaded_replica(attached).adapters.adapters
    now = datetime.now(UTC)
    pods = tuple(
        AdapterPod(
            name=pod["metadata"]["name"],
            uid=pod["metadata"]["uid"],
            ready=True,
            routed=True,
            listing=Listing(at=now, boot_id=fleet.busy.boot_id, restarts=0, adapters=listed),
        )
        for pod in fleet.server.objects(PODS, NAMESPACE)
        if pod["metadata"]["labels"].get(names.LABEL_SERVICE) == service
    )
    for body in bodies:
        _settle_adapter(fleet.server, body, base, pods, now)


def _settle_adapter(
    server: DiscoverableApiServer, body: Object, base: Base, pods: tuple[AdapterPod, ...], now: datetime
) -> None:
    for _ in range(PASSES):
        observed = AdapterObserved(adapter=LoRAAdapter.model_validate(body), base=base, pods=pods)
        decided = plan_adapter(observed, now)
        before = body.get("status")
        for action in decided.actions:
            assert isinstance(action, AddFinalizer), action
            body = with_finalizer(body, action.finalizer)
        if decided.status is not None:
            body = body | {"status": decided.status.to_json()}
        body = server.put(LORA_ADAPTERS, dict(body))
        if not decided.actions and before == body["status"]:
            return
    raise AssertionError(f"{body['metadata']['name']} does not settle")


def settle_pool(fleet: Fleet, name: str) -> None:
    """Put one warm pool whose pods wait for a claim."""
    spec = {"size": PODS_OF_A_POOL, "refill": {"maxConcurrent": 2}}
    body = fleet.server.put(WARM_POOLS, {"metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec})
    waiting, now = FakeReplica(), datetime.now(UTC)
    waiting.set_load(starting="NoModel")
    sample = Sample.of(waiting.signals, now)
    pods: list[Object] = []
    for _ in range(PASSES):
        observed = ObservedPool(
            pool=WarmPool.model_validate(body),
            pods=tuple(pool_pod(typed(pod), sample) for pod in pods),
            defaults=DEFAULTS,
            token_digests=fleet.masters.digests,
            nonce_seed=b"of the benchmark",
        )
        decided = plan_pool(observed, now)
        for action in decided.actions:
            assert isinstance(action, CreatePod), action
            pods.append(fleet.start(action.manifest, is_empty=True, runtime=waiting))
        assert decided.status is not None
        before, body = body, body | {"status": decided.status.to_json()}
        body = fleet.server.put(WARM_POOLS, dict(body))
        if not decided.actions and before.get("status") == body["status"]:
            return
    raise AssertionError(f"{name} does not settle")


# --- parts of objects -------------------------------------------------------------------------------------------------


def put_adapter(server: DiscoverableApiServer, name: str, base: str) -> Object:
    """An adapter without a status."""
    spec = {"baseRef": {"name": base}, "source": {"uri": f"file:///models/{name}"}}
    return server.put(LORA_ADAPTERS, {"metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec})


def attached_facts(body: Object) -> AttachedAdapter:
    """The adapter as its base sees it once all replicas have it."""
    found = indexed(Key(LORA_ADAPTERS.kind, NAMESPACE, body["metadata"]["name"]), stored(body))
    assert found is not None
    return replace(found.facts, is_ready=True)


def loaded_replica(attached: Sequence[AttachedAdapter]) -> FakeReplica:
    """A busy replica that has loaded the adapters; one may stand for all of a service."""
    loaded = FakeReplica()
    loaded.set_load(running=3, kv_usage=0.4)
    boot = BootList(
        adapters=tuple(LoadAdapterRequest(name=one.name, uri=one.uri, version=one.version) for one in attached)
    )
    loaded.adapters.boot(boot.wire().decode())
    return loaded


def stored(body: Object) -> StoredObject:
    """The object as the operator's store has it."""
    return StoredObject(uid=body["metadata"]["uid"], version=0, body=body)


def typed(pod: Object) -> Pod:
    """The pod as the operator's caches have it."""
    return msgspec.json.decode(msgspec.json.encode(pod), type=Pod)


def with_finalizer(body: Object, finalizer: str) -> Object:
    """The object with the finalizer."""
    return body | {"metadata": body["metadata"] | {"finalizers": [finalizer]}}


def annotated(pod: Object, changes: Mapping[str, str | None]) -> Object:
    """The pod with changed annotations; None removes one."""
    meta = pod["metadata"]
    merged = meta.get("annotations", {}) | dict(changes)
    return pod | {"metadata": meta | {"annotations": {key: text for key, text in merged.items() if text is not None}}}


def pod_status(ip: str, *, is_ready: bool) -> Object:
    """The status of a running pod."""
    ready = {"type": "Ready", "status": str(is_ready), "lastTransitionTime": SINCE}
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": SINCE}
    server = {"name": "server", "ready": is_ready, "started": is_ready, "restartCount": 0, "state": {"running": {}}}
    return {"phase": "Running", "podIP": ip, "conditions": [scheduled, ready], "containerStatuses": [server]}


def address(index: int) -> str:
    """A loopback address of the pod's own."""
    return f"127.1.{index // 250}.{1 + index % 250}"


# --- the process ------------------------------------------------------------------------------------------------------


async def serve(services: int, adapters: int, pools: int, folder: Path) -> None:
    """The API server with everything in it, and the replicas' ports; serves until its input ends."""
    async with DiscoverableApiServer() as server:
        fleet = Fleet(server, Masters(folder), GatewayKeys(folder))
        pods = services * PODS_OF_A_SERVICE + pools * PODS_OF_A_POOL
        for number in range(pods // NODES_OF_EIGHT + 1):
            ready = {"type": "Ready", "status": "True", "lastTransitionTime": SINCE}
            put(server, NODES, f"node-{number}", {"status": {"conditions": [ready]}})
        # Those with adapters come last: the benchmark changes the first ones.
        bases = -(-adapters // ADAPTERS_OF_A_SERVICE)
        for number in range(services - bases):
            settle_service(fleet, f"chat-{number}")
        for number in range(bases):
            first, last = number * ADAPTERS_OF_A_SERVICE, min(adapters, (number + 1) * ADAPTERS_OF_A_SERVICE)
            settle_adapters(fleet, f"chat-{services - bases + number}", [f"lora-{one}" for one in range(first, last)])
        for number in range(pools):
            settle_pool(fleet, f"pool-{number}")
        server.store.history.clear()
        ports = await listen(fleet.replica_at, "0.0.0.0", 0)
        print(server.url, ports.sockets[0].getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.read)  # ends with the process that started this one


def put(server: DiscoverableApiServer, resource: Resource, name: str, rest: Object) -> None:
    """Put an object without a namespace."""
    server.put(resource, {"metadata": {"name": name}} | rest)
