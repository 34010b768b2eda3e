"""What the tests of WarmPools do and see on the simulated cluster: pools, waiting pods, owners, events."""

from typing import Any

from slipway_api import names
from slipway_kube.resources import EVENTS, WARM_POOLS
from tests.operator.simulated_cluster import NAMESPACE, SimulatedCluster

Object = dict[str, Any]


def apply_pool(cluster: SimulatedCluster, name: str = "pool", **spec: Any) -> None:
    old = cluster.server.get(WARM_POOLS, NAMESPACE, name)
    base = {"resources": {"gpu": {"count": 0}}, "refill": {"maxConcurrent": 5, "delaySeconds": 0}}
    body = old or {"metadata": {"name": name, "namespace": NAMESPACE}, "spec": base}
    cluster.server.put(WARM_POOLS, body | {"spec": body["spec"] | spec})


def pool_status(cluster: SimulatedCluster, name: str = "pool") -> Object:
    return (cluster.server.get(WARM_POOLS, NAMESPACE, name) or {}).get("status") or {}


def waiting(cluster: SimulatedCluster) -> list[str]:
    """Names of the pods that wait for a claim."""
    return [
        pod["metadata"]["name"]
        for pod in cluster.live()
        if pod["metadata"]["labels"].get(names.LABEL_STATE) == names.STATE_WARM
    ]


def pool_condition(cluster: SimulatedCluster, kind: str) -> Object:
    return next((one for one in pool_status(cluster).get("conditions", []) if one["type"] == kind), {})


def events(cluster: SimulatedCluster, reason: str) -> list[str]:
    return [one["note"] for one in cluster.server.objects(EVENTS, NAMESPACE) if one["reason"] == reason]


async def warmed(cluster: SimulatedCluster, pods: int) -> None:
    await cluster.until(lambda: pool_status(cluster).get("ready") == pods, f"{pods} pods that can be claimed")


async def claim_one(cluster: SimulatedCluster, *, warm: int) -> None:
    """Start the operator, wait until the pool has `warm` pods, and have the service `chat` claim the first of them."""
    cluster.start_operator()
    await warmed(cluster, warm)
    cluster.apply("chat", replicas=1, warmPool={"name": "pool"})
    await cluster.until(lambda: cluster.serving("chat") == ["pool-warm-0"], "the claimed replica")


def staying(cluster: SimulatedCluster, service: str) -> list[Object]:
    """Its pods without those that drain: a scale-up does not wait for the end of an earlier scale-down."""
    return [
        pod for pod in cluster.live(service) if pod["metadata"]["labels"][names.LABEL_STATE] != names.STATE_DRAINING
    ]


def check_owners(cluster: SimulatedCluster) -> None:
    """Each pod has one owner, and waits exactly if that is a pool; no slot has two pods."""
    slots = []
    for pod in cluster.live():
        (owner,) = pod["metadata"]["ownerReferences"]
        labels = pod["metadata"]["labels"]
        assert (owner["kind"] == "WarmPool") == (labels[names.LABEL_STATE] == names.STATE_WARM), pod["metadata"]
        if owner["kind"] == "InferenceService":
            slots.append((labels[names.LABEL_SERVICE], labels[names.LABEL_REVISION], labels[names.LABEL_SLOT]))
    assert len(slots) == len(set(slots)), "two pods on one slot"
