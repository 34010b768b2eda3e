"""The oldest supported Kubernetes, rights in one namespace, pods of any user: a cluster of its own for them."""

import json
from collections.abc import Iterator

import pytest

from e2e.cluster.access import CommandError
from e2e.cluster.launch import GATEWAY, Cluster
from e2e.cluster.paths import cluster_folder
from e2e.manifests import as_yaml, static
from e2e.slipway import RELEASE_NAMESPACE, USER_NAMESPACE, Slipway, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

OLDEST = "1.34"
USER, GROUP = 61234, 0  # no name in any image; OpenShift assigns a high user, and the group 0
UNWATCHED = "team-b"

# As OpenShift's restricted-v2: a pod may only ask for a user of its namespace's range.
RANGE = {
    "apiVersion": "admissionregistration.k8s.io/v1",
    "kind": "ValidatingAdmissionPolicy",
    "metadata": {"name": "user-of-the-range"},
    "spec": {
        "failurePolicy": "Fail",
        "matchConstraints": {
            "resourceRules": [
                {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
            ]
        },
        "validations": [
            {
                "expression": "object.spec.?securityContext.runAsUser.orValue(60000) >= 60000 && "
                "object.spec.containers.all(c, c.?securityContext.runAsUser.orValue(60000) >= 60000)",
                "message": "the user is not in the range of the namespace",
            }
        ],
    },
}
BINDING = {
    "apiVersion": "admissionregistration.k8s.io/v1",
    "kind": "ValidatingAdmissionPolicyBinding",
    "metadata": {"name": "user-of-the-range"},
    "spec": {"policyName": "user-of-the-range", "validationActions": ["Deny"]},
}


@pytest.fixture(scope="module")
def oldest() -> Iterator[Slipway]:
    """Slipway on the oldest Kubernetes, with rights in one namespace, and pods of an arbitrary user."""
    folder = cluster_folder("platforms")
    with Cluster(folder=folder, publish=GATEWAY, nodes={"node-a": 1}, emulated_version=OLDEST) as cluster:
        cluster.wait_for_nodes()
        slipway = Slipway(cluster)
        cluster.kubectl("create", "namespace", UNWATCHED)
        for policy in (RANGE, BINDING):
            slipway.apply(json.dumps(policy))
        slipway.install(
            f"watchNamespaces={{{USER_NAMESPACE}}}",
            f"podSecurity.user={USER}",
            f"podSecurity.group={GROUP}",
            "operator.replicas=1",
            "gateway.replicas=1",
        )
        yield slipway
        for name in slipway.services():
            slipway.delete(name)


@pytest.mark.full
@pytest.mark.capability("PL-4", "PL-3", "PL-9")
def test_the_oldest_kubernetes_serves_with_rights_in_one_namespace_and_pods_of_any_user(oldest: Slipway) -> None:
    version = json.loads(oldest.access.kubectl("version", "-o", "json"))["serverVersion"]
    assert f"{version['emulationMajor']}.{version['emulationMinor']}" == OLDEST
    assert not oldest.access.kubectl("get", "clusterrole", "slipway-operator", "--ignore-not-found")

    elsewhere = static("elsewhere", 1)
    elsewhere["metadata"]["namespace"] = UNWATCHED
    oldest.apply(as_yaml(elsewhere))
    oldest.apply(as_yaml(static("platform", 1)))
    oldest.wait_ready("platform", replicas=1)

    answer = oldest.openai().completions.create(model="platform", prompt="The ship", max_tokens=8)
    assert answer.choices[0].text

    releases = oldest.core.list_namespaced_pod(RELEASE_NAMESPACE).items
    (replica,) = oldest.pods("platform")
    for pod in (*releases, replica):
        context = pod.spec.security_context
        assert (context.run_as_user, context.run_as_group) == (USER, GROUP), pod.metadata.name
    (owner,) = replica.metadata.owner_references
    assert owner.block_owner_deletion, "which OwnerReferencesPermissionEnforcement checks"

    oldest.apply(as_yaml(static("platform", 2, resources={"gpu": {"count": 0}, "limits": {"cpu": "1"}})))
    wait_for("a spec edit rolls out", lambda: oldest.service("platform")["status"]["updatedReplicas"] >= 1)
    assert oldest.pods("elsewhere", UNWATCHED) == [], "nobody watches that namespace"
    conditions = oldest.service("elsewhere", UNWATCHED)["status"]["conditions"]
    assert [one["reason"] for one in conditions] == ["Pending"], "the default: no operator has seen it"


@pytest.mark.full
@pytest.mark.capability("PL-3")
def test_the_policy_of_this_cluster_refuses_a_user_outside_the_range(oldest: Slipway) -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "named", "namespace": USER_NAMESPACE},
        "spec": {"securityContext": {"runAsUser": 65}, "containers": [{"name": "a", "image": "a"}]},
    }

    with pytest.raises(CommandError, match="not in the range"):
        oldest.access.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
