"""The documentation's blocks of commands run, as far as they can run here; each other one has a reason below.

Issue 26, item 8. A new block fails `test_every_block_is_run_or_has_a_reason` until it is in one of the tables, by its
page and its first line.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

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
)
A_CLUSTER = "starts a cluster of its own: e2e/demo.py and the stories are what it runs"
AN_INSTALLATION = (
    "waits for pods of the chart's images: the stories install the chart, tests/chart renders these values"
)
DOCKER = "needs Docker"
A_MODEL_SERVER = "starts a server or asks one: tests/runtime start it with these flags"
INSTEAD_OF_RUNNING: Mapping[Block, str] = {
    ("README.md", "make demo"): A_CLUSTER,
    ("README.md", "make test"): "runs these tests",
    ("README.md", "helm upgrade --install slipway "): AN_INSTALLATION,
    ("README.md", ".venv/bin/slipway-runtime serve "): A_MODEL_SERVER,
    ("docs/cli.md", "kubectl slipway routes chat "): "needs the CRDs of the Gateway API, and a status with weights",
    ("docs/gateway.md", 'key="sk-$(openssl '): AN_INSTALLATION,
    ("docs/install.md", "export REGISTRY="): DOCKER,
    ("docs/install.md", "make e2e-kind"): DOCKER,
    ("docs/install.md", "docker buildx bake "): DOCKER,
    ("docs/install.md", "helm upgrade --install slipway "): AN_INSTALLATION,
    ("docs/install.md", "make e2e KUBECONFIG="): A_CLUSTER,
    ("docs/versions.md", "echo '{"): "builds the plugin for four platforms: tests/release builds that of this one",
    ("docs/model-cache.md", "mkdir -p /var/lib/slipway/models "): "writes to the nodes of a cluster",
    ("docs/observability.md", "helm upgrade slipway "): AN_INSTALLATION,
    ("docs/serving.md", ".venv/bin/slipway-runtime serve "): A_MODEL_SERVER,
    ("docs/serving.md", "curl localhost:8000/"): A_MODEL_SERVER,
    ("docs/slo-and-cost.md", "kubectl slipway promote NAME"): "NAME is a placeholder; the stories promote a canary",
    ("gitops/README.md", "for kind in InferenceService "): "needs an Argo CD; tests/gitops run its health checks",
    ("charts/slipway/README.md", "helm upgrade --install slipway "): AN_INSTALLATION,
    ("charts/slipway/README.md", "secret=slipway-admin-master"): "rotates keys: tests/chart/test_keys.py rotates them",
}


def block_of(place: str, text: str) -> list[Block]:
    """The entries of the tables that mean this block."""
    page, first = place.partition(":")[0], text.strip().splitlines()[0]
    known = (*WITHOUT_A_CLUSTER, *ON_THE_API_SERVER, *INSTEAD_OF_RUNNING)
    return [entry for entry in known if entry[0] == page and first.startswith(entry[1])]


def text_of(block: Block) -> str:
    (text,) = [text for place, text in BLOCKS if block in block_of(place, text)]
    return text.replace("$ kubectl", "kubectl")


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
    known = {*WITHOUT_A_CLUSTER, *ON_THE_API_SERVER, *INSTEAD_OF_RUNNING}
    assert known == {entry for _, entries in meant for entry in entries}, "an entry means no block any more"


@pytest.mark.parametrize("block", WITHOUT_A_CLUSTER, ids=lambda block: block[0])
def test_a_block_that_needs_no_cluster_runs(block, tmp_path):
    assert run(text_of(block), tmp_path, {"PATH": os.environ["PATH"], "HOME": str(tmp_path)})


@pytest.mark.apiserver
def test_the_blocks_that_need_an_api_server_run_in_the_order_of_their_pages(apiserver: Access, tmp_path: Path):
    apiserver.serve_kinds(ROOT / "crds")
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(apiserver.kubeconfig.read_text())
    environment = {**apiserver.environment(), "KUBECONFIG": str(kubeconfig)}
    run(f"kubectl config set-context --current --namespace={apiserver.create_namespace()}", tmp_path, environment)
    for block in ON_THE_API_SERVER:
        assert run(text_of(block), tmp_path, environment), block
