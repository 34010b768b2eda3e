"""The light cluster: the API server alone."""

import json

import pytest

from e2e.cluster.access import ApiError
from e2e.cluster.launch import Cluster

pytestmark = pytest.mark.apiserver


def test_it_is_a_real_api_server(apiserver: Cluster) -> None:
    from kubernetes import client

    assert client.VersionApi(apiserver.client()).get_code().git_version.startswith("v1.36.")
    assert "customresourcedefinitions" in apiserver.kubectl("api-resources", "-o", "name")


def test_pods_are_admitted_without_controllers_and_stay_pending(apiserver: Cluster) -> None:
    namespace = apiserver.create_namespace()
    pod = {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "x"}]}}

    made = apiserver.api("POST", f"/api/v1/namespaces/{namespace}/pods", pod)

    assert made["status"]["phase"] == "Pending"


def test_pod_security_is_enforced(apiserver: Cluster) -> None:
    namespace = apiserver.create_namespace(restricted=True)
    pod = {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "x"}]}}

    with pytest.raises(ApiError, match=r"403: .*violates PodSecurity"):
        apiserver.api("POST", f"/api/v1/namespaces/{namespace}/pods", pod)


def test_blocking_an_owner_takes_permission_on_its_finalizers(apiserver: Cluster) -> None:
    namespace = apiserver.create_namespace()
    owner = apiserver.api("POST", f"/api/v1/namespaces/{namespace}/configmaps", {"metadata": {"name": "owner"}})
    apiserver.kubectl("create", "role", "-n", namespace, "maker", "--verb=create", "--resource=configmaps")
    apiserver.kubectl("create", "rolebinding", "-n", namespace, "maker", "--role=maker", "--user=maker")
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    child = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "child"}}
    child["metadata"] |= {"ownerReferences": [reference | {"blockOwnerDeletion": True}]}  # type: ignore[operator]

    with pytest.raises(Exception, match="cannot set blockOwnerDeletion"):
        apiserver.kubectl("create", "-n", namespace, "--as=maker", "-f", "-", stdin=json.dumps(child))


def test_the_audit_log_names_who_was_refused(apiserver: Cluster) -> None:
    with pytest.raises(Exception, match="forbidden"):
        apiserver.kubectl("get", "secrets", "--as=nobody-in-particular")

    refused = [event for event in apiserver.audit() if event.get("responseStatus", {}).get("code") == 403]
    assert any(event.get("impersonatedUser", {}).get("username") == "nobody-in-particular" for event in refused)
