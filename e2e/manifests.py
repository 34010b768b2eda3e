"""Manifests of the stories: the example with a few fields changed."""

from typing import Any

import yaml

from e2e.slipway import EXAMPLES

# What Kubernetes gives to pods by default; the local cluster gives five seconds, and would delete them itself.
STAYS_FIVE_MINUTES = [
    {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
    for taint in ("not-ready", "unreachable")
]


def chat(name: str = "chat", **spec: Any) -> dict[str, Any]:
    """examples/chat.yaml under another name; each keyword replaces a top-level field of its spec, None removes it."""
    manifest: dict[str, Any] = yaml.safe_load((EXAMPLES / "chat.yaml").read_text())
    manifest["metadata"]["name"] = name
    for field, value in spec.items():
        if value is None:
            manifest["spec"].pop(field, None)
        else:
            manifest["spec"][field] = value
    return manifest


def static(name: str, replicas: int, **spec: Any) -> dict[str, Any]:
    """The example with a fixed number of replicas."""
    return chat(name, replicas=replicas, autoscaling=None, **spec)


def as_yaml(manifest: dict[str, Any]) -> str:
    """For `kubectl apply -f -`."""
    return str(yaml.safe_dump(manifest, sort_keys=False))


def deterministic(name: str, replicas: int, **spec: Any) -> dict[str, Any]:
    """The example with a fixed number of replicas whose texts are the same in any batch, with room for 64 streams."""
    runtime = chat()["spec"]["runtime"] | {"deterministic": True, "maxNumSeqs": 64, "kvCache": {"bytes": "96Mi"}}
    return static(name, replicas, runtime=runtime, **spec)
