"""KubeAI's controller: built from its Go module, and run on a node of the local cluster with our runtime as its engine.

It needs a checkout of https://github.com/substratusai/kubeai: the folder in SLIPWAY_KUBEAI, else a clone of the commit
below. (The program cannot be had by `go install`: the module's main package is in `cmd`, and its CRD and its defaults
are in the checkout.)
"""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.packages import CACHE, NoProgramError
from e2e.cluster import pki
from e2e.cluster.build import alone, compile_with_progress
from e2e.cluster.components import IN_CLUSTER_URL, Service
from e2e.cluster.launch import Cluster
from e2e.cluster.namespaces import Program
from e2e.cluster.paths import SYSTEM_PATH, cache_folder
from e2e.cluster.toolchain import find_go
from slipway_api import names

REPOSITORY = "https://github.com/substratusai/kubeai"
COMMIT = "2f32ef498da629f96fd417ddfaaf22c28d40787e"  # of July 2025
SOURCE_VARIABLE = "SLIPWAY_KUBEAI"
NAMESPACE = "kubeai"
STATE = "kubeai-autoscaler-state"
PORT = 8000  # of its proxy; fixed in its code
PUBLISHED = {"kubeai": Service(NAMESPACE, "kubeai", PORT)}
WRITABLE = ("/tmp", names.CACHE_DIRECTORY, names.RUN_DIRECTORY)  # folders that our runtime writes to
PACKAGES = 1150  # about as many are compiled; only for the progress line

Json = dict[str, Any]


@dataclass(frozen=True)
class Autoscaling:
    """The two settings of KubeAI's autoscaler: how often it decides, and over how long it averages requests."""

    interval: str
    time_window: str


CHART_DEFAULTS = Autoscaling("10s", "10m")
FASTEST = Autoscaling("1s", "1s")  # every second, by the requests of that moment


def source() -> Path:
    """The checkout; raises NoProgramError where there is none and none can be cloned."""
    if given := os.environ.get(SOURCE_VARIABLE):
        return Path(given)
    folder = CACHE / f"kubeai-{COMMIT[:12]}"
    if not (folder / "go.mod").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for argv in (
            ["init", "-q"],
            ["fetch", "-q", "--depth=1", REPOSITORY, COMMIT],
            ["checkout", "-q", "FETCH_HEAD"],
        ):
            done = subprocess.run(["git", *argv], cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                raise NoProgramError(f"{SOURCE_VARIABLE} names no checkout of {REPOSITORY}, and: {done.stderr.strip()}")
    return folder


def program(folder: Path) -> Path:
    """The controller built from the checkout, once; where the cluster's namespaces can see it."""
    out = cache_folder() / "build" / f"kubeai-{COMMIT[:12]}"
    out.mkdir(parents=True, exist_ok=True)
    built, new = out / "kubeai", out / "kubeai.new"
    with alone(out):
        if not built.exists():
            flags = ["-trimpath", "-buildvcs=false", "-ldflags", "-s -w"]
            argv = [str(find_go(cache_folder())), "build", "-v", *flags, "-o", str(new), "./cmd"]
            compile_with_progress(argv, folder, PACKAGES)
            new.rename(built)
    return built


def configuration(autoscaling: Autoscaling, image: str, pod_patches: Sequence[Json]) -> Json:
    """Its system configuration: one engine image, one resource profile, and patches of the pods that it makes."""
    resources = {"cpu": "100m", "memory": "512Mi", "nvidia.com/gpu": "1"}
    return {
        "secretNames": {"alibaba": "none", "aws": "none", "gcp": "none", "huggingface": "none"},
        "modelServers": {"VLLM": {"images": {"default": image}}},
        "modelLoading": {"image": image},
        "modelServerPods": {"jsonPatches": list(pod_patches)},
        "resourceProfiles": {"gpu": {"requests": resources, "limits": {"nvidia.com/gpu": "1"}}},
        "modelAutoscaling": {
            "interval": autoscaling.interval,
            "timeWindow": autoscaling.time_window,
            "stateConfigMapName": STATE,
        },
        "fixedSelfMetricAddrs": ["127.0.0.1:8080"],  # it runs beside the kubelet, not in a pod with labels
    }


def engine_patches(arguments: Sequence[str]) -> list[Json]:
    """What makes the pod of its engine `VLLM` one of our runtime: the command line, and the probes of our operator."""
    server = "/spec/containers/0"
    ready = {"httpGet": {"path": names.PATH_READY, "port": names.ADMIN_PORT}, "periodSeconds": 1, "timeoutSeconds": 2}
    # With the digest of no token, the admin port, whose /ready the kubelet asks, listens on the pod's address.
    variables = {"OMP_NUM_THREADS": "1", "HOME": names.CACHE_DIRECTORY, names.ENV_ADMIN_TOKEN_SHA256: "0" * 64}
    environment = [{"name": name, "value": value} for name, value in variables.items()]
    folders = [{"name": f"own-{index}", "mountPath": path} for index, path in enumerate(WRITABLE)]
    return [
        {"op": "remove", "path": f"{server}/volumeMounts/0"},  # /dev/shm, which one GPU does not need
        {"op": "remove", "path": "/spec/volumes/0"},
        *({"op": "add", "path": "/spec/volumes/-", "value": {"name": one["name"], "emptyDir": {}}} for one in folders),
        *({"op": "add", "path": f"{server}/volumeMounts/-", "value": one} for one in folders),
        {"op": "remove", "path": f"{server}/command"},  # the image's own
        {"op": "replace", "path": f"{server}/args", "value": list(arguments)},
        {"op": "replace", "path": f"{server}/env", "value": environment},
        {"op": "replace", "path": f"{server}/startupProbe", "value": ready | {"failureThreshold": 600}},
        {"op": "replace", "path": f"{server}/readinessProbe", "value": ready | {"failureThreshold": 3}},
    ]


def model(name: str, *, most: int, target_requests: int) -> Json:
    """A Model between one and `most` replicas, each for so many requests at once."""
    return {
        "apiVersion": "kubeai.org/v1",
        "kind": "Model",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "url": "hf://slipway/tiny",  # never read: the patched command line names the model
            "engine": "VLLM",
            "features": ["TextGeneration"],
            "resourceProfile": "gpu:1",
            "minReplicas": 1,
            "maxReplicas": most,
            "targetRequests": target_requests,
        },
    }


