"""The real API server takes the CRD, fills in defaults, explains it, and refuses what cannot work with a sentence."""

import copy
import json
from typing import Any

import pytest

from e2e.cluster.access import CommandError
from slipway_api.service_template import BLOCKS
from tests.api.manifests import NAMESPACE, a_manifest, apply, assert_refused, stored

pytestmark = pytest.mark.apiserver


@pytest.mark.capability("OP-3")
def test_the_kind_has_its_own_group_and_short_name(api):
    resources = api.kubectl("api-resources", "--api-group=slipway.dev", "--no-headers")
    (ours,) = (line for line in resources.splitlines() if "InferenceService" in line)
    names, short_name, version, *_ = ours.split()

    assert (names, short_name, version) == ("inferenceservices", "infsvc", "slipway.dev/v1alpha1")
    assert "isvc" not in resources.replace("infsvc", "")
    apply(api, a_manifest("listed"))
    assert "inferenceservice.slipway.dev/listed" in api.kubectl("get", "inference", "-n", NAMESPACE, "-o", "name")


@pytest.mark.capability("OP-3")
def test_kserves_kind_of_the_same_name_lives_beside_ours(api):
    """Same kind, same plural, its own short name: both are reachable by their full names."""
    kserve = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "inferenceservices.serving.kserve.io"},
        "spec": {
            "group": "serving.kserve.io",
            "scope": "Namespaced",
            "names": {
                "kind": "InferenceService",
                "plural": "inferenceservices",
                "singular": "inferenceservice",
                "shortNames": ["isvc"],
            },
            "versions": [
                {
                    "name": "v1beta1",
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
                }
            ],
        },
    }
    apply(api, a_manifest("beside"))
    api.kubectl("apply", "-f", "-", stdin=json.dumps(kserve))
    try:
        api.kubectl("wait", "--for=condition=Established", "crd/inferenceservices.serving.kserve.io", "--timeout=30s")
        theirs = json.loads(api.kubectl("get", "crd", "inferenceservices.serving.kserve.io", "-o", "json"))
        ours = json.loads(api.kubectl("get", "crd", "inferenceservices.slipway.dev", "-o", "json"))

        assert theirs["status"]["acceptedNames"]["shortNames"] == ["isvc"]
        assert ours["status"]["acceptedNames"]["shortNames"] == ["infsvc"]
        assert "/beside" in api.kubectl("get", "inferenceservices.slipway.dev", "-n", NAMESPACE, "-o", "name")
        assert api.kubectl("get", "inferenceservices.serving.kserve.io", "-n", NAMESPACE, "-o", "name") == ""
    finally:
        api.kubectl("delete", "crd", "inferenceservices.serving.kserve.io", "--wait=false")


def test_three_lines_are_enough_and_the_defaults_are_filled_in(api):
    apply(api, a_manifest("defaults"))
    spec = stored(api, "defaults")["spec"]

    assert spec["runtime"]["maxNumSeqs"] == 64
    assert spec["runtime"]["maxNumBatchedTokens"] == 2048
    assert spec["runtime"]["blockSize"] == 16
    assert spec["runtime"]["kvCache"] == {"gpuMemoryUtilization": "0.85", "dtype": "auto"}
    assert spec["routing"] == {"strategy": "PrefixCache", "requestTimeoutSeconds": 600}
    assert spec["model"]["samplingDefaults"] == {"maxTokens": 1024}
    assert spec.keys().isdisjoint({"replicas", *BLOCKS}), "a block that is not written may be inherited"


def test_a_block_that_is_written_gets_the_defaults_of_its_fields(api):
    apply(api, a_manifest("blocks", drain={"timeoutSeconds": 30}, resources={}, rollout={}))
    spec = stored(api, "blocks")["spec"]

    assert spec["drain"] == {"timeoutSeconds": 30, "endpointPropagationSeconds": 5, "handover": True}
    assert spec["resources"]["gpu"] == {"count": 1, "resourceName": "nvidia.com/gpu"}
    assert spec["rollout"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0, "minReadySeconds": 0}


