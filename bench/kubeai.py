"""Benchmark of scale-out against KubeAI's controller: from the start of a load to the second pod, on the same cluster.

Both run our runtime with the same arguments, at one replica, and get the same load through their own proxy. KubeAI is
measured twice: with the defaults of its chart, and with its two settings as fast as seconds allow.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import openai

from bench import kubeai_controller
from bench.figures import Figure, Section
from bench.kubeai_controller import CHART_DEFAULTS, FASTEST, NAMESPACE, PUBLISHED, Autoscaling
from bench.packages import NoProgramError
from bench.plan import LoadPlan
from e2e.cluster.launch import GATEWAY, Cluster
from e2e.cluster.paths import cluster_folder
from e2e.manifests import as_yaml, chat
from e2e.slipway import Load, NotInTimeError, Slipway, wait_for

NAME, NODE, MOST = "chat", "node-a", 3
USERS = 24  # one replica computes 16 sequences at once, and its cache holds fewer
TARGET_REQUESTS = 8  # of KubeAI, for one replica; its own default, 100, is above this load
PATIENCE = 360.0  # seconds for a second pod
ENGINE = [
    "serve", "file:///opt/slipway/models/tiny", "--served-name", NAME, "--dtype", "fp32", "--max-model-len", "512",
    "--max-num-seqs", "16", "--max-num-batched-tokens", "512", "--kv-cache-bytes", "6Mi",
    "--sampling-defaults", '{"temperature": 0.7, "max_tokens": 128}',
]  # fmt: skip


@dataclass(frozen=True)
class Reaction:
    """Seconds from the start of the load to the second pod; None where none came in time."""

    seconds: float | None


def measure() -> Section:
    """Ours, and KubeAI's where it can be built, one after the other on one cluster."""
    with Cluster(folder=cluster_folder("bench"), publish=GATEWAY | PUBLISHED) as cluster:
        cluster.wait_for_nodes()
        slipway = Slipway(cluster)
        slipway.install()
        ours = our_reaction(slipway)
        try:
            folder = kubeai_controller.source()
            built = kubeai_controller.program(folder)
        except NoProgramError as missing:
            print(f"without KubeAI: {missing}")
            return section(ours, {})
        kubeai_controller.install(cluster, folder, NODE)
        theirs = {settings: their_reaction(cluster, built, settings) for settings in (FASTEST, CHART_DEFAULTS)}
    return section(ours, theirs)


def our_reaction(slipway: Slipway) -> Reaction:
    """That of Slipway with examples/chat.yaml, whose numbers are its own defaults but for the size of the cache."""
    slipway.apply(as_yaml(chat(NAME)))
    slipway.wait_ready(NAME, replicas=1)
    reaction = _reaction(slipway.base_url, lambda: len(slipway.pods(NAME)))
    slipway.delete(NAME, timeout=300)
    return reaction


def their_reaction(cluster: Cluster, built: Path, settings: Autoscaling) -> Reaction:
    """That of KubeAI with a Model of the same engine."""
    image = f"slipway/runtime:{cluster.catalogue_version}"
    config = kubeai_controller.configuration(settings, image, kubeai_controller.engine_patches(ENGINE))
    base_url = f"http://127.0.0.1:{cluster.port('kubeai')}/openai/v1"

    def pods() -> int:
        path = f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=model={NAME}"
        return len(cluster.api("GET", path)["items"])

    model = kubeai_controller.model(NAME, most=MOST, target_requests=TARGET_REQUESTS)
    with kubeai_controller.running(cluster, NODE, built, config):
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(model))
        wait_for("KubeAI answers", lambda: _answers(base_url), timeout=180)
        reaction = _reaction(base_url, pods)
        cluster.kubectl("delete", "models.kubeai.org", NAME, "-n", NAMESPACE, timeout=300)
        wait_for("its pods are gone", lambda: pods() == 0, timeout=300)
    return reaction


def _answers(base_url: str) -> bool:
    with openai.OpenAI(base_url=base_url, api_key="none", timeout=20, max_retries=0) as client:
        answer = client.completions.create(model=NAME, prompt="Once", max_tokens=2)
    return bool(answer.choices)


def _reaction(base_url: str, pods: Callable[[], int]) -> Reaction:
    plan = LoadPlan(base_url=base_url, model=NAME, concurrency=USERS, duration_seconds=PATIENCE + 30, max_tokens=96)
    load, began = Load(plan), time.monotonic()
    try:
        wait_for("a second pod", lambda: pods() > 1, timeout=PATIENCE, every=0.05)
        took = time.monotonic() - began
        print(f"a second pod after {took:.1f} s")
        return Reaction(took)
    except NotInTimeError:
        return Reaction(None)
    finally:
        load.stop()


def section(ours: Reaction, theirs: dict[Autoscaling, Reaction]) -> Section:
    """The figures; a ratio is theirs over ours, and where no second pod came its time is at least the patience."""
    how = f"{USERS} users from nothing, one replica of the same engine, each through its own proxy"
    figures = [_figure("Slipway: load → second pod", ours, how)]
    for settings, reaction in theirs.items():
        name = f"KubeAI, interval {settings.interval}, window {settings.time_window}"
        note = f"targetRequests {TARGET_REQUESTS}" + (", the chart's defaults" if settings == CHART_DEFAULTS else "")
        figures.append(_figure(f"{name}: the same", reaction, note))
        if ours.seconds is not None:
            ratio = (PATIENCE if reaction.seconds is None else reaction.seconds) / ours.seconds
            figures.append(Figure(f"{name} ÷ Slipway", ratio, "×", "" if reaction.seconds is not None else "at least"))
    return Section("Scale-out beside KubeAI", tuple(figures))


def _figure(name: str, reaction: Reaction, note: str) -> Figure:
    if reaction.seconds is None:
        return Figure(name, PATIENCE, "s", f"{note}; none came in that time")
    return Figure(name, reaction.seconds, "s", note)
