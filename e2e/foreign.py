"""The command `make e2e KUBECONFIG=…`: runs the first story on a given cluster, where Slipway is installed already.

    python -m e2e.foreign --kubeconfig PATH

It needs kubectl on the PATH, the chart installed in `slipway-system`, and rights to make an InferenceService in the
namespace `default`. It applies one service that needs no GPU, asks it one question through a port-forward, and removes
it again, also if it is ended by SIGTERM.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import openai

from e2e.manifests import as_yaml, static

NAME = "slipway-e2e"
NAMESPACE = "slipway-system"
READY_SECONDS = 600


def needs(kubeconfig: str) -> str | None:
    """The first thing that is missing, as a sentence; None when all is there."""
    if not shutil.which("kubectl"):
        return "It needs kubectl on the PATH."
    for what, arguments in (
        (f"A cluster must answer behind {kubeconfig}.", ["get", "--raw", "/readyz"]),
        ("Slipway's kinds must be installed: helm install slipway charts/slipway.", ["get", "infsvc", "-A"]),
        (f"The gateway must be running in {NAMESPACE}.", ["-n", NAMESPACE, "get", "service", "slipway-gateway"]),
    ):
        if subprocess.run(["kubectl", "--kubeconfig", kubeconfig, *arguments], capture_output=True).returncode:
            return what
    return None


@contextmanager
def forwarded(kubeconfig: str) -> Iterator[int]:
    """A port of 127.0.0.1 that leads to the gateway."""
    command = [
        "kubectl",
        "--kubeconfig",
        kubeconfig,
        "-n",
        NAMESPACE,
        "port-forward",
        "service/slipway-gateway",
        ":8000",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline().split("->")[0].rsplit(":", 1)[1])
        finally:
            process.terminate()


class StoryError(Exception):
    """The story failed; the message is the sentence for the user."""


def manifest() -> dict[str, Any]:
    """The service: on CPUs, because a cluster of somebody else may have no free GPU, or none at all."""
    return static(NAME, 1, resources={"gpu": {"count": 0}})


def why_not_ready(service: dict[str, Any]) -> str:
    """One sentence from the conditions of a service that did not become ready."""
    conditions = {one["type"]: one for one in service.get("status", {}).get("conditions", [])}
    found = conditions.get("Stalled", {})
    if found.get("status") != "True":
        found = conditions.get("Ready", {})
    if not found:
        return f"infsvc/{NAME} has no status: the operator does not watch this namespace, or does not run."
    return f"infsvc/{NAME} is not ready: {found['reason']}: {found['message']}"


def _ended(number: int, _frame: FrameType | None) -> NoReturn:
    """Leave through `finally`, so that the service is removed."""
    raise StoryError(f"ended by {signal.Signals(number).name}.")


def main() -> None:
    """Run the story; exit code 1 with one sentence if it cannot or fails."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kubeconfig", required=True)
    kubeconfig = parser.parse_args().kubeconfig
    if missing := needs(kubeconfig):
        sys.exit(f"make e2e KUBECONFIG=…: {missing}")

    signal.signal(signal.SIGTERM, _ended)
    try:
        print(run(kubeconfig))
    except (StoryError, openai.OpenAIError) as failure:
        sys.exit(f"make e2e KUBECONFIG=…: {failure}")


def run(kubeconfig: str) -> str:
    """The answer of the service; raises StoryError. The service is removed in any case."""

    def kubectl(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        command = ["kubectl", "--kubeconfig", kubeconfig, "-n", "default", *arguments]
        return subprocess.run(command, input=stdin, text=True, capture_output=True, check=False)

    try:
        applied = kubectl("apply", "-f", "-", stdin=as_yaml(manifest()))
        if applied.returncode:
            raise StoryError(applied.stderr.strip())
        if kubectl("wait", f"infsvc/{NAME}", "--for=condition=Ready", f"--timeout={READY_SECONDS}s").returncode:
            seen = kubectl("get", "infsvc", NAME, "-o", "json")
            raise StoryError(seen.stderr.strip() if seen.returncode else why_not_ready(json.loads(seen.stdout)))
        with forwarded(kubeconfig) as port:
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=120)
            answer = client.chat.completions.create(
                model=NAME, messages=[{"role": "user", "content": "Hello"}], max_tokens=32
            )
        return answer.choices[0].message.content or ""
    finally:
        kubectl("delete", "infsvc", NAME, "--ignore-not-found")


if __name__ == "__main__":
    main()
