"""The user and the group of pods: of the installation, of the user's template, or of the platform."""

from dataclasses import replace

import pytest
from pydantic import ValidationError

from slipway_operator.core.actions import CreatePod
from slipway_operator.core.installation import NONROOT, PodUser
from slipway_operator.core.pulls import PullNode, PullsSeen
from slipway_operator.core.service.plan import plan
from slipway_operator.settings import OperatorSettings
from tests.builders import DEFAULTS, T0, a_service, promised, seen

STRICTER = {"spec": {"securityContext": {"runAsUser": 2000}}}


NODE = PullNode(name="a", allocatable={"nvidia.com/gpu": "8"})


def pods_of(user, **spec):
    """The pods of the first pass: a replica, and one that pulls if the spec has prePull."""
    service = promised(a_service(**spec), 1)
    pulls = PullsSeen(nodes=(NODE,)) if "prePull" in spec else None
    observed = replace(seen(service), defaults=replace(DEFAULTS, pod_user=user), pulls=pulls)
    return [one.manifest for one in plan(observed, T0).actions if isinstance(one, CreatePod)]


def context_of(user, **spec):
    (pod,) = pods_of(user, **spec)
    return pod["spec"]["securityContext"]


@pytest.mark.capability("PL-3")
@pytest.mark.parametrize(
    ("user", "spec", "expected"),
    [
        (NONROOT, {}, {"runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532}),
        (PodUser(1000720000, 0), {}, {"runAsUser": 1000720000, "runAsGroup": 0, "fsGroup": 0}),
        (None, {}, {}),
        (None, {"template": STRICTER}, {"runAsUser": 2000}),
        (NONROOT, {"template": STRICTER}, {"runAsUser": 2000, "runAsGroup": 65532, "fsGroup": 65532}),
    ],
    ids=["the default", "numbers of the installation", "the platform's", "the platform's and the user's", "the user's"],
)
def test_pods_of_replicas_run_as(user, spec, expected):
    always = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}

    assert context_of(user, **spec) == always | expected


@pytest.mark.capability("PL-3")
@pytest.mark.parametrize("user", [NONROOT, PodUser(1000720000, 0), None])
def test_a_pod_that_pulls_runs_as_the_user_of_the_replicas(user):
    """review/shipping.md 7: it ran as 65532 everywhere, so OpenShift refused it."""
    contexts = [pod["spec"]["securityContext"] for pod in pods_of(user, prePull={})]

    assert len(contexts) == 2
    assert contexts[0] == contexts[1]
    assert contexts[0].get("runAsUser") == (user.user if user else None)


def visible_gpus(pod):
    (server,) = pod["spec"]["containers"]
    has_gpu = "nvidia.com/gpu" in server.get("resources", {}).get("limits", {})
    values = [one.get("value") for one in server["env"] if one["name"] == "NVIDIA_VISIBLE_DEVICES"]
    return has_gpu, values


@pytest.mark.parametrize("count", [0, 1, 4])
@pytest.mark.parametrize("variable", [None, "all"])
def test_a_pod_without_a_gpu_resource_sees_no_gpu_whatever_the_spec_asks_for(count, variable):
    """review/shipping.md 8: a pod that pulled for a GPU service saw all GPUs of its node."""
    env = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": variable}] if variable else []
    pods = pods_of(NONROOT, prePull={}, resources={"gpu": {"count": count}}, runtime={"env": env})
    found = [visible_gpus(pod) for pod in pods]

    assert len(found) == 2
    assert (False, ["void"]) in found, "the one that pulls"
    for has_gpu, values in found:
        assert values == ([variable] if variable else []) if has_gpu else values == ["void"]


@pytest.mark.parametrize("text", ["root", "0:0", "1000", "1000:", "1000:x", ":1000"])
def test_a_user_that_is_none_is_refused_at_the_start(text):
    with pytest.raises(ValidationError):
        OperatorSettings(pod_user=text)
