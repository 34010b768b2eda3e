"""The documentation's blocks of commands run, as far as they can run here; each other one has a reason below.

Issue 26, item 8. A new block fails `test_every_block_is_run_or_has_a_reason` until it is in one of the tables, by its
page and its first line.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.access import Access
from tests.docs.test_commands import BLOCKS, ROOT

Block = tuple[str, str]  # page and first line

WITHOUT_A_CLUSTER: tuple[Block, ...] = (("docs/cli.md", "cat > trace.csv <<END"),)
# In this order, in one namespace: no operator runs, so a status stays empty.
ON_THE_API_SERVER: tuple[Block, ...] = (
    ("README.md", "$ kubectl apply -f examples/chat.yaml"),
    ("docs/disruptions.md", "kubectl patch infsvc chat --type merge -p "),
    ("docs/rollouts.md", "kubectl apply -f examples/canary.yaml"),
    ("docs/slo-and-cost.md", "kubectl apply -f examples/objectives.yaml"),
    ("docs/install.md", "kubectl create secret generic hf "),
    ("docs/quickstart.md", "kubectl apply -f examples/cpu.yaml"),
    ("docs/quickstart.md", "kubectl scale infsvc cpu "),
    ("docs/troubleshooting.md", "kubectl describe infsvc chat"),
    ("docs/backup.md", "kubectl get infsvc,lora,wpool,engines "),
    ("docs/quickstart.md", "kubectl delete infsvc cpu"),
    ("docs/templates.md", "kubectl slipway plan -f examples/three-lines.yaml"),
    ("docs/templates.md", "kubectl get infsvc -A "),
    ("docs/backup.md", "kubectl apply --server-side -f slipway-objects.json"),
)
HELM = "helm upgrade --install slipway "
# In this order, as one release: an installation, its changes, and the objects that each block names.
WITH_HELM: tuple[Block, ...] = (
    ("README.md", HELM),
    ("docs/install.md", HELM),
    ("docs/quickstart.md", HELM),
    ("docs/gateway.md", 'key="sk-$(openssl '),
    ("docs/observability.md", "helm upgrade slipway "),
    ("charts/slipway/README.md", HELM),
)
SERVE = ".venv/bin/slipway-runtime serve models/tiny"
# Each server of a page, and the blocks that ask it.
WITH_THE_RUNTIME: Mapping[Block, tuple[Block, ...]] = {
    ("README.md", f"{SERVE} --port 8000"): (),
    ("docs/quickstart.md", f"{SERVE} --port 8000"): (("docs/quickstart.md", "curl -sS localhost:8000/"),),
    ("docs/serving.md", f"{SERVE} --max-adapters"): (("docs/serving.md", "curl localhost:8000/"),),
    ("docs/serving.md", f"{SERVE} --task embed"): (),  # its block asks it, too
}
A_CLUSTER = "starts a cluster of its own: e2e/demo.py and the stories are what it runs"
DOCKER = "needs Docker"
INSTEAD_OF_RUNNING: Mapping[Block, str] = {
    ("README.md", "make demo"): A_CLUSTER,
    ("README.md", "make test"): "runs these tests",
    ("docs/quickstart.md", "make demo KEEP=1"): A_CLUSTER,
    (
        "docs/quickstart.md",
        "kubectl wait infsvc/cpu ",
    ): "needs a replica that runs: the stories wait and ask",
    ("docs/cli.md", "kubectl slipway routes chat "): "needs the CRDs of the Gateway API, and a status with weights",
    ("docs/install.md", "export REGISTRY="): DOCKER,
    ("docs/install.md", "make e2e-kind"): DOCKER,
    ("docs/install.md", "docker buildx bake "): DOCKER,
    ("docs/install.md", "make e2e KUBECONFIG="): A_CLUSTER,
    ("docs/versions.md", "echo '{"): "builds the plugin for four platforms: tests/release builds that of this one",
    ("docs/model-cache.md", "mkdir -p /var/lib/slipway/models "): "writes to the nodes of a cluster",
    ("docs/slo-and-cost.md", "kubectl slipway promote NAME"): "NAME is a placeholder; the stories promote a canary",
    ("gitops/README.md", "for kind in InferenceService "): "needs an Argo CD; tests/gitops run its health checks",
    ("charts/slipway/README.md", "secret=slipway-admin-master"): "rotates keys: tests/chart/test_keys.py rotates them",
}


def known() -> set[Block]:
    """All entries of the tables."""
    asking = (entry for entries in WITH_THE_RUNTIME.values() for entry in entries)
    run = (*WITHOUT_A_CLUSTER, *ON_THE_API_SERVER, *WITH_HELM, *WITH_THE_RUNTIME, *asking)
    return {*run, *INSTEAD_OF_RUNNING}


def block_of(place: str, text: str) -> list[Block]:
    """The entries of the tables that mean this block."""
    page, first = place.partition(":")[0], text.strip().splitlines()[0]
    return [entry for entry in known() if entry[0] == page and first.startswith(entry[1])]


def texts_of(block: Block) -> list[str]:
    """The blocks of an entry, at least one."""
    found = [text.replace("$ kubectl", "kubectl") for place, text in BLOCKS if block in block_of(place, text)]
    assert found, block
    return found


def text_of(block: Block) -> str:
    (text,) = texts_of(block)
    return text


def run(text: str, folder: Path, environment: Mapping[str, str]) -> str:
    """Run a block in a folder with the checkout's files; fails as soon as one command fails."""
    for name in ("examples", "models", "charts", "crds"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}:{environment.get('PATH', '')}"
    # A command that watches goes on until somebody ends it.
    script = "set -euo pipefail\n" + "\n".join(
        f"timeout 3 {line} || test $? -eq 124" if line.partition("#")[0].rstrip().endswith(" -w") else line
        for line in (line.partition("  # ")[0].rstrip() for line in text.splitlines())
    )
    done = subprocess.run(
        ["bash"],
        input=script,
        text=True,
        capture_output=True,
        check=False,
        cwd=folder,
        env={**environment, "PATH": path},
        timeout=120,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_every_block_is_run_or_has_a_reason():
    meant = [(place, block_of(place, text)) for place, text in BLOCKS]

    assert [place for place, entries in meant if len(entries) != 1] == []
    assert known() == {entry for _, entries in meant for entry in entries}, "an entry means no block any more"


@pytest.mark.parametrize("block", WITHOUT_A_CLUSTER, ids=lambda block: block[0])
def test_a_block_that_needs_no_cluster_runs(block, tmp_path):
    assert run(text_of(block), tmp_path, {"PATH": os.environ["PATH"], "HOME": str(tmp_path)})


@pytest.mark.apiserver
def test_the_blocks_that_need_an_api_server_run_in_the_order_of_their_pages(own_apiserver: Access, tmp_path: Path):
    own_apiserver.serve_kinds(ROOT / "crds")
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(own_apiserver.kubeconfig.read_text())
    environment = {**own_apiserver.environment(), "KUBECONFIG": str(kubeconfig)}
    run(f"kubectl config set-context --current --namespace={own_apiserver.create_namespace()}", tmp_path, environment)
    for block in ON_THE_API_SERVER:
        assert run(text_of(block), tmp_path, environment), block


# No pod runs here, so nothing can be waited for, and other tests applied our definitions without helm.
HELM_HERE = """helm() {
  local word words=()
  for word in "$@"; do [ "$word" = --wait ] || words+=("$word"); done
  command helm "${words[@]}" --take-ownership --force-conflicts
}
"""


def a_kind_of_the_prometheus_operator(kind: str, plural: str) -> dict[str, Any]:
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    group = "monitoring.coreos.com"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural},
            "versions": [version],
        },
    }


