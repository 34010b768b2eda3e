"""The model on nodes: where pods keep it, which pods bring it beforehand, and what status says of it."""

from dataclasses import replace
from typing import Any

import pytest

from slipway_api import names
from slipway_api.conditions import find_condition
from slipway_api.inference_service import InferenceService
from slipway_operator.core.actions import CreatePod, DeletePod
from slipway_operator.core.installation import NONROOT, NodeCache, PlacementDefaults
from slipway_operator.core.observed import Failure
from slipway_operator.core.pulls import PullNode, PullPod, PullsSeen
from slipway_operator.core.service.model.pull_nodes import nodes_for
from slipway_operator.core.service.model.pulls import pull_digest
from slipway_operator.core.service.plan import Plan, plan
from slipway_operator.core.service.replicas.access import PortAccess
from slipway_operator.core.service.replicas.pod import build_pod
from slipway_operator.core.warm_pool.shape import shape_of_service
from tests.builders import DEFAULTS, T0, APod, a_pod, a_service, edited, promised, revision_of, seconds, seen

FOLDER = NodeCache(path="/var/lib/slipway/models", limit="500Gi")
WITH_FOLDER = replace(DEFAULTS, node_cache=FOLDER)
NODES = tuple(PullNode(name=name, allocatable={"nvidia.com/gpu": "8"}) for name in ("a", "b", "c"))


def of_node(**spec: Any) -> InferenceService:
    return promised(a_service(uri="hf://org/model@main", model={"cache": {"policy": "Node"}}, **spec), 1)


def pod_of(service: InferenceService, node_cache: NodeCache | None = None) -> dict[str, Any]:
    access = PortAccess(nonce="n", admin_digests=("aa",))
    return build_pod(
        service,
        revision_of(service),
        slot=0,
        attempt=0,
        access=access,
        user=NONROOT,
        placement=PlacementDefaults(),
        node_cache=node_cache,
    )["spec"]


def variables(spec: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in spec["containers"][0]["env"]}


