"""Runs a part of Slipway with nothing but the rights that the chart gives to its ServiceAccount."""

import json
from pathlib import Path

from e2e.cluster.access import Access
from tests.chart.lint import CHART


def apply_rights(access: Access, part: str, namespace: str, *values: str) -> None:
    """The ServiceAccount of `operator` or `gateway` and its rights, as the chart renders them with these values."""
    system = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    access.kubectl("apply", "-f", "-", stdin=json.dumps(system))
    sets = [part for value in values for part in ("--set", value)]
    rights = access.helm("template", "slipway", CHART, "-n", namespace, "-s", f"templates/{part}-rbac.yaml", *sets)
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
