"""Checks of a cluster's state, for stories and the fault matrix: slots, owners, readiness, first attempts."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import openai
from kubernetes import client

from bench.plan import LoadReport
from e2e.cluster.launch import Cluster
from e2e.ledger import Ledger, find_losses
from e2e.slipway import RELEASE_NAMESPACE, USER_NAMESPACE, Slipway, wait_for
from slipway_api import names

TTL = "node.alpha.kubernetes.io/ttl"  # an annotation that Kubernetes keeps on every node
STORY = "Tell me a story about a red fox and a lamp."


def is_ready(pod: Any) -> bool:
    """Whether the pod's Ready condition is True."""
    return any(c.type == "Ready" and c.status == "True" for c in pod.status.conditions or [])


def serving_pods(slipway: Slipway, service: str) -> list[Any]:
    """Pods of the service that are neither draining nor being deleted."""
    return [
        pod
        for pod in slipway.pods(service)
        if pod.metadata.deletion_timestamp is None and pod.metadata.labels[names.LABEL_STATE] == names.STATE_SERVING
    ]


def ready_pods(slipway: Slipway, service: str) -> list[Any]:
    """Serving pods whose Ready condition is True."""
    return [pod for pod in serving_pods(slipway, service) if is_ready(pod)]


def uids(pods: Sequence[Any]) -> set[str]:
    """The identities of pods."""
    return {pod.metadata.uid for pod in pods}


def slots(slipway: Slipway, service: str) -> list[str]:
    """revision-slot of each serving pod; none may be there twice."""
    labels = [pod.metadata.labels for pod in serving_pods(slipway, service)]
    return sorted(f"{own[names.LABEL_REVISION]}-{own[names.LABEL_SLOT]}" for own in labels)


def double_slots(slipway: Slipway, service: str) -> list[str]:
    """Slots that two serving pods occupy."""
    return [slot for slot, count in Counter(slots(slipway, service)).items() if count > 1]


def orphans(slipway: Slipway) -> list[str]:
    """Pods labelled as replicas whose owner is not a service that exists."""
    owners = {slipway.service(name)["metadata"]["uid"] for name in slipway.services()}
    pods = slipway.core.list_namespaced_pod(USER_NAMESPACE, label_selector=names.LABEL_SERVICE).items
    return [
        pod.metadata.name
        for pod in pods
        if not {owner.uid for owner in pod.metadata.owner_references or [] if owner.controller} & owners
    ]


def first_attempts(slipway: Slipway, model: str, count: int, max_tokens: int = 8) -> list[str]:
    """Send `count` requests one after the other, each once and on a connection of its own; the failures as text."""
    failures = []
    for _ in range(count):
        try:
            with slipway.openai() as asker:
                answer = asker.chat.completions.create(
                    model=model, messages=[{"role": "user", "content": STORY}], max_tokens=max_tokens, temperature=0
                )
            if not answer.choices[0].message.content:
                failures.append("an empty answer")
        except openai.OpenAIError as error:
            failures.append(f"{type(error).__name__}: {error}")
    return failures


def no_request_lost(report: LoadReport, ledger: Ledger) -> None:
    """Every request of the load was answered as a whole or refused, and all that have counted it agree.

    The last lines of replicas and gateways may come after the client has read its answer, so this waits for them.
    """

    def agree() -> bool:
        if losses := find_losses(report, ledger.collect()):
            raise AssertionError("; ".join(losses[:8]))
        return True

    wait_for("no request is lost", agree, timeout=20)
    print(ledger.collect().summarize(report))


def evict(slipway: Slipway, pod: Any) -> bool:
    """POST eviction of the pod; False while its disruption budget forbids it (429)."""
    metadata = pod.metadata
    body = client.V1Eviction(metadata=client.V1ObjectMeta(name=metadata.name, namespace=metadata.namespace))
    try:
        slipway.core.create_namespaced_pod_eviction(metadata.name, metadata.namespace, body)
    except client.ApiException as error:
        if error.status not in (404, 429):
            raise
        return bool(error.status == 404)
    return True


