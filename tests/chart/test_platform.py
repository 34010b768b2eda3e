"""The chart on a platform of others: warnings, the built-in roles, arbitrary users, rights in one namespace only."""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.cluster.access import Access, CommandError
from e2e.cluster.launch import Cluster
from tests.chart.test_chart import ACCOUNT, of_kind, pod_of, render, upgrade

pytestmark = pytest.mark.apiserver

NAMESPACE = "team-of-the-platform"
MODEL = {"uri": "hf://org/model@4f2c9ab"}


@pytest.fixture(scope="module")
def platform(apiserver: Cluster) -> Iterator[Cluster]:
    """The chart with rights in one namespace, and the controllers that aggregate roles."""
    apiserver.start_controllers()
    apiserver.kubectl("create", "namespace", NAMESPACE)
    upgrade(apiserver, f"watchNamespaces={{{NAMESPACE}}}")
    apiserver.kubectl("wait", "--for=condition=Established", "crd/inferenceservices.slipway.dev", "--timeout=30s")
    yield apiserver
    upgrade(apiserver)
    apiserver.helm("uninstall", "slipway", "--namespace", "slipway-system", "--wait=hookOnly")


def warnings_of(access: Access, spec: dict[str, Any], namespace: str = NAMESPACE) -> str:
    """What kubectl prints beside its answer."""
    manifest = {
        "apiVersion": "slipway.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "warned", "namespace": namespace},
        "spec": {"model": MODEL} | spec,
    }
    done = subprocess.run(
        [str(access.tools / "kubectl"), "create", "--dry-run=server", "-f", "-"],
        input=json.dumps(manifest),
        capture_output=True,
        text=True,
        env=access.environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


CANARY = {"strategy": "Canary", "canary": {"steps": [{"setWeight": 100}]}}
REGRETTABLE = [
    ({"model": {"uri": "hf://org/model"}}, "spec.model.uri hf://org/model names no revision"),
    ({"runtime": {"image": "registry:5000/runtime"}}, "spec.runtime.image registry:5000/runtime has no fixed tag"),
    ({"runtime": {"image": "runtime:latest"}}, "runtime:latest has no fixed tag"),
    ({"rollout": CANARY}, "Canary with one replica"),
    (
        {
            "runtime": {"tensorParallelSize": 2},
            "resources": {"gpu": {"count": 2}},
            "autoscaling": {"maxReplicas": 5},
            "budget": {"maxGPUs": 6},
        },
        "spec.budget.maxGPUs 6 allows 3 replicas of 2 GPUs: the 5 that the service may ask for are never reached",
    ),
]
FINE = [
    {},
    {"model": {"uri": "file:///models/tiny"}},
    {"runtime": {"image": "registry:5000/runtime:1.2"}},
    {"runtime": {"image": f"runtime@sha256:{'0' * 64}"}},
    {"rollout": CANARY, "replicas": 2},
    {"budget": {"maxGPUs": 4}, "autoscaling": {"maxReplicas": 4}},
    {"resources": {"gpu": {"count": 0}}, "replicas": 3},
]


def until_warned(access: Access) -> None:
    """A new policy is obeyed a moment after it is stored."""
    for _ in range(60):
        if warnings_of(access, REGRETTABLE[0][0]):
            return
        subprocess.run(["sleep", "0.5"], check=True)
    raise AssertionError("the policy is not obeyed")


@pytest.mark.capability("PF-31")
@pytest.mark.parametrize(("spec", "warning"), REGRETTABLE, ids=[text[:40] for _, text in REGRETTABLE])
def test_kubectl_warns_of_what_is_likely_to_be_regretted_and_stores_it(platform, spec, warning):
    until_warned(platform)

    said = warnings_of(platform, spec)

    assert said.startswith("Warning: ")
    assert warning in said
    assert said.count("Warning: ") == 1, "one warning for one mistake"


@pytest.mark.parametrize("spec", FINE, ids=[",".join(one) or "plain" for one in FINE])
def test_kubectl_says_nothing_about_what_is_fine(platform, spec):
    until_warned(platform)

    assert warnings_of(platform, spec) == ""


def test_in_namespaces_that_are_not_watched_nothing_warns(platform):
    until_warned(platform)

    assert warnings_of(platform, REGRETTABLE[0][0], namespace="default") == ""


def can(access: Access, who: str, verb: str, resource: str, namespace: str) -> bool:
    resource, _, subresource = resource.partition("/")
    question = ["auth", "can-i", verb, resource, f"--as={who}", "-n", namespace]
    try:
        return access.kubectl(*question, *([f"--subresource={subresource}"] if subresource else [])).startswith("yes")
    except CommandError as refusal:  # kubectl says "no" with an exit code too
        return refusal.stdout.startswith("yes")


KINDS = ("inferenceservices.slipway.dev", "loraadapters.slipway.dev", "warmpools.slipway.dev")


@pytest.mark.capability("PL-9")
@pytest.mark.parametrize(
    ("role", "may", "may_not"),
    [
        ("view", ("get", "list", "watch"), ("create", "patch", "delete")),
        ("edit", ("get", "create", "update", "patch", "delete"), ()),
        ("admin", ("get", "create", "update", "patch", "delete"), ()),
    ],
)
def test_the_built_in_roles_reach_all_three_kinds_but_not_their_status(platform, role, may, may_not):
    platform.kubectl("create", "rolebinding", f"a-{role}", f"--clusterrole={role}", f"--user={role}er", "-n", NAMESPACE)
    for _ in range(60):  # the controller aggregates a moment later
        if can(platform, f"{role}er", "get", KINDS[0], NAMESPACE):
            break
        subprocess.run(["sleep", "0.5"], check=True)

    for kind in KINDS:
        assert [verb for verb in may if not can(platform, f"{role}er", verb, kind, NAMESPACE)] == []
        assert [verb for verb in may_not if can(platform, f"{role}er", verb, kind, NAMESPACE)] == []
        assert not can(platform, f"{role}er", "patch", f"{kind}/status", NAMESPACE)
    assert can(platform, f"{role}er", "patch", "inferenceservices.slipway.dev/scale", NAMESPACE) is (role != "view")


@pytest.mark.capability("PL-9", "SE-3")
def test_the_operator_of_one_namespace_may_only_release_finalizers_in_another(platform):
    """It keeps the right to read and patch the two kinds with a finalizer after its Role went with the namespace.

    review/operator-users.md 2. RBAC cannot limit that right to a namespace (ADR 126).
    """
    operator = f"{ACCOUNT}operator"
    needs = [("list", kind) for kind in KINDS]
    needs += [("patch", "inferenceservices.slipway.dev/status"), ("create", "pods"), ("create", "events.events.k8s.io")]

    assert [one for one in needs if not can(platform, operator, *one, NAMESPACE)] == []
    held = {"inferenceservices.slipway.dev", "loraadapters.slipway.dev"}
    assert {one for one in needs if can(platform, operator, *one, "default")} == {("list", kind) for kind in held}
    assert [kind for kind in held if not can(platform, operator, "patch", kind, "default")] == []
    for verb in ("create", "delete", "update"):
        assert [kind for kind in held if can(platform, operator, verb, kind, "default")] == []
    listed = platform.kubectl("get", "infsvc", "-n", NAMESPACE, f"--as={operator}", "-o", "name")
    assert listed == ""
    with pytest.raises(CommandError, match="forbidden"):
        platform.kubectl("get", "warmpools", "--all-namespaces", f"--as={operator}")


@pytest.mark.capability("PL-3")
@pytest.mark.parametrize("kind", ["InferenceService", "WarmPool"])
def test_the_operator_may_own_pods_that_block_the_deletion_of_their_owner(platform, kind):
    """OwnerReferencesPermissionEnforcement, on in OpenShift and here, asks for the finalizers of the owner."""
    owner = {"apiVersion": "slipway.dev/v1alpha1", "kind": kind, "name": "a", "uid": "0", "blockOwnerDeletion": True}
    owner["controller"] = True  # the operator's policy (ADR 177) admits only children of Slipway's objects
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "owned", "namespace": NAMESPACE, "ownerReferences": [owner]},
        "spec": {
            "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True},
            "containers": [{"name": "a", "image": "a", "securityContext": {"allowPrivilegeEscalation": False}}],
        },
    }
    allowed = f"--as={ACCOUNT}operator"
    platform.kubectl("create", "role", f"pods-{kind.lower()}", "--verb=create", "--resource=pods", "-n", NAMESPACE)
    platform.kubectl(
        "create", "rolebinding", f"pods-{kind.lower()}", f"--role=pods-{kind.lower()}", "--user=maker", "-n", NAMESPACE
    )

    for _ in range(60):  # the plugin learns of a new kind, and the API server of a new role, a moment later
        try:
            said = platform.kubectl("create", "--dry-run=server", allowed, "-f", "-", stdin=json.dumps(pod))
            break
        except CommandError as refusal:
            said = str(refusal)
        subprocess.run(["sleep", "0.5"], check=True)

    assert "created (server dry run)" in said
    with pytest.raises(CommandError, match="cannot set blockOwnerDeletion"):
        platform.kubectl("create", "--dry-run=server", "--as=maker", "-f", "-", stdin=json.dumps(pod))


