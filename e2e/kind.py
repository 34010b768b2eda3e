"""The command `make e2e-kind`: builds the images, installs the chart on a kind cluster, sends one request, removes all.

    python -m e2e.kind [--keep]

It needs docker with buildx, kind, kubectl and helm on the PATH, about 28 GB of disk while it builds, and the network.
`--keep` leaves the cluster up and says how to reach it.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import slipway_api

ROOT = Path(__file__).resolve().parent.parent
CLUSTER = "slipway-e2e"
NODE = "kindest/node:v1.34.0"  # the oldest Kubernetes that the chart takes
TOOLS = ("docker", "kind", "kubectl", "helm")
TAG = slipway_api.__version__


@dataclass(frozen=True)
class Step:
    """One command, and what it is for."""

    purpose: str
    argv: tuple[str, ...]


def images(tag: str = TAG) -> tuple[str, ...]:
    """The images that the bake group `kind` builds."""
    return (f"slipway/operator:{tag}", f"slipway/gateway:{tag}", f"slipway/agent:{tag}", f"slipway/runtime:{tag}-cpu")


def steps(kubeconfig: Path, tag: str = TAG) -> tuple[Step, ...]:
    """Everything from nothing to an answered question, in order."""
    chart = str(ROOT / "charts" / "slipway")
    install = ("upgrade", "--install", "slipway", chart, "--namespace", "slipway-system", "--create-namespace")
    cluster = ("--kubeconfig", str(kubeconfig))
    return (
        Step("build the images", ("docker", "buildx", "bake", "--file", "images/docker-bake.hcl", "--load", "kind")),
        Step(
            "create the cluster",
            ("kind", "create", "cluster", "--name", CLUSTER, "--image", NODE, "--wait", "120s", *cluster),
        ),
        *(Step(f"load {image}", ("kind", "load", "docker-image", image, "--name", CLUSTER)) for image in images(tag)),
        Step(
            "install the chart",
            ("helm", *install, *cluster, "--set", f"runtime.image.tag={tag}-cpu", "--wait", "--timeout", "180s"),
        ),
        Step("ask a question", (sys.executable, "-m", "e2e.foreign", *cluster)),
    )


def removal() -> Step:
    """The command that removes everything again."""
    return Step("remove the cluster", ("kind", "delete", "cluster", "--name", CLUSTER))


def missing(tools: Sequence[str] = TOOLS) -> list[str]:
    """The tools that are not on the PATH."""
    return [tool for tool in tools if shutil.which(tool) is None]


def run(step: Step) -> None:
    """Do one step, with its output as it comes; end the program when it fails."""
    print(f"==> {step.purpose}", flush=True)
    if code := subprocess.run(step.argv, cwd=ROOT, env=os.environ | {"TAG": TAG}, check=False).returncode:
        sys.exit(f"could not {step.purpose}: {step.argv[0]} ended with {code}")


def main() -> None:
    """Do all steps; exit code 1 with one sentence where one fails."""
    parser = argparse.ArgumentParser(description="Install Slipway's images on a kind cluster and ask one question.")
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    options = parser.parse_args()
    if lacking := missing():
        sys.exit(f"make e2e-kind needs {' and '.join(lacking)} on the PATH")
    kubeconfig = Path(tempfile.mkdtemp(prefix="slipway-kind-")) / "kubeconfig"
    # Leave through `finally`, so that the cluster is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("make e2e-kind: ended by SIGTERM"))
    try:
        for step in steps(kubeconfig):
            run(step)
    finally:
        if options.keep:
            print(f"KUBECONFIG={kubeconfig}; remove it with: {' '.join(removal().argv)}")
        else:
            subprocess.run(removal().argv, check=False)
            shutil.rmtree(kubeconfig.parent)


if __name__ == "__main__":
    main()
