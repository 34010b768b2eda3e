"""Benchmark of the local cluster: time to a control plane, two Ready nodes, an installed Slipway, a Ready service."""

import time
from collections.abc import Callable

from bench.figures import Figure, Section
from e2e.cluster.launch import GATEWAY, Cluster
from e2e.cluster.paths import cluster_folder
from e2e.slipway import EXAMPLES, Slipway

SERVICE = "chat"


def measure() -> Section:
    """All figures of the cluster, which is started for them and removed afterwards."""
    started = time.monotonic()
    with Cluster(folder=cluster_folder("bench"), publish=GATEWAY) as cluster:
        control_plane = time.monotonic() - started
        nodes = _seconds(cluster.wait_for_nodes)
        slipway = Slipway(cluster)
        install = _seconds(slipway.install)
        applied = time.monotonic()
        slipway.apply(EXAMPLES / "chat.yaml")
        slipway.wait_ready(SERVICE)
        ready = time.monotonic() - applied
        first_token = _seconds(lambda: _first_token(slipway))
        again = _seconds(lambda: _first_token(slipway))
        gone = _seconds(lambda: slipway.delete(SERVICE))
    return Section(
        "Cluster: from nothing to tokens",
        (
            Figure("control plane answers /readyz", control_plane, "s", "etcd, API server, scheduler, controllers"),
            Figure("two nodes Ready, after that", nodes, "s", "real kubelets, 8 fake GPUs each"),
            Figure("helm install --wait", install, "s", "CRDs, two operators, gateways"),
            Figure("apply → Ready", ready, "s", "examples/chat.yaml, the image is present"),
            Figure("first request: first token", first_token, "s", "through the gateway, by the openai client"),
            Figure("second request: first token", again, "s"),
            Figure("delete → gone", gone, "s", "drained, no pod left"),
        ),
    )


def _first_token(slipway: Slipway) -> None:
    stream = slipway.openai().chat.completions.create(
        model=SERVICE, messages=[{"role": "user", "content": "Tell me a story."}], max_tokens=16, stream=True
    )
    with stream:
        next(part for part in stream if part.choices and part.choices[0].delta.content)


def _seconds(action: Callable[[], object]) -> float:
    started = time.monotonic()
    action()
    return time.monotonic() - started
