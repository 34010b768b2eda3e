"""`make chart-check`: helm lints the chart and renders it with every group of values, without a cluster.

python -m tests.chart.lint
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster import build

CHART = Path(__file__).resolve().parents[2] / "charts" / "slipway"
NAMESPACE = "slipway-system"

# Each line reaches templates, or branches of templates, that the others do not.
VALUES: tuple[tuple[str, ...], ...] = (
    (),
    ("watchNamespaces={team-a,team-b}", "allowedServiceAccountNames={models}"),
    ("allowedImages={registry.example.com/a/,other.example.com}", "allowedPriorityClassNames={batch}"),
    ("adapterCredentials.namespaces={team-a,team-b}",),
    ("modelCache.nodePath=/var/lib/models", "modelCache.limit=500Gi", "hub.endpoints={https://hub.internal}"),
    ("adminMaster.existingSecret=masters", "gatewayKey.existingSecret=key", "crds.install=false"),
    ("networkPolicy.enabled=false", "rbac.aggregate=false", "operator.replicaAccess=proxy"),
    ("networkPolicy.metricsNamespaces={monitoring}", "networkPolicy.clientNamespaces={batch}"),
    ("podSecurity.assignedByPlatform=true", "admissionWarnings.enabled=false"),
    ("podSecurity.user=1000720000", "podSecurity.group=0"),
    ("name=second", "operator.replicas=1", "gateway.replicas=3", "gateway.service.type=LoadBalancer"),
    ("gateway.tenants.configMap=tenants", "gateway.tenants.keysSecret=keys", "gateway.tls.secretName=cert"),
    ("monitoring.podMonitors=true", "monitoring.rules=true", "monitoring.labels.release=prometheus"),
    ("monitoring.dashboard=true",),
    ("monitoring.podMonitors=true", "watchNamespaces={team-a}"),
    (
        "ingress.enabled=true",
        "ingress.hosts={llm.example.com}",
        "ingress.tls.secretName=edge",
        "ingress.className=nginx",
    ),
    ("ingress.enabled=true", "ingress.hosts={a.b}", "ingress.controller=nginx", "gateway.tls.secretName=cert"),
    ("httpRoute.enabled=true", "httpRoute.parentRefs[0].name=public", "httpRoute.hostnames={llm.example.com}"),
    ("operatorPolicy.enabled=false",),
    ("operatorPolicy.injectedContainers={istio-init}", "operatorPolicy.allowedHostPaths={/var/run/agent}"),
    ("operator.podAnnotations.a=b", "gateway.nodeSelector.a=b", "imagePullSecrets[0].name=registry"),
)


def parsed(text: str) -> list[dict[str, Any]]:
    """The manifests that helm printed. The kinds among them take PyYAML's own parser a second, and libyaml a tenth."""
    return [manifest for manifest in yaml.load_all(text, Loader=yaml.CSafeLoader) if manifest]


class Helm:
    """The helm of the local cluster's binary, with a home of its own."""

    def __init__(self, tools: Path, home: Path) -> None:
        self._tools = tools
        self._environment = {"PATH": os.defpath, "HOME": str(home), "HELM_CACHE_HOME": str(home)}

    def run(self, *arguments: str) -> str:
        """What helm printed; ends the program with its words when it fails."""
        argv = [str(self._tools / "helm"), *arguments]
        done = subprocess.run(argv, capture_output=True, text=True, env=self._environment, check=False)
        if done.returncode:
            sys.exit(f"helm {' '.join(arguments)}\n{done.stdout}{done.stderr}")
        return done.stdout

    def render(self, settings: Sequence[str]) -> list[dict[str, Any]]:
        """The manifests with these settings."""
        sets = [part for setting in settings for part in ("--set", setting)]
        text = self.run("template", "slipway", str(CHART), "--namespace", NAMESPACE, *sets)
        return parsed(text)


def complaints(manifests: Sequence[dict[str, Any]]) -> list[str]:
    """What is wrong with rendered manifests although helm took them: the same object twice, or half of one."""
    found, seen = [], set()
    for manifest in manifests:
        metadata = manifest.get("metadata") or {}
        name = (manifest.get("apiVersion"), manifest.get("kind"), metadata.get("namespace"), metadata.get("name"))
        if not all((name[0], name[1], name[3])):
            found.append(f"an object without apiVersion, kind or name: {name}")
        if name in seen:
            found.append(f"rendered twice: {name}")
        seen.add(name)
    return found


def main() -> None:
    """Lint and render; exit code 1 with what is wrong."""
    with tempfile.TemporaryDirectory(prefix="slipway-chart-") as home:
        helm = Helm(build.ensure() / "bin", Path(home))
        helm.run("lint", str(CHART), "--strict")
        for settings in VALUES:
            if wrong := complaints(helm.render(settings)):
                sys.exit(f"charts/slipway with {', '.join(settings) or 'its defaults'}: {'; '.join(wrong)}")
    print(f"the chart is sound with {len(VALUES)} groups of values")


if __name__ == "__main__":
    main()
