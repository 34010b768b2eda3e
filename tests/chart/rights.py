"""Runs a part of Slipway with nothing but the rights that the chart gives to its ServiceAccount."""

import json
import os
import subprocess
import sys
from pathlib import Path

from e2e.cluster.access import Access
from tests.chart.lint import CHART


def apply_rights(access: Access, part: str, namespace: str, *values: str) -> None:
    """The ServiceAccount of `operator` or `gateway`, its rights and their limits, rendered with these values."""
    system = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    access.kubectl("apply", "-f", "-", stdin=json.dumps(system))
    templates = (f"{part}-rbac", *(["operator-policy"] if part == "operator" else []))
    shown = [option for name in templates for option in ("-s", f"templates/{name}.yaml")]
    sets = [option for value in values for option in ("--set", value)]
    rights = access.helm("template", "slipway", CHART, "-n", namespace, *shown, *sets)
    access.kubectl("apply", "-n", namespace, "-f", "-", stdin=rights)


def kubeconfig_of(access: Access, account: str, namespace: str, folder: Path) -> Path:
    """Writes a kubeconfig with a token of this ServiceAccount, and no other right."""
    token = access.kubectl("create", "token", account, "-n", namespace).strip()
    cluster = {"server": access.url, "certificate-authority": str(access.folder / "pki" / "ca.crt")}
    file = folder / "kubeconfig"
    file.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "x",
                "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
                "clusters": [{"name": "x", "cluster": cluster}],
                "users": [{"name": "x", "user": {"token": token}}],
            }
        )
    )
    return file


def run_init_containers(access: Access, name: str, namespace: str, folder: Path) -> None:
    """Run the init containers of an installation's operator with its rights, as a kubelet does for a new pod."""
    kubeconfig = kubeconfig_of(access, f"{name}-operator", namespace, folder)
    deployment = json.loads(access.kubectl("-n", namespace, "get", "deployment", f"{name}-operator", "-o", "json"))
    for container in deployment["spec"]["template"]["spec"].get("initContainers", ()):
        command = [Path(sys.executable).with_name("slipway-operator"), *container["args"]]
        environment = {"PATH": os.environ["PATH"], "KUBECONFIG": str(kubeconfig), "SLIPWAY_NAMESPACE": namespace}
        subprocess.run(command, env=environment, check=True, timeout=60)
