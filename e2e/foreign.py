"""The command `make e2e KUBECONFIG=…`: runs the first story on a given cluster, where Slipway is installed already.

    python -m e2e.foreign --kubeconfig PATH

It needs kubectl on the PATH, the chart installed in `slipway-system`, and rights to make an InferenceService in the
namespace `default`. It applies one service, asks it one question through a port-forward, and removes it again.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import openai

from e2e.manifests import as_yaml, static

NAME = "slipway-e2e"
NAMESPACE = "slipway-system"


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


def main() -> None:
    """Run the story; exit code 1 with one sentence where it cannot."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kubeconfig", required=True)
    kubeconfig = parser.parse_args().kubeconfig
    if missing := needs(kubeconfig):
        sys.exit(f"make e2e KUBECONFIG=…: {missing}")

    def kubectl(*arguments: str, manifest: str | None = None) -> None:
        subprocess.run(["kubectl", "--kubeconfig", kubeconfig, *arguments], input=manifest, text=True, check=True)

    try:
        kubectl("apply", "-n", "default", "-f", "-", manifest=as_yaml(static(NAME, 1)))
        kubectl("wait", "-n", "default", f"infsvc/{NAME}", "--for=condition=Ready", "--timeout=600s")
        with forwarded(kubeconfig) as port:
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=120)
            answer = client.chat.completions.create(
                model=NAME, messages=[{"role": "user", "content": "Hello"}], max_tokens=32
            )
        print(answer.choices[0].message.content)
    finally:
        kubectl("delete", "-n", "default", "infsvc", NAME, "--ignore-not-found")


if __name__ == "__main__":
    main()
