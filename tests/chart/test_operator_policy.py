"""The policies of the chart limit the operator's own ServiceAccount, and let through everything that it makes.

Requests are dry runs in the name of the ServiceAccount, with the rights that the chart gives it.
"""

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.access import Access, ApiError
from slipway_api.inference_service import InferenceService
from slipway_api.warm_pool import WarmPool
from slipway_operator.core.actions import ApplyChild, CreatePod
from slipway_operator.core.installation import Network, NodeCache
from slipway_operator.core.service.model.pulls import build_pull_pod
from slipway_operator.core.service.plan import plan as plan_service
from slipway_operator.core.service.rollout.revision import create_revision, resolve
from slipway_operator.core.warm_pool.plan import plan as plan_pool
from tests.builders import DEFAULTS, T0, a_service, promised
from tests.builders import seen as seen_service
from tests.chart.lint import CHART
from tests.operator.core.service.test_engines import a_vllm_service, pinned, pod_of
from tests.operator.core.warm_pool.pools import a_pool
from tests.operator.core.warm_pool.pools import seen as seen_pool

pytestmark = pytest.mark.apiserver

ROOT = Path(__file__).resolve().parents[2]
NAME = "bounded"  # another installation than that of the other tests
VALUES = (
    f"name={NAME},modelCache.nodePath=/var/lib/models,allowedServiceAccountNames={{models}},"
    "operatorPolicy.injectedContainers={istio-init},operatorPolicy.allowedHostPaths={/var/run/agent}"
)
PLURALS = {
    "Pod": ("/api/v1", "pods"),
    "Service": ("/api/v1", "services"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
    "ControllerRevision": ("/apis/apps/v1", "controllerrevisions"),
}
WITH_CACHE = replace(
    DEFAULTS,
    node_cache=NodeCache(path="/var/lib/models"),
    network=Network(release_namespace="slipway-system"),
    service_accounts=("models",),
)

Manifest = dict[str, Any]


class Bounded:
    """An API server with the operator's rights and policies, and requests in the operator's name."""

    def __init__(self, access: Access) -> None:
        self.access, self.namespace = access, access.create_namespace()
        self._account = {"Impersonate-User": f"system:serviceaccount:{self.namespace}:{NAME}-operator"}

    def install(self) -> None:
        for template in ("operator-rbac", "operator-policy"):
            options = ("-n", self.namespace, "--set", VALUES, "-s", f"templates/{template}.yaml")
            rendered = self.access.helm("template", NAME, CHART, *options)
            self.access.kubectl("apply", "-n", self.namespace, "-f", "-", stdin=rendered)
        forbidden = a_pod_of_ours() | {"metadata": {"name": "probe"}}
        deadline = time.monotonic() + 90  # a new policy takes effect a moment after it is stored
        while "children of Slipway's objects" not in self.refusal(forbidden):
            assert time.monotonic() < deadline, "the policy has no effect"
            time.sleep(0.5)

    def uninstall(self) -> None:
        kinds = "validatingadmissionpolicies,validatingadmissionpolicybindings,clusterroles,clusterrolebindings"
        self.access.kubectl("delete", kinds, "-l", f"app.kubernetes.io/instance={NAME}")

    def refusal(self, manifest: Manifest, namespace: str = "") -> str:
        """Why the operator may not create this; empty if it may."""
        api, plural = PLURALS[manifest["kind"]]
        namespace = namespace or self.namespace
        body = copy.deepcopy(manifest)
        body["metadata"]["namespace"] = namespace
        return self._said("POST", f"{api}/namespaces/{namespace}/{plural}?dryRun=All", body)

    def write_refusal(self, method: str, kind: str, name: str, body: object = None) -> str:
        """Why the operator may not change or delete an object that exists; empty if it may."""
        api, plural = PLURALS[kind]
        return self._said(method, f"{api}/namespaces/{self.namespace}/{plural}/{name}?dryRun=All", body)

    def _said(self, method: str, path: str, body: object) -> str:
        try:
            self.access.api(method, path, body, headers=self._account, timeout=60)
        except ApiError as refused:
            return str(refused)
        return ""


@pytest.fixture(scope="module")
def bounded(apiserver: Access) -> Iterator[Bounded]:
    apiserver.serve_kinds(ROOT / "crds")  # the admission of owner references asks for their kinds
    made = Bounded(apiserver)
    made.install()
    yield made
    made.uninstall()


def made_for(service: InferenceService) -> list[Manifest]:
    """Everything that the operator creates for a new service, and the pods that bring its model to nodes."""
    service = promised(service, 1)
    observed = replace(seen_service(service), defaults=WITH_CACHE)
    actions = plan_service(observed, T0).actions
    revision = resolve(service, DEFAULTS.runtime_image)
    records = [one.manifest for one in create_revision(service, revision, ())]
    pulls = [build_pull_pod(service, revision, node, "0" * 16, WITH_CACHE) for node in ("", "node-1")]
    return [one.manifest for one in actions if isinstance(one, CreatePod | ApplyChild)] + [*records, *pulls]


def made_for_pool(pool: WarmPool) -> list[Manifest]:
    actions = plan_pool(replace(seen_pool(pool), defaults=WITH_CACHE), T0).actions
    return [one.manifest for one in actions if isinstance(one, CreatePod)]


def corpus() -> list[Any]:
    """What the operator makes for every example, and for what no example has."""
    found: dict[str, list[Manifest]] = {}
    for path in sorted((ROOT / "examples").rglob("*.yaml")):
        for number, one in enumerate(yaml.safe_load_all(path.read_text())):
            one.setdefault("metadata", {}).setdefault("uid", "7e57")
            label = f"{path.stem}-{number}"
            engine = one.get("spec", {}).get("runtime", {}).get("engine", "slipway")
            if one["kind"] == "InferenceService" and engine == "slipway":
                found[label] = made_for(InferenceService.parse(one))
            elif one["kind"] == "WarmPool":
                found[label] = made_for_pool(WarmPool.model_validate(one))
    special: dict[str, dict[str, Any]] = {
        "node-cache": {"model": {"uri": "hf://a/b@c", "cache": {"policy": "Node"}}},
        "account": {"template": {"spec": {"serviceAccountName": "models"}}},
        "gpus": {"resources": {"gpu": {"count": 4}}, "runtime": {"tensorParallelSize": 4}},
        "claim": {"model": {"uri": "pvc://models/llama"}},
        "priority": {"availability": {"priorityClassName": ""}},
    }
    found |= {name: made_for(a_service(**spec)) for name, spec in special.items()}
    found["pool"] = made_for_pool(a_pool())
    found["engine-with-agent"] = [pod_of(a_vllm_service(), pinned())]
    return [pytest.param(manifests, id=name) for name, manifests in found.items()]


def a_pod_of_ours() -> Manifest:
    return next(one for one in made_for(a_service()) if one["kind"] == "Pod")


@pytest.mark.capability("SE-3")
@pytest.mark.parametrize("manifests", corpus())
def test_everything_that_the_operator_makes_passes(bounded: Bounded, manifests: list[Manifest]) -> None:
    assert "Pod" in {one["kind"] for one in manifests}
    refused = {f"{one['kind']}/{one['metadata']['name']}": bounded.refusal(one) for one in manifests}
    assert {name: reason for name, reason in refused.items() if reason} == {}


def pod(**spec: Any) -> Callable[[Manifest], None]:
    return lambda manifest: manifest["spec"].update(spec)


def server(**fields: Any) -> Callable[[Manifest], None]:
    return lambda manifest: manifest["spec"]["containers"][0].update(fields)


def security(**fields: Any) -> Callable[[Manifest], None]:
    return lambda manifest: manifest["spec"]["containers"][0]["securityContext"].update(fields)


def folder(path: str) -> Callable[[Manifest], None]:
    return lambda manifest: manifest["spec"]["volumes"].append({"name": "nodes", "hostPath": {"path": path}})


def beside(name: str) -> Callable[[Manifest], None]:
    container = {"name": name, "image": "x", "securityContext": {"capabilities": {"add": ["NET_ADMIN"]}}}
    return lambda manifest: manifest["spec"].update(initContainers=[container])


def owned_by(*owners: Manifest) -> Callable[[Manifest], None]:
    return lambda manifest: manifest["metadata"].update(ownerReferences=list(owners))


DEPLOYMENT = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "a", "uid": "0", "controller": True}
NOT_CONTROLLER = {"apiVersion": "slipway.dev/v1alpha1", "kind": "InferenceService", "name": "a", "uid": "0"}
PRIVILEGED = "creates no privileged container, and server is one"
FORBIDDEN: dict[str, tuple[Callable[[Manifest], None], str]] = {
    "no owner": (owned_by(), "only the children of Slipway's objects"),
    "owner of another kind": (owned_by(DEPLOYMENT), "only the children of Slipway's objects"),
    "owner that is no controller": (owned_by(NOT_CONTROLLER), "only the children of Slipway's objects"),
    "hostNetwork": (pod(hostNetwork=True), "namespace of its node"),
    "hostPID": (pod(hostPID=True), "namespace of its node"),
    "hostIPC": (pod(hostIPC=True), "namespace of its node"),
    "privileged": (security(privileged=True, allowPrivilegeEscalation=True), PRIVILEGED),
    "escalation": (security(allowPrivilegeEscalation=True), PRIVILEGED),
    "capability": (security(capabilities={"add": ["SYS_ADMIN"]}), PRIVILEGED),
    "root": (security(runAsNonRoot=False, runAsUser=0), PRIVILEGED),
    "user 0": (security(runAsUser=0), PRIVILEGED),
    "no security context": (server(securityContext={}), PRIVILEGED),
    "port of the node": (server(ports=[{"containerPort": 1, "hostPort": 1}]), PRIVILEGED),
    "privileged init container": (beside("setup"), "and setup is one"),
    "folder of the node": (folder("/etc"), "the volume nodes is /etc"),
    "folder with the same beginning": (folder("/var/lib/models-of-others"), "the volume nodes is /var/lib/models-of"),
    "account": (pod(serviceAccountName="admin"), "none for the account admin"),
    "token": (pod(automountServiceAccountToken=True), "no pod with the token of a ServiceAccount"),
    "priority class": (pod(priorityClassName="system-node-critical"), "PriorityClass system-node-critical"),
}