def test_one_field_of_a_struct_keeps_the_defaults_of_the_others(api):
    apply(api, a_manifest("partly", autoscaling={"maxReplicas": 3, "behavior": {"scaleDown": {"maxPods": 2}}}))
    autoscaling = stored(api, "partly")["spec"]["autoscaling"]

    assert autoscaling["mode"] == "Active"
    assert autoscaling["minReplicas"] == 1
    assert autoscaling["metrics"] == [
        {"type": "KVCacheUtilization", "target": "0.80"},
        {"type": "QueueDepth", "target": "2"},
    ]
    assert autoscaling["behavior"]["scaleDown"] == {
        "maxPods": 2,
        "periodSeconds": 60,
        "stabilizationWindowSeconds": 300,
        "tolerance": "0.10",
    }
    assert autoscaling["behavior"]["scaleUp"]["stabilizationWindowSeconds"] == 0
    assert autoscaling["missingMetrics"]["policy"] == "Conservative"


@pytest.mark.capability("OP-1")
@pytest.mark.parametrize("options", [(), ("--server-side",)], ids=["client-side", "server-side"])
def test_applying_the_same_manifest_again_changes_nothing(api, options):
    name = f"again-{len(options)}"
    manifest = a_manifest(name, autoscaling={"maxReplicas": 3}, runtime={"env": [{"name": "A", "value": "1"}]})
    apply(api, manifest, *options)
    # As after the operator's first pass: until then a server-side apply stores the default of status, once.
    seen = json.dumps({"status": {"observedGeneration": 1}})
    api.kubectl("patch", "infsvc", name, "-n", NAMESPACE, "--subresource=status", "--type=merge", "-p", seen)
    before = stored(api, name)["metadata"]

    apply(api, manifest, *options)

    after = stored(api, name)["metadata"]
    assert (after["generation"], after["resourceVersion"]) == (before["generation"], before["resourceVersion"])


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("", "one OpenAI-compatible endpoint"),
        (".spec.model.uri", "hf://organisation/model@revision"),
        (".spec.autoscaling.mode", "External"),
        (".spec.drain.timeoutSeconds", "then streams are handed over"),
        (".spec.template.spec.containers.resources", "non-GPU"),
        (".status.desiredReplicas", "across restarts of the operator"),
    ],
)
def test_kubectl_explains_every_field(api, field, words):
    text = " ".join(api.kubectl("explain", f"infsvc{field}").split())

    assert words in text


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # what is wrong, the spec, the sentence
    ("both replicas and autoscaling", {"replicas": 2, "autoscaling": {"maxReplicas": 3}}, "replicas must be absent"),
    ("min above max", {"autoscaling": {"minReplicas": 5, "maxReplicas": 3}}, "must not exceed maxReplicas"),
    ("no max", {"autoscaling": {"minReplicas": 1}}, "spec.autoscaling.maxReplicas: Required value"),
    ("no metrics", {"autoscaling": {"maxReplicas": 3, "metrics": []}}, "need at least one metric"),
    ("unknown mode", {"autoscaling": {"maxReplicas": 3, "mode": "Off"}}, 'supported values: "Active", "Advisory"'),
    (
        "CPU as a metric",
        {"autoscaling": {"maxReplicas": 3, "metrics": [{"type": "CPUUtilization", "target": "0.5"}]}},
        'supported values: "KVCacheUtilization", "QueueDepth"',
    ),
    (
        "the same metric twice",
        {"autoscaling": {"maxReplicas": 3, "metrics": [{"type": "QueueDepth", "target": "1"}] * 2}},
        "Duplicate value",
    ),
    (
        "a share in percent",
        {"autoscaling": {"maxReplicas": 3, "metrics": [{"type": "KVCacheUtilization", "target": "80"}]}},
        'a share of the cache, such as "0.80"',
    ),
    (
        "a target of zero",
        {"autoscaling": {"maxReplicas": 3, "metrics": [{"type": "QueueDepth", "target": "0"}]}},
        "target must be above 0",
    ),
    (
        "a target that is no number",
        {"autoscaling": {"maxReplicas": 3, "metrics": [{"type": "QueueDepth", "target": "two"}]}},
        "should match",
    ),
    ("another scheme", {"model": {"uri": "ftp://files/model"}}, "uri must be hf://"),
    ("no organisation", {"model": {"uri": "hf://model"}}, "uri must be hf://"),
    ("a relative path", {"model": {"uri": "file://models/tiny"}}, "file:///absolute/path"),
    ("a path upwards", {"model": {"uri": "file:///opt/../etc/passwd"}}, "uri must be hf://"),
    ("no model", {"model": {}}, "spec.model.uri: Required value"),
    ("a weak digest", {"model": {"uri": "hf://a/b", "digest": "md5:abc"}}, "digest must be sha256: and 64 hex digits"),
    (
        "a top-p above one",
        {"model": {"uri": "hf://a/b", "samplingDefaults": {"topP": "1.5"}}},
        "topP must be above 0 and at most 1",
    ),
    (
        "fewer tokens than sequences",
        {"runtime": {"maxNumSeqs": 64, "maxNumBatchedTokens": 32}},
        "maxNumBatchedTokens must be at least maxNumSeqs",
    ),
    ("an odd block size", {"runtime": {"blockSize": 24}}, "blockSize must be 8, 16, 32, 64 or 128"),
    (
        "an answer longer than the context",
        {"runtime": {"maxModelLen": 1024, "maxOutputTokens": 1024}},
        "maxOutputTokens must be below maxModelLen",
    ),
    (
        "more ranks than a node has GPUs",
        {"runtime": {"tensorParallelSize": 17}, "resources": {"gpu": {"count": 0}}},
        "tensorParallelSize in body should be less than or equal to 16",
    ),
    (
        "key-value heads that GPUs cannot divide",
        {
            "model": {
                "uri": "hf://org/m@1",
                "shape": {"layers": 2, "hiddenSize": 64, "heads": 6, "kvHeads": 3, "headDim": 8, "parameters": 9},
            },
            "runtime": {"tensorParallelSize": 2},
            "resources": {"gpu": {"count": 2}},
        },
        "tensorParallelSize must divide model.shape.heads, and divide model.shape.kvHeads or be a multiple",
    ),
    (
        "heads that do not share key-value heads evenly",
        {
            "model": {
                "uri": "hf://org/m@1",
                "shape": {"layers": 2, "hiddenSize": 64, "heads": 4, "kvHeads": 3, "parameters": 9},
            }
        },
        "heads must be a multiple of kvHeads",
    ),
    (
        "a shape without the size of a head",
        {
            "model": {
                "uri": "hf://org/m@1",
                "shape": {"layers": 2, "hiddenSize": 65, "heads": 4, "kvHeads": 2, "parameters": 9},
            }
        },
        "headDim is needed",
    ),
    ("a profile that there is not", {"profile": "games"}, 'Unsupported value: "games"'),
    ("GPUs that nothing would use", {"resources": {"gpu": {"count": 2}}}, "must be 0 (CPU) or equal runtime"),
    (
        "GPUs as an extended resource of the container",
        {"resources": {"limits": {"nvidia.com/gpu": 1}}},
        "request GPUs in spec.resources.gpu",
    ),
    (
        "a request above its limit",
        {"resources": {"requests": {"cpu": 2}, "limits": {"cpu": "1500m"}}},
        "a request may not exceed its limit",
    ),
    ("a quantity that is none", {"resources": {"limits": {"memory": "64mb"}}}, "should match"),
    ("a pool that is no quantity", {"runtime": {"kvCache": {"bytes": "64mb"}}}, "such as 64Mi or 2Gi"),
    (
        "the operator's own environment",
        {"runtime": {"env": [{"name": "SLIPWAY_ADMIN_TOKEN_SHA256", "value": "x"}]}},
        "are set by Slipway",
    ),
    ("no replicas to update", {"rollout": {"rollingUpdate": {"maxSurge": 0}}}, "must not both be 0"),
    ("a strategy that does not exist", {"rollout": {"strategy": "Shadow"}}, 'supported values: "RollingUpdate"'),
    ("a drain without a limit", {"drain": {"timeoutSeconds": 3601}}, "less than or equal to 3600"),
    ("a drain shorter than its first step", {"drain": {"timeoutSeconds": 5}}, "must be below timeoutSeconds"),
    ("a field that does not exist", {"engine": "other"}, 'unknown field "spec.engine"'),
    (
        "the operator's own labels",
        {"template": {"metadata": {"labels": {"slipway.dev/state": "serving"}}}},
        "are set by Slipway",
    ),
    ("the host's network", {"template": {"spec": {"hostNetwork": True}}}, "refused: hostNetwork;"),
    ("another container", {"template": {"spec": {"containers": [{"name": "evil"}]}}}, "the only container is named"),
    (
        "another command",
        {"template": {"spec": {"containers": [{"name": "server", "command": ["sh"]}]}}},
        "refused: command;",
    ),
    (
        "a container before ours",
        {"template": {"spec": {"initContainers": [{"name": "evil", "image": "evil"}]}}},
        "refused: initContainers;",
    ),
    (
        "privileges for the container",
        {"template": {"spec": {"containers": [{"name": "server", "securityContext": {"privileged": True}}]}}},
        "refused: securityContext;",
    ),
    ("root", {"template": {"spec": {"securityContext": {"runAsUser": 0}}}}, "greater than or equal to 1"),
    ("perhaps root", {"template": {"spec": {"securityContext": {"runAsNonRoot": False}}}}, "may only be true"),
    ("a node by name", {"template": {"spec": {"nodeName": "node-a"}}}, "refused: nodeName;"),
]


