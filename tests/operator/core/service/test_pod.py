"""The pod of a replica: its shape, its command line, what a user may change about it."""

import json

import pytest

from slipway_operator.core.installation import NONROOT, PlacementDefaults
from slipway_operator.core.service.replicas.access import PortAccess
from slipway_operator.core.service.replicas.pod import build_pod
from slipway_operator.core.service.rollout.revision import Revision
from tests.builders import UID, a_service

REVISION = Revision("bcdfghjklm", "slipway/runtime:1")
ACCESS = PortAccess(nonce="d00d", admin_digests=("aa", "bb"))


def pod_of(service, slot=0, attempt=0):
    return build_pod(
        service, REVISION, slot=slot, attempt=attempt, access=ACCESS, user=NONROOT, placement=PlacementDefaults()
    )


def server_of(service):
    return pod_of(service)["spec"]["containers"][0]


def env_of(service):
    return {entry["name"]: entry for entry in server_of(service)["env"]}


@pytest.mark.capability("OP-2")
def test_is_a_plain_pod_with_a_telling_name_labels_and_its_owner():
    pod = pod_of(a_service(), slot=2, attempt=1)

    assert (pod["apiVersion"], pod["kind"]) == ("v1", "Pod")
    assert pod["metadata"]["name"] == "chat-bcdfg-2-1"
    assert pod["metadata"]["labels"] == {
        "app.kubernetes.io/managed-by": "slipway",
        "app.kubernetes.io/name": "chat",
        "slipway.dev/service": "chat",
        "slipway.dev/revision": "bcdfghjklm",
        "slipway.dev/slot": "2",
        "slipway.dev/attempt": "1",
        "slipway.dev/state": "serving",
        "app.kubernetes.io/instance": "chat",
        "app.kubernetes.io/component": "inference-server",
        "app.kubernetes.io/part-of": "slipway",
        "llm-d.ai/engine-type": "vllm",
    }
    (owner,) = pod["metadata"]["ownerReferences"]
    assert owner == {
        "apiVersion": "slipway.dev/v1alpha1",
        "kind": "InferenceService",
        "name": "chat",
        "uid": UID,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def test_the_template_may_replace_the_labels_for_dashboards_and_pickers_and_no_other():
    own = {"app.kubernetes.io/part-of": "shop", "llm-d.ai/engine-type": "other", "llm-d.ai/role": "decode"}

    labels = pod_of(a_service(template={"metadata": {"labels": own}}))["metadata"]["labels"]

    assert labels | own == labels
    assert labels["app.kubernetes.io/instance"] == "chat"


def test_command_line_says_what_the_spec_says_and_leaves_out_what_is_empty():
    service = a_service(
        uri="hf://org/model@abc",
        model={"servedName": "my-model", "samplingDefaults": {"temperature": "0.7", "topK": 40}},
        runtime={"maxModelLen": 4096, "kvCache": {"bytes": "64Mi"}, "args": ["--verbose"], "dtype": "bf16"},
        drain={"timeoutSeconds": 120},
    )

    args = server_of(service)["args"]

    assert args[:2] == ["serve", "hf://org/model@abc"]
    assert args[-1] == "--verbose"
    flags = dict(zip(args[2:-1:2], args[3:-1:2], strict=True))
    assert flags == {
        "--served-name": "my-model",
        "--revision": "bcdfghjklm",
        "--port": "8000",
        "--admin-port": "8001",
        "--dtype": "bf16",
        "--max-model-len": "4096",
        "--max-num-seqs": "64",
        "--max-num-batched-tokens": "2048",
        "--block-size": "16",
        "--kv-cache-bytes": "64Mi",
        "--gpu-memory-utilization": "0.85",
        "--sampling-defaults": flags["--sampling-defaults"],
        "--drain-timeout": "120",
    }
    assert json.loads(flags["--sampling-defaults"]) == {"temperature": 0.7, "top_k": 40, "max_tokens": 1024}


def test_kubelet_does_not_expand_dollars_of_a_chat_template():
    args = server_of(a_service(model={"chatTemplate": "$(POD_NAME) costs $5"}))["args"]

    assert args[args.index("--chat-template") + 1] == "$$(POD_NAME) costs $$5"


@pytest.mark.capability("RD-3", "ST-3")
def test_startup_readiness_and_liveness_are_three_different_questions():
    server = server_of(a_service(runtime={"startupTimeoutSeconds": 900}))

    startup, readiness, liveness = (server[kind] for kind in ("startupProbe", "readinessProbe", "livenessProbe"))
    assert readiness["httpGet"] == {"path": "/ready", "port": "admin"}
    assert startup["httpGet"] == {"path": "/ready?waitSeconds=0.9", "port": "admin"}
    assert liveness["httpGet"] == {"path": "/health", "port": "admin"}
    assert startup["periodSeconds"] * startup["failureThreshold"] == 900
    assert readiness["periodSeconds"] * readiness["failureThreshold"] <= 5
    assert server["lifecycle"]["preStop"]["exec"]["command"] == ["slipway-runtime", "drain"]


@pytest.mark.capability("RD-9")
@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe"])
def test_a_container_that_failed_is_restarted_without_the_grace_of_a_drain(probe: str):
    """ADR 81: a hung server would stay for the hour that its streams may take to drain."""
    server = server_of(a_service(drain={"timeoutSeconds": 3600}))

    assert server[probe]["terminationGracePeriodSeconds"] == 30


def test_grace_covers_the_whole_drain():
    assert pod_of(a_service(drain={"timeoutSeconds": 600}))["spec"]["terminationGracePeriodSeconds"] == 630


@pytest.mark.capability("SE-3")
def test_fulfils_pod_security_restricted_and_can_write_only_where_it_has_to():
    spec = pod_of(a_service())["spec"]
    server = spec["containers"][0]

    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == 65532
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert server["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
    }
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert {mount["mountPath"] for mount in server["volumeMounts"]} == {"/tmp", "/run/slipway", "/var/cache/slipway"}
    assert all("emptyDir" in volume for volume in spec["volumes"])


@pytest.mark.capability("SE-3")
def test_holds_only_digests_of_its_admin_tokens_and_no_user_may_replace_them():
    service = a_service(
        runtime={"env": [{"name": "SLIPWAY_ADMIN_TOKEN_SHA256", "value": "mine"}, {"name": "A", "value": "1"}]},
        template={"spec": {"containers": [{"name": "server", "env": [{"name": "A", "value": "2"}]}]}},
    )

    env = env_of(service)
    assert env["SLIPWAY_ADMIN_TOKEN_SHA256"]["value"] == "aa,bb"
    assert env["A"]["value"] == "2"


def test_threads_follow_the_cpu_limit_unless_the_user_says_otherwise():
    assert env_of(a_service())["OMP_NUM_THREADS"]["valueFrom"]["resourceFieldRef"]["resource"] == "limits.cpu"

    named = a_service(runtime={"env": [{"name": "OMP_NUM_THREADS", "value": "4"}]})
    assert env_of(named)["OMP_NUM_THREADS"] == {"name": "OMP_NUM_THREADS", "value": "4"}


def test_compiled_kernels_and_whatever_wants_a_home_go_where_the_pod_may_write():
    """Kernels finding 2: with a read-only root, Triton had nowhere to keep what it compiles."""
    env, server = env_of(a_service()), server_of(a_service())

    assert env["TRITON_CACHE_DIR"]["value"] == "/var/cache/slipway/triton"
    assert env["HOME"]["value"] == "/var/cache/slipway"
    assert {"name": "cache", "mountPath": "/var/cache/slipway"} in server["volumeMounts"]

    named = a_service(runtime={"env": [{"name": "TRITON_CACHE_DIR", "value": "/models/triton"}]})
    assert env_of(named)["TRITON_CACHE_DIR"]["value"] == "/models/triton"


def test_a_replica_without_gpus_sees_none_of_its_node():
    assert env_of(a_service(resources={"gpu": {"count": 0}}))["NVIDIA_VISIBLE_DEVICES"]["value"] == "void"
    assert "NVIDIA_VISIBLE_DEVICES" not in env_of(a_service(resources={"gpu": {"count": 1}}))


@pytest.mark.capability("DD-1")
def test_a_replica_is_one_pod_with_its_own_gpus_spread_over_nodes():
    service = a_service(
        resources={
            "gpu": {"count": 1, "product": "NVIDIA-H100-80GB-HBM3"},
            "requests": {"cpu": "4", "memory": "16Gi"},
            "limits": {"memory": "16Gi"},
        }
    )

    spec = pod_of(service)["spec"]
    assert spec["containers"][0]["resources"] == {
        "requests": {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "1"},
        "limits": {"memory": "16Gi", "nvidia.com/gpu": "1"},
    }
    assert spec["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    (spread,) = spec["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway"


def test_without_gpus_the_pod_asks_for_none():
    service = a_service(resources={"gpu": {"count": 0, "product": "x"}, "limits": {"cpu": "1"}})

    spec = pod_of(service)["spec"]
    assert spec["containers"][0]["resources"] == {"limits": {"cpu": "1"}}
    assert "nodeSelector" not in spec


def test_merges_the_users_overlay_by_name():
    service = a_service(
        template={
            "metadata": {"labels": {"team": "search"}, "annotations": {"note": "x"}},
            "spec": {
                "nodeSelector": {"zone": "a"},
                "tolerations": [{"key": "gpu", "operator": "Exists"}],
                "topologySpreadConstraints": [
                    {"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
                ],
                "priorityClassName": "high",
                "imagePullSecrets": [{"name": "registry"}],
                "securityContext": {"runAsUser": 1000},
                "containers": [
                    {
                        "name": "server",
                        "resources": {"limits": {"memory": "1Gi"}},
                        "volumeMounts": [{"name": "models", "mountPath": "/models"}],
                    }
                ],
                "volumes": [
                    {"name": "models", "persistentVolumeClaim": {"claimName": "models"}},
                    {"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}},
                ],
            },
        }
    )

    pod = pod_of(service)
    spec = pod["spec"]
    assert pod["metadata"]["labels"]["team"] == "search"
    assert pod["metadata"]["annotations"] == {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
        "note": "x",
        "slipway.dev/replica": f"{REVISION.hash}-0-0",
        "slipway.dev/served-name": "chat",
        "slipway.dev/admin-nonce": "d00d",
    }
    assert spec["nodeSelector"] == {"zone": "a"}
    assert spec["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert [one["topologyKey"] for one in spec["topologySpreadConstraints"]] == ["kubernetes.io/hostname", "zone"]
    assert (spec["priorityClassName"], spec["imagePullSecrets"]) == ("high", [{"name": "registry"}])
    assert spec["securityContext"]["runAsUser"] == 1000
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["containers"][0]["resources"]["limits"] == {"memory": "1Gi", "nvidia.com/gpu": "1"}
    assert {"name": "models", "mountPath": "/models"} in spec["containers"][0]["volumeMounts"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert set(volumes) == {"tmp", "run", "cache", "models"}
    assert "persistentVolumeClaim" in volumes["cache"]
