"""What people do to labels in the simulated cluster, and what must hold while and after they do it."""

import asyncio
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from slipway_api import names
from slipway_gateway.watch import endpoint_of
from slipway_kube.objects import Pod
from slipway_kube.resources import CONTROLLER_REVISIONS, EVENTS, PODS, Resource
from tests.operator.simulated_cluster import NAMESPACE, SimulatedCluster

Object = dict[str, Any]
OF_REPLICAS = (
    names.LABEL_SERVICE,
    names.LABEL_REVISION,
    names.LABEL_SLOT,
    names.LABEL_ATTEMPT,
    names.LABEL_STATE,
    names.LABEL_MANAGED_BY,
    names.LABEL_APP_NAME,
)
ADDED = (names.LABEL_POOL, names.LABEL_PRE_PULL)
VALUES = (None, "debug", "draining", "serving", "warm", "0", "7")


def edit(cluster: SimulatedCluster, resource: Resource, name: str, **labels: str | None) -> None:
    """kubectl label; the names are those in `names`, None removes one."""
    found = cluster.server.get(resource, NAMESPACE, name)
    assert found is not None
    after = dict(found["metadata"].get("labels", {}))
    for key, value in labels.items():
        after.pop(key, None)
        if value is not None:
            after[key] = value
    metadata = found["metadata"] | {"labels": after}
    metadata.pop("resourceVersion", None)
    cluster.server.put(resource, found | {"metadata": metadata})


def replicas(cluster: SimulatedCluster, service: str = "chat") -> list[Object]:
    """The pods that hold a replica's GPU, by owner: labels may be wrong."""
    return [
        pod
        for pod in cluster.live()
        if any(one["kind"] == "InferenceService" and one["name"] == service for one in owners(pod))
    ]


def owners(pod: Object) -> list[Object]:
    return pod["metadata"].get("ownerReferences") or []


def endpoints(cluster: SimulatedCluster, service: str = "chat") -> list[str]:
    """Names of the pods that a gateway sends requests to."""
    body, found = cluster.service(service), []
    for pod in cluster.pods():
        if pod["metadata"].get("labels", {}).get(names.LABEL_MANAGED_BY) != names.MANAGED_BY:
            continue  # its watch selects by it
        endpoint = endpoint_of(msgspec.convert(pod, Pod, strict=False))
        if endpoint is not None and body is not None and endpoint.owner_uid == body["metadata"]["uid"]:
            found.append(pod["metadata"]["name"])
    return found


def labels_of(cluster: SimulatedCluster, resource: Resource = PODS) -> dict[str, Object]:
    """By uid."""
    found = cluster.server.objects(resource, NAMESPACE)
    return {one["metadata"]["uid"]: one["metadata"].get("labels", {}) for one in found}


def picture(cluster: SimulatedCluster) -> Object:
    """All labels of all pods and revisions; equal after an edit, unless something was replaced."""
    return labels_of(cluster) | labels_of(cluster, CONTROLLER_REVISIONS)


def is_right(cluster: SimulatedCluster, ready: int) -> bool:
    """Whether as many replicas are ready as there are endpoints and pods."""
    status = cluster.status("chat")
    return (
        status.get("readyReplicas") == ready == len(endpoints(cluster)) == len(replicas(cluster))
        and (cluster.condition("chat", "Ready").get("status") == "True") == bool(ready)
    )  # fmt: skip


def notes(cluster: SimulatedCluster, reason: str = "LabelsRestored") -> list[str]:
    return [one["note"] for one in cluster.server.objects(EVENTS, NAMESPACE) if one["reason"] == reason]


@asynccontextmanager
async def gpus_are_counted(cluster: SimulatedCluster, most: int):
    """Checks at every tick that at most `most` pods hold a GPU for the service `chat`."""
    faults: list[str] = []

    async def watch() -> None:
        while True:
            held = [pod["metadata"]["name"] for pod in replicas(cluster)]
            if len(held) > most:
                faults.append(f"{cluster.time()}: {held} is more than {most}")
            await asyncio.sleep(0.25)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
    assert faults == []