def volume(spec: dict[str, Any], name: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The volume of that name, and its mount."""
    mounts = {one["name"]: one for one in spec["containers"][0]["volumeMounts"]}
    return next(((one, mounts[name]) for one in spec["volumes"] if one["name"] == name), None)


def planned(
    service: InferenceService, *pods: APod, nodes: tuple[PullNode, ...] = NODES, pulls: tuple[PullPod, ...] = (), now=T0
) -> Plan:
    observed = replace(seen(service, *pods), defaults=WITH_FOLDER, pulls=PullsSeen(nodes=nodes, pods=pulls))
    return plan(observed, now)


def pulling(service: InferenceService, node: str, **facts: Any) -> PullPod:
    """The pod that the plan would make for this node, as the caches show it."""
    digest = pull_digest(service, revision_of(service), replace(DEFAULTS, node_cache=FOLDER))
    wanted = {"uid": f"uid-{node}", "owner_uid": service.metadata.uid, "digest": digest, "created_at": T0} | facts
    return PullPod(name=f"chat-pull-{node}", node=node, **wanted)


def created(plan: Plan) -> list[dict[str, Any]]:
    """The pods that pull which the plan creates."""
    pods = [one.manifest for one in plan.actions if isinstance(one, CreatePod)]
    return [one for one in pods if names.LABEL_PRE_PULL in one["metadata"]["labels"]]


def replica_of(plan: Plan) -> dict[str, Any]:
    """The spec of the replica that the plan creates."""
    pods = [one.manifest for one in plan.actions if isinstance(one, CreatePod)]
    (replica,) = [one for one in pods if names.LABEL_PRE_PULL not in one["metadata"]["labels"]]
    return replica["spec"]


def pinned_to(pod: dict[str, Any]) -> str:
    required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return required["nodeSelectorTerms"][0]["matchFields"][0]["values"][0]


def cached(plan: Plan) -> tuple[str, str, str]:
    condition = find_condition(plan.status.conditions, "ModelCached")
    return (condition.status.value, condition.reason, condition.message) if condition else ("", "", "")


# --- where pods keep the model ----------------------------------------------------------------------------------------


@pytest.mark.capability("ST-4")
def test_pods_of_one_namespace_share_the_nodes_folder_and_no_other_namespace_sees_it():
    found = volume(pod_of(of_node(), FOLDER), "slipway-models")

    assert found is not None
    source, mount = found
    assert source["hostPath"] == {"path": "/var/lib/slipway/models", "type": "Directory"}
    assert mount == {"name": "slipway-models", "mountPath": names.MODEL_CACHE_DIRECTORY, "subPath": "demo"}
    assert variables(pod_of(of_node(), FOLDER))["SLIPWAY_CACHE_DIR"] == names.MODEL_CACHE_DIRECTORY
    assert variables(pod_of(of_node(), FOLDER))["SLIPWAY_CACHE_LIMIT"] == "500Gi"


def test_a_shared_claim_is_mounted_whole_and_writable():
    service = a_service(uri="hf://org/model", model={"cache": {"policy": "Shared", "claimName": "models"}})

    found = volume(pod_of(service), "slipway-models")

    assert found is not None
    assert found[0]["persistentVolumeClaim"] == {"claimName": "models"}
    assert found[1] == {"name": "slipway-models", "mountPath": names.MODEL_CACHE_DIRECTORY}


def test_a_service_without_a_cache_gets_the_pod_of_before():
    """Whatever the installation has: an upgrade must not make new revisions."""
    service = a_service(uri="hf://org/model")

    assert pod_of(service, FOLDER) == pod_of(service)
    assert volume(pod_of(service, FOLDER), "slipway-models") is None
    assert "SLIPWAY_CACHE_DIR" not in variables(pod_of(service))


@pytest.mark.capability("ST-10")
def test_replicas_with_gpus_and_a_cache_have_the_key_of_their_service():
    """With it they share compiled kernels. Neither a user nor a template may put another key in its place."""
    forged = [{"name": names.ENV_KERNELS_KEY, "value": "mine"}]
    claim = promised(a_service(uri="hf://org/m@1", model={"cache": {"policy": "Shared", "claimName": "models"}}), 1)

    for service in (of_node(), of_node(runtime={"env": forged}), claim):
        assert variables(replica_of(planned(service)))[names.ENV_KERNELS_KEY] == "kernels-of-demo/chat"


@pytest.mark.capability("ST-10")
def test_pods_that_share_no_kernels_do_not_have_the_key():
    cpu = {"gpu": {"count": 0}}
    services = (promised(a_service(uri="hf://org/model@main"), 1), of_node(resources=cpu))

    for service in services:
        assert names.ENV_KERNELS_KEY not in variables(replica_of(planned(service)))
    pulls = created(planned(of_node(prePull={})))
    assert pulls
    assert all(names.ENV_KERNELS_KEY not in variables(pod["spec"]) for pod in pulls)


def test_a_cache_belongs_to_the_revision_and_pulling_beforehand_does_not():
    service = a_service(uri="hf://org/model@main", model={"cache": {"policy": "Node"}})

    assert revision_of(edited(service, prePull={})).hash == revision_of(service).hash
    assert revision_of(edited(service, model={"uri": "hf://org/model@main"})).hash != revision_of(service).hash


@pytest.mark.parametrize(
    "model",
    [
        {"cache": {"policy": "Node"}},
        {"cache": {"policy": "Shared", "claimName": "models"}},
        {"network": {"proxy": "http://proxy:3128"}},
        {"network": {"caBundleRef": {"name": "ca"}}},
    ],
    ids=lambda model: "-".join(next(iter(model.values()))),
)
def test_no_warm_pod_is_claimed_that_lacks_the_volume_or_the_variable(model):
    plain, other = a_service(uri="hf://org/model"), a_service(uri="hf://org/model", model=model)

    assert shape_of_service(plain, revision_of(plain)) != shape_of_service(other, revision_of(plain))


# --- what is not permitted --------------------------------------------------------------------------------------------


def test_without_a_folder_of_the_installation_no_pod_is_made_and_status_says_what_to_do():
    made = plan(seen(of_node()), T0)

    stalled = find_condition(made.status.conditions, "Stalled")
    assert not any(isinstance(one, CreatePod) for one in made.actions)
    assert stalled is not None
    assert stalled.reason == "CacheNotPermitted"
    assert "modelCache.nodePath" in stalled.message


def test_a_namespace_that_forbids_the_folder_is_told_apart_from_other_refusals():
    said = (
        'pods "chat" is forbidden: violates PodSecurity "restricted:latest": hostPath volumes (volume "slipway-models")'
    )
    failure = Failure(action="CreatePod chat", reason="Forbidden", message=said, at=T0)

    made = plan(replace(seen(of_node(), failures=(failure,)), defaults=WITH_FOLDER), T0)

    stalled = find_condition(made.status.conditions, "Stalled")
    assert stalled is not None
    assert stalled.reason == "CacheNotPermitted"
    assert "oci://" in stalled.message
    assert any(isinstance(one, CreatePod) for one in made.actions), "it is tried again: the namespace may change"


# --- pods that pull ---------------------------------------------------------------------------------------------------


@pytest.mark.capability("ST-6")
def test_each_node_gets_a_pod_that_pulls_and_no_more_at_once_than_asked():
    service = of_node(prePull={"maxConcurrent": 2})

    first = planned(service)
    second = planned(service, pulls=(pulling(service, "a", phase="Succeeded"), pulling(service, "b", phase="Running")))
    done = planned(service, pulls=tuple(pulling(service, node.name, phase="Succeeded") for node in NODES))

    assert [pinned_to(pod) for pod in created(first)] == ["a", "b"]
    assert [pinned_to(pod) for pod in created(second)] == ["c"]
    assert created(done) == []


@pytest.mark.capability("ST-6", "SD-4")
def test_a_pod_that_pulls_brings_the_draft_model_too():
    def pulled(uri: str) -> str | None:
        drafting = {"speculation": {"method": "draft", "draftModel": {"uri": uri}}}
        pod, *_ = created(planned(of_node(prePull={}, runtime=drafting if uri else {})))
        return variables(pod["spec"]).get(names.ENV_PRE_PULL_DRAFT_MODEL)

    assert pulled("hf://org/small@abc") == "hf://org/small@abc"
    assert pulled("") is None, "an older pod that pulled stays the record of its node"


@pytest.mark.capability("ST-6")
def test_a_pod_that_pulls_brings_what_the_replica_needs_and_takes_nothing_that_it_needs():
    gpus = {"gpu": {"count": 4}}
    service = promised(
        a_service(
            uri="hf://org/model@main",
            model={"cache": {"policy": "Node"}, "credentialsSecretRef": {"name": "hf"}},
            runtime={"tensorParallelSize": 4, "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}]},
            resources=gpus,
            availability={"priorityClassName": "high"},
            template={"spec": {"imagePullSecrets": [{"name": "registry"}]}},
            prePull={},
        ),
        1,
    )

    pod, *_ = created(planned(service))

    replica, (container,) = pod_of(service, FOLDER), pod["spec"]["containers"]
    assert container["args"] == ["pull", "hf://org/model@main"]
    assert container["image"] == replica["containers"][0]["image"]
    assert container["volumeMounts"] == replica["containers"][0]["volumeMounts"]
    assert pod["spec"]["volumes"] == replica["volumes"]
    assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert {"HF_TOKEN", "HTTPS_PROXY", "SLIPWAY_CACHE_DIR"} <= set(variables(pod["spec"]))
    assert container["securityContext"] == replica["containers"][0]["securityContext"]
    assert pod["spec"]["securityContext"] == replica["securityContext"]
    assert "nvidia.com/gpu" not in str(container["resources"]), "a pod that pulls must not hold a GPU"
    assert "priorityClassName" not in pod["spec"], "it must not push a replica aside"
    assert names.ENV_ADMIN_TOKEN_SHA256 not in variables(pod["spec"])
    assert names.LABEL_SERVICE not in pod["metadata"]["labels"], "neither Service nor gateway may take it for a replica"
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["spec"]["tolerations"]


@pytest.mark.capability("ST-6")
def test_another_model_is_pulled_anew_and_the_old_pods_are_deleted():
    before = of_node(prePull={})
    old = tuple(pulling(before, node.name, phase="Succeeded") for node in NODES)
    after = promised(edited(before, model={"uri": "hf://org/other", "cache": {"policy": "Node"}}), 1)

    made = planned(after, pulls=old)

    deleted = {one.name for one in made.actions if isinstance(one, DeletePod)}
    assert deleted == {one.name for one in old}
    assert len(created(made)) == 2


def test_settings_of_the_scheduler_do_not_pull_anew():
    before = of_node(prePull={})
    pulls = tuple(pulling(before, node.name, phase="Succeeded") for node in NODES)
    after = promised(edited(before, runtime={"maxNumSeqs": 8}), 1)

    made = planned(after, pulls=pulls)

    assert created(made) == []
    assert not any(isinstance(one, DeletePod) for one in made.actions)


def test_without_pre_pull_its_pods_are_deleted_and_status_forgets_them():
    service = of_node(prePull={})
    pulls = tuple(pulling(service, node.name, phase="Succeeded") for node in NODES)
    off = promised(edited(service, prePull=None), 1)

    made = planned(off, pulls=pulls)

    assert {one.name for one in made.actions if isinstance(one, DeletePod)} == {one.name for one in pulls}
    assert made.status.model_cache is None


def test_pods_of_a_deleted_service_of_the_same_name_are_left_to_the_garbage_collector():
    service = of_node(prePull={})
    foreign = pulling(service, "a", owner_uid="another", phase="Succeeded")

    made = planned(service, pulls=(foreign,))

    assert not any(isinstance(one, DeletePod) for one in made.actions)
    assert "a" in [pinned_to(pod) for pod in created(made)]


def test_an_evicted_pod_is_made_anew_after_a_minute_and_not_at_once():
    service = of_node(prePull={})
    evicted = pulling(service, "a", phase="Failed", phase_reason="Evicted")

    early = planned(service, pulls=(evicted,), now=T0 + seconds(10))
    late = planned(service, pulls=(evicted,), now=T0 + seconds(61))

    assert not any(isinstance(one, DeletePod) for one in early.actions)
    assert early.requeue_after == 50
    assert [one.name for one in late.actions if isinstance(one, DeletePod)] == [evicted.name]


def test_a_suspended_service_pulls_nothing():
    assert created(planned(of_node(prePull={}, suspend=True))) == []


def test_one_pod_fills_a_shared_claim():
    service = a_service(
        uri="hf://org/model", model={"cache": {"policy": "Shared", "claimName": "models"}}, prePull={"maxConcurrent": 9}
    )

    (pod,) = created(planned(promised(service, 1)))

    assert "affinity" not in pod["spec"]


def test_a_pass_that_finds_everything_pulled_changes_nothing():
    service = of_node(prePull={}, replicas=0)
    pulls = tuple(pulling(service, node.name, phase="Succeeded", result='{"bytes": 1024}') for node in NODES)
    service = promised(service, 0)
    once = planned(service, pulls=pulls)

    again = planned(service.model_copy(update={"status": once.status}), pulls=pulls, now=T0 + seconds(600))

    assert again.status == once.status
    assert again.events == ()


@pytest.mark.capability("PL-12", "ST-6")
def test_pulling_an_oci_model_needs_no_cache_because_the_kubelet_keeps_images():
    service = promised(a_service(uri="oci://registry.example/team/llama:1", prePull={}), 1)

    pods = created(planned(service))

    assert pods[0]["spec"]["containers"][0]["args"] == ["pull", f"file://{names.IMAGE_DIRECTORY}"]
    assert any("image" in one for one in pods[0]["spec"]["volumes"])


# --- on which nodes ---------------------------------------------------------------------------------------------------

TAINTED = PullNode(name="t", allocatable={"nvidia.com/gpu": "8"}, taints=(("team", "x", "NoSchedule"),))
OF_GPU = PullNode(name="t", allocatable={"nvidia.com/gpu": "8"}, taints=(("nvidia.com/gpu", "present", "NoSchedule"),))
SILENT = PullNode(
    name="t",
    is_usable=False,
    allocatable={"nvidia.com/gpu": "8"},
    taints=(("node.kubernetes.io/not-ready", "", "NoExecute"),),
)


def affinity(operator: str, *values: str, key: str = "zone") -> dict[str, Any]:
    term = {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    return {"spec": {"affinity": {"nodeAffinity": required}}}


@pytest.mark.parametrize(
    ("node", "spec", "admitted"),
    [
        (PullNode(name="n", allocatable={"nvidia.com/gpu": "8"}), {}, True),
        (PullNode(name="n"), {}, False),
        (PullNode(name="n"), {"resources": {"gpu": {"count": 0}}}, True),
        (PullNode(name="n", is_leaving=True), {"resources": {"gpu": {"count": 0}}}, False),
        (replace(NODES[0], labels={"disk": "fast"}), {"template": {"spec": {"nodeSelector": {"disk": "fast"}}}}, True),
        (NODES[0], {"template": {"spec": {"nodeSelector": {"disk": "fast"}}}}, False),
        (NODES[0], {"resources": {"gpu": {"count": 1, "product": "NVIDIA-H200"}}}, False),
        (
            replace(NODES[0], labels={"nvidia.com/gpu.product": "NVIDIA-H200"}),
            {"resources": {"gpu": {"count": 1, "product": "NVIDIA-H200"}}},
            True,
        ),
        (TAINTED, {}, False),
        (TAINTED, {"template": {"spec": {"tolerations": [{"key": "team", "operator": "Exists"}]}}}, True),
        (TAINTED, {"template": {"spec": {"tolerations": [{"key": "team", "value": "x"}]}}}, True),
        (TAINTED, {"template": {"spec": {"tolerations": [{"key": "team", "value": "y"}]}}}, False),
        (OF_GPU, {}, True),
        (SILENT, {}, True),
        (replace(NODES[0], labels={"zone": "1"}), {"template": affinity("In", "1", "2")}, True),
        (replace(NODES[0], labels={"zone": "3"}), {"template": affinity("In", "1", "2")}, False),
        (NODES[0], {"template": affinity("NotIn", "1")}, True),
        (NODES[0], {"template": affinity("Exists")}, False),
        (NODES[0], {"template": affinity("DoesNotExist")}, True),
        (replace(NODES[0], labels={"zone": "7"}), {"template": affinity("Gt", "6")}, True),
        (replace(NODES[0], labels={"zone": "7"}), {"template": affinity("Lt", "6")}, False),
    ],
)
def test_nodes_are_chosen_as_the_scheduler_would(node, spec, admitted):
    assert [one.name for one in nodes_for(a_service(**spec).spec, [node], PlacementDefaults())] == (
        [node.name] if admitted else []
    )


def test_a_silent_node_counts_and_gets_no_pod_until_it_is_back():
    """Else the total would change with each heartbeat that is late, and status with it."""
    service = of_node(prePull={"maxConcurrent": 5})
    nodes = (NODES[0], replace(NODES[1], is_usable=False))

    made = planned(service, nodes=nodes)

    assert [pinned_to(pod) for pod in created(made)] == ["a"]
    assert made.status.model_cache.nodes_total == 2


# --- what status says -------------------------------------------------------------------------------------------------


@pytest.mark.capability("ST-6")
def test_status_counts_nodes_and_the_condition_turns_true_once_with_an_event():
    service = of_node(prePull={})
    result = '{"bytes": 16060522496, "path": "/mnt/slipway/models/models/x"}'
    some = planned(service, pulls=(pulling(service, "a", phase="Succeeded", result=result),))
    service = service.model_copy(update={"status": some.status})
    all_of_them = tuple(pulling(service, node.name, phase="Succeeded", result=result) for node in NODES)
    full = planned(service, pulls=all_of_them)

    assert cached(some)[:2] == ("False", "Caching")
    assert (some.status.model_cache.nodes_ready, some.status.model_cache.nodes_total) == (1, 3)
    assert cached(full) == ("True", "Cached", "3 of 3 nodes have image and model (14.96 GiB)")
    assert full.status.model_cache.bytes == 16060522496
    assert [event.reason.value for event in full.events if event.action == "Pull"] == ["ModelCached"]


def test_a_node_that_cannot_get_the_model_is_named_with_the_cause_while_it_tries_again():
    service = of_node(prePull={})
    said = "CredentialsInvalid: hf://org/model@main is refused with status 401: check the token"
    running = pulling(service, "b", phase="Running", exit_code=1, result=said)
    waiting = replace(running, waiting_reason="CrashLoopBackOff", waiting_message="back-off 10s")

    first, second = planned(service, pulls=(running,)), planned(service, pulls=(waiting,))

    assert cached(first)[:2] == ("False", "CachingFailed")
    assert "node b could not get the model: CredentialsInvalid" in cached(first)[2]
    assert cached(first) == cached(second), "one cause is one sentence, whatever the kubelet does meanwhile"
    assert [event.reason.value for event in first.events if event.action == "Pull"] == ["ModelDownloadFailed"]


def test_without_pulls_the_nodes_of_ready_replicas_have_the_model_and_keep_it_at_zero():
    service = of_node(replicas=2)
    service = promised(service, 2)
    one = a_pod(service=service).on("a").ready()
    other = a_pod(service=service).slot(1).on("b").loading()

    partly = plan(replace(seen(service, one, other), defaults=WITH_FOLDER), T0)
    zero = promised(edited(service, replicas=0), 0)
    kept = {"model_cache": partly.status.model_cache, "conditions": partly.status.conditions}
    zero = zero.model_copy(update={"status": zero.status.model_copy(update=kept)})
    none = plan(replace(seen(zero), defaults=WITH_FOLDER), T0)

    assert cached(partly) == ("False", "Caching", "1 of 2 nodes with replicas have the model")
    assert none.status.model_cache == partly.status.model_cache
    assert cached(none) == cached(partly)


@pytest.mark.parametrize("stuck", [{"deleted_at": T0}, {"unschedulable": "0/3 nodes are available"}])
def test_a_pod_that_gets_nowhere_does_not_keep_the_other_nodes_waiting(stuck: dict[str, Any]):
    service = of_node(prePull={"maxConcurrent": 1})

    made = planned(service, pulls=(pulling(service, "a", **stuck),))

    assert [pinned_to(pod) for pod in created(made)] == ["b"]


def test_a_refused_pod_that_pulls_is_told_by_its_condition_and_stalls_nothing():
    service = of_node(prePull={})
    (pod, *_) = created(planned(service))
    said = 'pods "x" is forbidden: exceeded quota: pods'
    refused = Failure(action=f"CreatePod {pod['metadata']['name']}", reason="Forbidden", message=said, at=T0)
    observed = replace(seen(service, failures=(refused,)), defaults=WITH_FOLDER, pulls=PullsSeen(nodes=NODES))

    made = plan(observed, T0)

    assert cached(made)[:2] == ("False", "CachingFailed")
    assert "exceeded quota" in cached(made)[2]
    assert find_condition(made.status.conditions, "Stalled") is None
    ready = find_condition(made.status.conditions, "Ready")
    assert ready is not None
    assert "exceeded quota" not in ready.message
    assert isinstance(made.actions[-1], CreatePod)
    assert names.LABEL_PRE_PULL in made.actions[-1].manifest["metadata"]["labels"], "after everything else"