@pytest.mark.capability("BS-3")
@pytest.mark.parametrize(("spec", "sentence"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_cannot_work_is_refused_with_one_sentence(api, spec, sentence):
    assert_refused(api, a_manifest("bad", **spec), sentence)


def projected(source: dict[str, Any]) -> dict[str, Any]:
    volume = {"name": "identity", "projected": {"sources": [{"configMap": {"name": "x"}}, source]}}
    return a_manifest("projected", template={"spec": {"volumes": [volume]}})


@pytest.mark.capability("SE-3")
@pytest.mark.parametrize(
    "source",
    [
        {"serviceAccountToken": {"path": "token"}},
        {"podCertificate": {"signerName": "example.org/x", "keyType": "ED25519"}},
        {"secret": {"name": "x"}, "serviceAccountToken": {}},
    ],
)
def test_a_projected_volume_may_not_bring_the_pods_identity(api, source):
    """Security finding: a template mounted the token of the pod's ServiceAccount by a projected volume."""
    assert_refused(api, projected(source), "may not hold a serviceAccountToken or a podCertificate")


def test_the_other_sources_of_a_projected_volume_are_kept_as_they_are(api):
    source = {"secret": {"name": "x", "items": [{"key": "k", "path": "p"}], "optional": True}}
    apply(api, projected(source))

    (volume,) = stored(api, "projected")["spec"]["template"]["spec"]["volumes"]
    assert volume["projected"]["sources"] == [{"configMap": {"name": "x"}}, source]


def test_a_volume_on_the_host_is_refused_even_by_a_client_that_does_not_check(api):
    """An undeclared field is dropped before validation: the volume must not quietly become an empty one."""
    manifest = a_manifest("bad", template={"spec": {"volumes": [{"name": "root", "hostPath": {"path": "/"}}]}})

    with pytest.raises(CommandError, match="a volume must be exactly one of configMap"):
        apply(api, manifest, "--validate=false")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("a" * 41, "at most 40 characters"), ("chat.v2", "lower-case letters, digits and '-'")],
)
def test_a_name_that_its_children_cannot_bear_is_refused(api, name, sentence):
    with pytest.raises(CommandError, match=sentence):
        apply(api, a_manifest(name))


