"""What warm pools rest on, asked of a real API server: the kind's rules, the pods, the guarded patch, the deletion."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from e2e.cluster.access import Access, ApiError, CommandError
from slipway_api import names
from slipway_api.runtime_api import LoadModelRequest
from slipway_kube.objects import Pod
from slipway_operator.controller.claimer import claim_operations, return_operations
from slipway_operator.controller.pod_state import state_metadata
from slipway_operator.core.actions import ClaimPod, ReturnPod
from slipway_operator.core.installation import NONROOT, PlacementDefaults
from slipway_operator.core.service.replicas.access import PortAccess
from slipway_operator.core.service.replicas.pod import build_pod
from slipway_operator.core.service.rollout.revision import Revision
from slipway_operator.core.warm_pool.pod import build_pool_pod, pool_owner, waiting_metadata
from slipway_operator.core.warm_pool.shape import shape_of_pool
from tests.builders import IMAGE, T0, a_service
from tests.operator.core.warm_pool.pools import a_pool

pytestmark = pytest.mark.apiserver

CRDS = Path(__file__).resolve().parents[2] / "crds"
Object = dict[str, Any]


@pytest.fixture
def namespace(apiserver: Access) -> Iterator[str]:
    apiserver.serve_kinds(CRDS)
    name = apiserver.create_namespace("warm", restricted=True)
    account = {"metadata": {"name": "default"}}
    try:
        apiserver.api("POST", f"/api/v1/namespaces/{name}/serviceaccounts", account)
    except ApiError as exists:
        assert exists.code == 409  # noqa: PT017  the controller was faster, where there is one
    yield name
    apiserver.api("DELETE", f"/api/v1/namespaces/{name}")


def a_manifest(**spec: Any) -> Object:
    metadata = {"name": "pool"}
    return {"apiVersion": names.API_VERSION, "kind": "WarmPool", "metadata": metadata, "spec": {"size": 1} | spec}


@pytest.mark.capability("AS-5")
def test_the_kind_is_explained_listed_and_refuses_what_cannot_work(apiserver, namespace):
    def apply(manifest: Object) -> str:
        return apiserver.kubectl("apply", "-n", namespace, "--dry-run=server", "-f", "-", stdin=json.dumps(manifest))

    def refusal(**spec: Any) -> str:
        with pytest.raises(CommandError) as refused:
            apply({**a_manifest(**spec), "spec": {k: v for k, v in ({"size": 1} | spec).items() if v is not None}})
        return refused.value.stderr

    assert "created" in apply(a_manifest())
    assert "created" in apply(a_manifest() | {"spec": {"autosize": {"min": 1, "max": 3}}})
    assert "set either size or autosize" in refusal(autosize={"max": 2})
    assert "set either size or autosize" in refusal(size=None)
    assert "min must not be above max" in refusal(size=None, autosize={"min": 3, "max": 2})
    assert "Unsupported value" in refusal(level="Hot")
    models = [{"uri": "hf://org/name@rev"}]
    assert "created" in apply(a_manifest(level="Loaded", models=models))
    assert "created" in apply(a_manifest(level="Sleeping", models=models, runtime={"maxNumSeqs": 8}))
    assert "need one entry in models" in refusal(level="Loaded")
    assert "need one entry in models" in refusal(models=models)
    assert "comes with the claim" in refusal(runtime={"maxNumSeqs": 8})
    assert "leave runtime.image empty" in refusal(level="Loaded", models=models, runtime={"image": "x"})
    gpus = {"gpu": {"count": 2}}
    assert "the number of GPUs" in refusal(level="Loaded", models=models, runtime={"maxNumSeqs": 8}, resources=gpus)
    assert "uri must be" in refusal(level="Loaded", models=[{"uri": "/x"}])
    gpu = {"name": "server", "resources": {"limits": {"nvidia.com/gpu": 1}}}
    assert "gpu" in refusal(template={"spec": {"containers": [gpu]}}).lower()
    explained = apiserver.kubectl("explain", "wpool.spec.refill.delaySeconds")
    assert "Pause after a claim" in explained
    apiserver.kubectl("create", "-n", namespace, "-f", "-", stdin=json.dumps(a_manifest()))
    header = apiserver.kubectl("get", "wpool", "-n", namespace, "-o", "wide").splitlines()[0].split()
    assert header == ["NAME", "LEVEL", "SIZE", "READY", "WARMING", "CLAIMED", "HIT%", "AGE"]


@pytest.mark.capability("AS-5")
def test_of_two_services_one_gets_the_pod_which_is_not_deleted_by_its_old_version_and_returns_to_the_pool(
    apiserver, namespace
):
    access = PortAccess(nonce="n", admin_digests=("d",))
    ours = f"/apis/{names.API_VERSION}/namespaces/{namespace}"

    def uid_of(plural: str, manifest: Object) -> str:
        """Owners that exist: the garbage collector deletes the pods of others."""
        return apiserver.api("POST", f"{ours}/{plural}", manifest)["metadata"]["uid"]

    a_stored = {"apiVersion": names.API_VERSION, "kind": "InferenceService", "spec": {"model": {"uri": "file:///m"}}}
    uids = {name: uid_of("inferenceservices", a_stored | {"metadata": {"name": name}}) for name in ("one", "two")}
    pool = a_pool(resources={"gpu": {"count": 0}})
    metadata = pool.metadata.model_copy(update={"uid": uid_of("warmpools", a_manifest())})
    pool = pool.model_copy(update={"metadata": metadata})
    manifest = build_pool_pod(
        pool, 0, shape_of_pool(pool, IMAGE), image=IMAGE, access=access, user=NONROOT, placement=PlacementDefaults()
    )
    manifest["metadata"]["namespace"] = namespace
    pods = f"/api/v1/namespaces/{namespace}/pods"
    before = apiserver.api("POST", pods, manifest)

    def claim(service: str) -> str:
        wanted = a_service(service, uid=uids[service], resources={"gpu": {"count": 0}})
        revision = Revision("x" * 10, IMAGE)
        metadata = build_pod(
            wanted, revision, slot=0, attempt=0, access=access, user=NONROOT, placement=PlacementDefaults()
        )["metadata"]
        action = ClaimPod(
            name="pool-warm-0",
            uid=before["metadata"]["uid"],
            pool_uid=pool.metadata.uid,
            owner=metadata["ownerReferences"][0],
            labels=metadata["labels"],
            annotations={names.ANNOTATION_CLAIMED_AT: T0.isoformat()},
            request=LoadModelRequest(uri="file:///m"),
            reason="",
        )
        patch = json.dumps(claim_operations(action))
        return apiserver.kubectl("patch", "pod", "pool-warm-0", "-n", namespace, "--type=json", "-p", patch)

    assert "patched" in claim("one")
    with pytest.raises(CommandError):
        claim("two")

    after = apiserver.api("GET", f"{pods}/pool-warm-0")
    (owner,) = after["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("InferenceService", uids["one"])
    labels = after["metadata"]["labels"]
    assert (labels[names.LABEL_STATE], labels[names.LABEL_SERVICE]) == (names.STATE_SERVING, "one")
    assert after["metadata"]["annotations"][names.ANNOTATION_ADMIN_NONCE] == "n", "the admin token stays"
    guard = {"uid": before["metadata"]["uid"], "resourceVersion": before["metadata"]["resourceVersion"]}
    with pytest.raises(ApiError) as kept:
        apiserver.api("DELETE", f"{pods}/pool-warm-0", {"preconditions": guard, "gracePeriodSeconds": 0})
    assert kept.value.code == 409

    def give_back(seen: Object) -> str:
        returned = waiting_metadata(pool)
        action = ReturnPod(
            name="pool-warm-0",
            uid=seen["metadata"]["uid"],
            pool_owner=pool_owner(pool),
            labels=returned["labels"],
            annotations=returned["annotations"] | {names.ANNOTATION_CLAIMS: "1"},
            dropped=names.RECOMMENDED_LABELS,
            reason="",
        )
        pod = msgspec.json.decode(json.dumps(seen), type=Pod)
        patch = json.dumps(return_operations(pod, uids["one"], action))
        return apiserver.kubectl("patch", "pod", "pool-warm-0", "-n", namespace, "--type=json", "-p", patch)

    with pytest.raises(CommandError):
        give_back(after)
    identity = {"name": "pool-warm-0", "namespace": namespace, "uid": after["metadata"]["uid"]}
    state = state_metadata(drain_started=T0, drain_reason="scaling down")
    drain = json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": identity | state})
    by = ("--server-side", "--force-conflicts", "--field-manager", names.FIELD_MANAGER_META)
    apiserver.kubectl("apply", "-n", namespace, *by, "-f", "-", stdin=drain)
    with pytest.raises(CommandError):
        give_back(after)  # an older version than the drained one
    assert "patched" in give_back(apiserver.api("GET", f"{pods}/pool-warm-0"))

    back = apiserver.api("GET", f"{pods}/pool-warm-0")["metadata"]
    assert back["labels"] == before["metadata"]["labels"]
    assert back["annotations"] == before["metadata"]["annotations"] | {names.ANNOTATION_CLAIMS: "1"}
    assert [owner["uid"] for owner in back["ownerReferences"]] == [pool.metadata.uid]
    assert "patched" in claim("two")
    apiserver.kubectl("apply", "-n", namespace, *by, "-f", "-", stdin=drain)
    drained = apiserver.api("GET", f"{pods}/pool-warm-0")["metadata"]
    assert drained["labels"][names.LABEL_STATE] == names.STATE_DRAINING
    assert drained["labels"][names.LABEL_SERVICE] == "two"
