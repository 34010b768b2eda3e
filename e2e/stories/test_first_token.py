"""A user applies a manifest and talks to the model."""

import pytest

from e2e import user_fields
from e2e.cluster.access import CommandError
from e2e.manifests import as_yaml, chat, static
from e2e.slipway import EXAMPLES, RELEASE_NAMESPACE, Slipway, wait_for
from slipway_api import names

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.mark.capability("OP-1", "OP-2", "OP-3", "API-1", "API-2", "API-9", "DD-1", "ST-2")
def test_an_applied_service_becomes_ready_and_streams_tokens(clean: Slipway) -> None:
    clean.apply(EXAMPLES / "chat.yaml")
    service = clean.wait_ready("chat", replicas=1)

    raw = clean.openai().chat.completions.with_raw_response.create(
        model="chat", messages=[{"role": "user", "content": "Tell me a story."}], stream=True, max_tokens=48, seed=7
    )
    chunks = list(raw.parse())
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    assert len(text.split()) > 8
    assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]) > 8, "not streamed"
    assert raw.headers[names.HEADER_MODEL] == "chat"
    assert raw.headers[names.HEADER_REVISION] == service["status"]["currentRevision"]
    assert len(raw.headers[names.HEADER_TOKENIZER]) >= 12
    assert chunks[-1].system_fingerprint
    assert service["status"]["url"].endswith("/v1")
    assert [m.id for m in clean.openai().models.list()] == ["chat"]


@pytest.mark.capability("OP-1", "OP-2")
def test_its_children_are_plain_and_owned_and_applying_again_changes_nothing(clean: Slipway) -> None:
    clean.apply(EXAMPLES / "chat.yaml")
    service = clean.wait_ready("chat", replicas=1)
    uid = service["metadata"]["uid"]

    (pod,) = clean.pods("chat")
    kube_service = clean.core.read_namespaced_service("chat", "default")
    for child in (pod, kube_service):
        (owner,) = child.metadata.owner_references
        assert (owner.kind, owner.uid, owner.controller, owner.block_owner_deletion) == (
            "InferenceService", uid, True, True,
        )  # fmt: skip
    assert pod.metadata.name == f"chat-{service['status']['currentRevision'][:5]}-0-0"

    before = (pod.metadata.resource_version, kube_service.metadata.resource_version)
    printed = clean.apply(EXAMPLES / "chat.yaml")
    again = clean.wait_ready("chat", replicas=1)
    (pod,) = clean.pods("chat")
    kube_service = clean.core.read_namespaced_service("chat", "default")

    assert "unchanged" in printed
    assert (pod.metadata.resource_version, kube_service.metadata.resource_version) == before
    assert again["metadata"]["generation"] == service["metadata"]["generation"]


@pytest.mark.capability("OP-7")
def test_the_operator_never_writes_what_belongs_to_the_user(clean: Slipway) -> None:
    manifest = chat("mine")
    clean.apply(as_yaml(manifest))
    clean.wait_ready("mine")

    service = clean.objects.get_namespaced_custom_object(
        names.GROUP, names.VERSION, "default", "inferenceservices", "mine"
    )
    written = {
        entry["manager"]: entry["fieldsV1"]
        for entry in service["metadata"]["managedFields"]
        if entry["manager"].startswith("slipway")
    }

    assert written, "the operator has written its status and its finalizer"
    for fields in written.values():
        assert "f:spec" not in fields
        assert set(fields.get("f:metadata", {})) <= {"f:finalizers"}
    assert set(service["metadata"].get("annotations", {})) <= {"kubectl.kubernetes.io/last-applied-configuration"}


@pytest.mark.capability("OP-7")
def test_the_policy_of_these_stories_refuses_the_operator_a_write_of_spec(clean: Slipway) -> None:
    clean.apply(as_yaml(chat("guarded") | {"spec": chat("guarded")["spec"] | {"suspend": True}}))

    def refusal(patch: str) -> str:
        account = f"--as=system:serviceaccount:{RELEASE_NAMESPACE}:slipway-operator"
        arguments = ("patch", "infsvc", "guarded", "--type=merge", "--dry-run=server", account, "-p", patch)
        try:
            clean.access.kubectl(*arguments)
        except CommandError as error:
            return str(error)
        return ""

    wait_for(
        "the policy is enforced", lambda: user_fields.REFUSAL in refusal('{"spec": {"suspend": false}}'), timeout=60
    )
    assert user_fields.REFUSAL in refusal('{"metadata": {"annotations": {"a": "b"}}}')
    assert refusal('{"metadata": {"finalizers": ["slipway.dev/drain"]}}') == "", "finalizers are the operator's"


@pytest.mark.capability("SE-3")
def test_a_replica_runs_restricted_without_an_account(clean: Slipway) -> None:
    clean.access.kubectl(
        "label", "namespace", "default", "pod-security.kubernetes.io/enforce=restricted", "--overwrite"
    )
    try:
        clean.apply(as_yaml(static("strict", 1)))
        clean.wait_ready("strict", replicas=1)
        (pod,) = clean.pods("strict")
    finally:
        clean.access.kubectl("label", "namespace", "default", "pod-security.kubernetes.io/enforce-")

    assert pod.spec.automount_service_account_token is False
    assert pod.spec.containers[0].security_context.read_only_root_filesystem is True


@pytest.mark.capability("OP-1", "DD-1")
def test_gpu_and_cpu_services_run_beside_each_other(clean: Slipway) -> None:
    clean.apply(as_yaml(static("on-gpu", 1)))
    clean.apply(as_yaml(static("on-cpu", 1, resources={"gpu": {"count": 0}, "requests": {"cpu": "50m"}})))
    clean.wait_ready("on-gpu", replicas=1)
    clean.wait_ready("on-cpu", replicas=1)

    limits = {name: clean.pods(name)[0].spec.containers[0].resources.limits or {} for name in ("on-gpu", "on-cpu")}

    assert limits["on-gpu"]["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in limits["on-cpu"]
    assert sorted(m.id for m in clean.openai().models.list()) == ["on-cpu", "on-gpu"]
