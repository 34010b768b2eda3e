"""Completion in a shell: verbs, options, services and replicas, through kubectl and in bash."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slipway_cli import completion
from slipway_cli import main as cli
from slipway_cli.cluster import Cluster, ClusterError

ENTRIES = {"kubectl-slipway": "slipway_cli.main", "kubectl_complete-slipway": "slipway_cli.completion"}


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder with both commands, as an installation has them."""
    for name, module in ENTRIES.items():
        script = tmp_path / name
        script.write_text(f"#!{sys.executable}\nfrom {module} import main\nmain()\n")
        script.chmod(0o755)
    return tmp_path


class FakeCluster:
    """A cluster with two services in the namespace team."""

    kubeconfig = None

    def __init__(self, namespace="", context=""):
        self.namespace = namespace

    def objects(self, kind):
        return [{"metadata": {"name": name}} for name in ("chat", "code")] if self.namespace == "team" else []

    def pods(self, service):
        return [{"metadata": {"name": f"{service}-r1-0-0", "labels": {"slipway.dev/revision": "r1"}}}]


def candidates(*words):
    lines, directive = completion.complete(cli.app, words)
    return [line.partition("\t")[0] for line in lines], directive


@pytest.mark.parametrize(
    ("words", "found", "directive"),
    [
        (["pro"], ["promote"], ":4"),
        (["--kubeconfig", "x", "roll"], ["rollback"], ":4"),
        (["--kubeconfig", ""], [], ":0"),
        (["status", "--out"], ["--output"], ":4"),
        (["status", "-o", ""], ["table", "json"], ":4"),
        (["status", "-n", "team", "c"], ["chat", "code"], ":4"),
        (["status", "--namespace=team", "cha"], ["chat"], ":4"),
        (["status", "chat", "-n", "team", ""], [], ":0"),
        (["drain", "chat", ""], ["chat-r1-0-0"], ":4"),
        (["plan", "-f", ""], [], ":0"),
        (["completion", ""], ["bash", "zsh"], ":4"),
        (["nonsense", ""], [], ":4"),
    ],
)
def test_the_last_word_is_completed(monkeypatch, words, found, directive):
    monkeypatch.setattr(completion, "Cluster", FakeCluster)

    assert candidates(*words) == (found, directive)


def test_every_verb_is_completed_with_its_first_sentence():
    lines, _ = completion.complete(cli.app, [""])

    assert len(lines) == len(cli.app.registered_commands)
    assert all("\t" in line for line in lines)


@pytest.mark.parametrize("error", [ClusterError("no kubeconfig"), TypeError("null has no items")], ids=str)
def test_without_a_cluster_nothing_is_completed_and_nothing_is_printed(monkeypatch, error):
    def refuse(*_):
        raise error

    monkeypatch.setattr(completion, "Cluster", refuse)

    assert candidates("status", "") == ([], ":4")


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_the_script_completes_in_bash(commands):
    """The real command and the real shell, without a cluster."""
    script = (
        f'PATH="{commands}:$PATH"; source <(kubectl-slipway completion bash); '
        'COMP_WORDS=(kubectl-slipway pro); COMP_CWORD=1; _kubectl_slipway; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=60)

    assert done.stdout.split() == ["promote"], done.stderr


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not on the PATH")
def test_kubectl_completes_the_plugin(commands):
    environment = {"PATH": f"{commands}:/usr/local/bin:/usr/bin:/bin"}
    done = subprocess.run(
        ["kubectl", "__complete", "slipway", "why"],
        capture_output=True, text=True, check=True, timeout=60, env=environment,
    )  # fmt: skip

    assert done.stdout.splitlines()[0].startswith("why-scale")


def test_the_kubeconfig_of_the_line_is_used():
    try:
        completion.complete(cli.app, ["--kubeconfig", "/nowhere", "status", ""])
        assert Cluster.kubeconfig == "/nowhere"
    finally:
        Cluster.kubeconfig = None