@pytest.mark.capability("SE-3")
@pytest.mark.parametrize(("change", "expected"), FORBIDDEN.values(), ids=FORBIDDEN)
def test_a_pod_that_the_operator_never_makes_is_refused_in_its_name(
    bounded: Bounded, change: Callable[[Manifest], None], expected: str
) -> None:
    made = a_pod_of_ours()
    assert bounded.refusal(made) == ""
    change(made)

    said = bounded.refusal(made)

    assert said.startswith("403")
    assert expected in said


@pytest.mark.parametrize("change", [beside("istio-init"), folder("/var/run/agent/socket")])
def test_what_a_webhook_of_the_platform_adds_can_be_admitted(
    bounded: Bounded, change: Callable[[Manifest], None]
) -> None:
    made = a_pod_of_ours()
    change(made)

    assert bounded.refusal(made) == ""


@pytest.mark.capability("SE-3")
@pytest.mark.parametrize("namespace", ["kube-system", "kube-public"])
def test_nothing_is_created_in_kubernetes_own_namespaces(bounded: Bounded, namespace: str) -> None:
    for made in made_for(a_service()):
        assert f"nothing in the namespace {namespace}" in bounded.refusal(made, namespace)


@pytest.mark.capability("SE-3")
@pytest.mark.parametrize("kind", ["Pod", "ConfigMap", "Service"])
def test_the_operator_neither_changes_nor_deletes_what_is_not_slipways(bounded: Bounded, kind: str) -> None:
    name, (api, plural) = f"foreign-{kind.lower()}", PLURALS[kind]
    specs: dict[str, Manifest] = {
        "Pod": {"spec": {"containers": [{"name": "a", "image": "a"}]}},
        "ConfigMap": {},
        "Service": {"spec": {"ports": [{"port": 80}]}},
    }
    path = f"{api}/namespaces/{bounded.namespace}/{plural}"
    foreign = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}} | specs[kind]
    bounded.access.api("POST", path, foreign)
    label = {"metadata": {"labels": {"a": "b"}}}

    for method, body in (("PATCH", label), ("DELETE", None)):
        said = bounded.write_refusal(method, kind, name, body)
        assert said.startswith("403")
        assert "only the children of Slipway's objects" in said

    # One of ours that lost its controller, as after `kubectl delete --cascade=orphan`, is ours by its label.
    ours = {"metadata": {"labels": {"app.kubernetes.io/managed-by": "slipway"}}}
    bounded.access.api("PATCH", f"{path}/{name}", ours)
    assert bounded.write_refusal("DELETE", kind, name) == ""


def test_other_users_are_not_limited(bounded: Bounded) -> None:
    made = a_pod_of_ours()
    for change, _ in (FORBIDDEN["no owner"], FORBIDDEN["folder of the node"]):
        change(made)
    made["metadata"]["namespace"] = bounded.namespace

    stored = bounded.access.api("POST", f"/api/v1/namespaces/{bounded.namespace}/pods?dryRun=All", made)

    assert stored["metadata"]["name"] == made["metadata"]["name"]