@pytest.mark.capability("BS-3")
def test_what_can_work_is_accepted(api):
    """Every field once, so that no rule refuses what it should not and the cost of all rules fits."""
    everything = a_manifest(
        "everything",
        model={
            "uri": "file:///opt/slipway/models/tiny",
            "servedName": "org/tiny:1",
            "digest": "sha256:" + "0" * 64,
            "tokenizer": {"uri": "hf://org/tokenizer", "sha256": "0" * 64},
            "chatTemplate": "{{ messages }}",
            "samplingDefaults": {"temperature": "0.7", "topP": "0.9", "topK": 40, "minP": "0", "maxTokens": 64},
        },
        runtime={
            "image": "slipway/runtime:0.1.0",
            "args": ["--foo"],
            "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}],
            "dtype": "fp32",
            "maxModelLen": 512,
            "maxNumSeqs": 8,
            "maxNumBatchedTokens": 64,
            "blockSize": 32,
            "maxOutputTokens": 128,
            "kvCache": {"bytes": "8Mi", "gpuMemoryUtilization": "1"},
            "startupTimeoutSeconds": 60,
        },
        resources={
            "gpu": {"count": 0, "resourceName": "amd.com/gpu", "product": "H100"},
            "requests": {"cpu": "100m", "memory": 1000},
            "limits": {"cpu": 1, "memory": "2Gi", "ephemeral-storage": "1e9"},
        },
        template={
            "metadata": {"labels": {"team": "a"}, "annotations": {"example.com/x": "y"}},
            "spec": {
                "nodeSelector": {"kubernetes.io/arch": "amd64"},
                "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {}}},
                "tolerations": [{"key": "gpu", "operator": "Exists"}, {"key": "gpu", "operator": "Exists"}],
                "topologySpreadConstraints": [
                    {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
                ],
                "priorityClassName": "high",
                "runtimeClassName": "nvidia",
                "schedulerName": "default-scheduler",
                "imagePullSecrets": [{"name": "registry"}],
                "securityContext": {"runAsUser": 1000, "runAsNonRoot": True, "supplementalGroups": [1, 2]},
                "containers": [
                    {
                        "name": "server",
                        "resources": {"limits": {"hugepages-2Mi": "2Mi"}},
                        "env": [{"name": "A", "value": "b"}],
                        "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
                    }
                ],
                "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
            },
        },
        autoscaling={
            "mode": "Active",
            "minReplicas": 1,
            "maxReplicas": 1000,
            "metrics": [{"type": "KVCacheUtilization", "target": "0.7"}],
            "behavior": {"scaleUp": {"tolerance": "0"}},
            "missingMetrics": {"fallbackReplicas": 3},
        },
        rollout={"strategy": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        drain={"timeoutSeconds": 3600, "endpointPropagationSeconds": 0},
    )
    given = copy.deepcopy(everything["spec"])

    apply(api, everything)

    kept = stored(api, "everything")["spec"]
    assert given["template"] == kept["template"]
    assert given["model"] | {"cache": {"policy": "None"}} == kept["model"]
    assert given["resources"] == kept["resources"]


def test_scale_works_where_something_else_decides(api):
    apply(api, a_manifest("scaled", replicas=1, autoscaling={"mode": "External", "maxReplicas": 5}))

    api.kubectl("scale", "infsvc", "scaled", "-n", NAMESPACE, "--replicas=4")

    assert stored(api, "scaled")["spec"]["replicas"] == 4
    scale = json.loads(api.kubectl("get", "infsvc", "scaled", "-n", NAMESPACE, "--subresource=scale", "-o", "json"))
    assert scale["spec"]["replicas"] == 4


def test_status_is_shown_where_people_look(api):
    apply(api, a_manifest("shown", replicas=2))
    status = {
        "observedGeneration": 1,
        "servedName": "shown",
        "url": "http://gateway/v1",
        "replicas": 2,
        "readyReplicas": 1,
        "desiredReplicas": 2,
        "selector": "slipway.dev/service=shown",
        "conditions": [
            {
                "type": "Ready",
                "status": "True",
                "reason": "Degraded",
                "message": "1 of 2",
                "observedGeneration": 1,
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
        ],
    }
    patch = json.dumps({"status": status})
    api.kubectl("patch", "infsvc", "shown", "-n", NAMESPACE, "--subresource=status", "--type=merge", "-p", patch)

    heading, row = api.kubectl("get", "infsvc", "shown", "-n", NAMESPACE).splitlines()

    assert heading.split() == [
        "NAME",
        "MODEL",
        "READY",
        "STATUS",
        "STALLED",
        "REPLICAS",
        "DESIRED",
        "CANARY%",
        "ADAPTERS",
        "AGE",
    ]
    assert row.split()[:6] == ["shown", "shown", "True", "Degraded", "1", "2"]
    api.kubectl("wait", "infsvc/shown", "-n", NAMESPACE, "--for=condition=Ready", "--timeout=5s")
    scale = json.loads(api.kubectl("get", "infsvc", "shown", "-n", NAMESPACE, "--subresource=scale", "-o", "json"))
    assert scale["status"] == {"replicas": 2, "selector": "slipway.dev/service=shown"}