@pytest.mark.capability("PL-3")
@pytest.mark.parametrize("part", ["operator", "gateway"])
def test_users_are_left_to_a_platform_that_assigns_them(apiserver, part):
    pod = pod_of(render(apiserver, "podSecurity.assignedByPlatform=true"), part)
    contexts = [
        pod["securityContext"],
        *(one["securityContext"] for one in pod["containers"]),
    ]

    assert not any({"runAsUser", "runAsGroup", "fsGroup"} & set(one) for one in contexts)
    assert contexts[0]["runAsNonRoot"] is True


@pytest.mark.capability("PL-3")
def test_the_operator_is_told_which_user_its_pods_get(apiserver):
    def told(*settings: str) -> str:
        deployment = of_kind(render(apiserver, *settings), "Deployment")["slipway-operator"]
        environment = deployment["spec"]["template"]["spec"]["containers"][0]["env"]
        return next(one["value"] for one in environment if one["name"] == "SLIPWAY_POD_USER")

    assert told() == "65532:65532"
    assert told("podSecurity.user=1000720000", "podSecurity.group=0") == "1000720000:0"
    assert told("podSecurity.assignedByPlatform=true") == "platform"


# The last test: it installs the chart with other values.
@pytest.mark.capability("SE-11", "PF-31")
def test_beside_tenants_kubectl_warns_of_services_that_are_open_to_direct_callers(platform):
    """review/shipping.md 1"""
    opened = {"routing": {"directAccess": "Open"}}
    assert warnings_of(platform, opened) == "", "nobody needs a key anyway"
    tenants = ("gateway.tenants.configMap=tenants", "gateway.tenants.keysSecret=keys")
    upgrade(platform, f"watchNamespaces={{{NAMESPACE}}}", *tenants)
    for _ in range(60):
        if said := warnings_of(platform, opened):
            break
        subprocess.run(["sleep", "0.5"], check=True)

    assert "open to direct callers" in said
    assert "GatewayOnly" in said
    assert warnings_of(platform, {}) == "", "the default of the installation closes it"
    assert warnings_of(platform, {"routing": {"directAccess": "GatewayOnly"}}) == ""