def wait_serving(slipway: Slipway, model: str, count: int = 10, timeout: float = 120) -> None:
    """Return when `count` first attempts in a row are answered; raise with the last failures when they never are."""

    def served() -> bool:
        failures = first_attempts(slipway, model, count)
        if failures:
            raise AssertionError(failures)
        return True

    wait_for(f"{count} requests in a row are served by {model}", served, timeout)


def node_is_ready(slipway: Slipway, node: str) -> bool:
    """Whether the API server believes that the node is Ready."""
    conditions = slipway.core.read_node(node).status.conditions
    return any(c.type == "Ready" and c.status == "True" for c in conditions)


def nodes_of(slipway: Slipway, service: str) -> dict[str, str]:
    """Pod name -> node, of the service's serving pods."""
    return {pod.metadata.name: pod.spec.node_name for pod in serving_pods(slipway, service)}


def mend(cluster: Cluster, slipway: Slipway) -> None:
    """Start what was stopped, connect what was cut, and return when nodes, operator and gateway are up again."""
    if "etcd" not in cluster.programs:
        cluster.start_etcd()
    if "kube-apiserver" not in cluster.programs:
        cluster.start_apiserver()
    for node in cluster.nodes:
        if cluster.is_up(node):
            cluster.cut_node(node, cut=False)
        else:
            cluster.start_node(node)
        slipway.access.kubectl("uncordon", node)
    cluster.wait_for_nodes(limit=120)
    wait_for_controllers(slipway)
    for part in ("operator", "gateway"):
        wait_for(f"every {part} is up", lambda part=part: deployment_is_up(slipway, f"slipway-{part}"), timeout=180)  # type: ignore[misc]
    wait_for("the gateway's endpoints are the ready pods", lambda: gateway_has_endpoints(slipway), timeout=180)


def wait_for_controllers(slipway: Slipway) -> None:
    """Return when Kubernetes' controllers see the world as it is now.

    After an outage their watches pause for up to a minute. Until then statuses are those from before it, and a node
    that renewed its lease long ago may still be taken for lost, with all its pods unready. The controller of TTLs
    restores its annotation when it sees the change of a node, and it shares its watch with the one that judges nodes.
    """
    for node in slipway.core.list_node().items:
        name = node.metadata.name
        slipway.core.patch_node(name, {"metadata": {"annotations": {TTL: None}}})
        wait_for(
            f"the controllers see {name}",
            lambda name=name: TTL in slipway.core.read_node(name).metadata.annotations,  # type: ignore[misc]
            timeout=180,
        )


def gateway_has_endpoints(slipway: Slipway) -> bool:
    """Whether the gateway's Service leads to every pod of its Deployment; else raises, naming its endpoints."""
    wanted = slipway.apps.read_namespaced_deployment("slipway-gateway", RELEASE_NAMESPACE).spec.replicas
    slices = client.DiscoveryV1Api(slipway.core.api_client).list_namespaced_endpoint_slice(
        RELEASE_NAMESPACE, label_selector="kubernetes.io/service-name=slipway-gateway"
    )
    endpoints = [(e.target_ref.name, e.conditions.ready) for one in slices.items for e in one.endpoints or []]
    if sum(is_ready for _, is_ready in endpoints) != wanted:
        raise AssertionError(f"{wanted} gateways, and these endpoints: {endpoints}")
    return True


def deployment_is_up(slipway: Slipway, name: str) -> bool:
    """Whether the Deployment has all its replicas available, and no other."""
    found = slipway.apps.read_namespaced_deployment(name, RELEASE_NAMESPACE)
    wanted, status = found.spec.replicas, found.status
    return bool(status.available_replicas == status.updated_replicas == status.replicas == wanted)