@pytest.mark.apiserver
def test_the_blocks_of_helm_run_one_after_another_on_one_release(apiserver: Access, tmp_path: Path):
    apiserver.serve_kinds(ROOT / "crds")
    kinds = [
        a_kind_of_the_prometheus_operator("PodMonitor", "podmonitors"),
        a_kind_of_the_prometheus_operator("PrometheusRule", "prometheusrules"),
    ]
    (tmp_path / "kinds").mkdir()
    for kind in kinds:
        (tmp_path / "kinds" / f"{kind['spec']['names']['plural']}.yaml").write_text(json.dumps(kind))
    apiserver.serve_kinds(tmp_path / "kinds")
    example = (ROOT / "examples" / "gateway" / "tenants.yaml").read_text()
    (tmp_path / "tenants.yaml").write_text(next(yaml.safe_load_all(example))["data"]["tenants.yaml"])
    environment = {**apiserver.environment(), "REGISTRY": "registry.example.com"}
    try:
        for block in WITH_HELM:
            for text in texts_of(block):
                assert run(HELM_HERE + text, tmp_path, environment), block
        assert "slipway" in apiserver.kubectl("get", "podmonitors", "-n", "slipway-system", "-o", "name")
    finally:
        apiserver.helm("uninstall", "slipway", "--namespace", "slipway-system", "--wait=hookOnly")
        apiserver.kubectl("delete", "-f", tmp_path / "kinds")
        apiserver.kubectl("delete", "-n", "slipway-system", "secret/slipway-api-keys", "configmap/slipway-tenants")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("block", WITH_THE_RUNTIME, ids=lambda block: f"{block[0]} {block[1][-15:]}")
def test_a_block_that_serves_a_model_runs_and_the_blocks_that_ask_it_are_answered(block, tmp_path):
    port = free_port()
    serve, *asks = text_of(block).strip().splitlines()
    asks = ["\n".join(asks), *(text for entry in WITH_THE_RUNTIME[block] for text in texts_of(entry))]
    serve = serve.replace(" --port 8000", "").replace(".venv/bin/", f"{Path(sys.executable).parent}/")
    server = subprocess.Popen(
        ["bash", "-c", f"exec {serve} --port {port} --admin-port 0 --kv-cache-bytes 16Mi"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "SLIPWAY_RUN_DIR": str(tmp_path)},
        stdout=subprocess.DEVNULL, stderr=(tmp_path / "log").open("wb"), start_new_session=True,
    )  # fmt: skip
    try:
        ready = f"curl -sf --retry 90 --retry-delay 1 --retry-all-errors localhost:{port}/v1/models"
        assert '"tiny"' in run(ready, tmp_path, os.environ), (tmp_path / "log").read_text()
        for text in filter(None, asks):
            answer = run(
                text.replace("localhost:8000", f"localhost:{port}").replace("curl ", "curl -sSf "), tmp_path, os.environ
            )
            assert '"model":"tiny"' in answer.replace(": ", ":"), answer
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)