def network(ip: str) -> list[Json]:
    """A Service without a selector, and the one address behind it: the node on which the controller runs."""
    port = {"name": "http", "port": PORT, "protocol": "TCP"}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "kubeai", "namespace": NAMESPACE},
            "spec": {"ports": [port]},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": "kubeai-1",
                "namespace": NAMESPACE,
                "labels": {"kubernetes.io/service-name": "kubeai"},
            },
            "addressType": "IPv4",
            "endpoints": [{"addresses": [ip], "conditions": {"ready": True}}],
            "ports": [port],
        },
    ]


def install(cluster: Cluster, folder: Path, node: str) -> None:
    """Its CRD, namespace, state and Service, as its chart makes them."""
    cluster.serve_kinds(folder / "manifests" / "crds")
    state = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": STATE, "namespace": NAMESPACE}}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    objects = [namespace, state, *network(cluster.nodes[node].ip)]
    cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))


@contextmanager
def running(cluster: Cluster, node: str, built: Path, config: Mapping[str, Any]) -> Iterator[None]:
    """The controller, in the network of the node; it ends with the block, and its state is emptied for the next one."""
    path, kubeconfig = cluster.folder / "kubeai.yaml", cluster.folder / "kubeai.kubeconfig"
    path.write_text(json.dumps(config))
    kubeconfig.write_text(pki.kubeconfig(cluster.folder / "pki", "admin", IN_CLUSTER_URL))
    environment = {
        "PATH": SYSTEM_PATH,
        "HOME": "/tmp",
        "KUBECONFIG": str(kubeconfig),
        "CONFIG_PATH": str(path),
        "POD_NAMESPACE": NAMESPACE,
    }
    with (cluster.logs / "kubeai.log").open("ab") as log:
        started = Program([*cluster.enter(node), str(built)], environment, log)
    try:
        yield
    finally:
        started.stop()
        cluster.kubectl("patch", "configmap", STATE, "-n", NAMESPACE, "--type=merge", "-p", '{"data": null}')
