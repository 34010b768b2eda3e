"""Manifests for a real API server: what it takes, and what it says to what it does not take."""

import json
from typing import Any

import pytest

from e2e.cluster.access import Access, CommandError

NAMESPACE = "crd-tests"


def a_manifest(name: str = "chat", **spec: Any) -> dict[str, Any]:
    """An InferenceService; the keywords are fields of its spec."""
    return {
        "apiVersion": "slipway.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"model": {"uri": "hf://org/model@main"}} | spec,
    }


def apply(api: Access, manifest: dict[str, Any], *options: str) -> str:
    """`kubectl apply`; what it printed."""
    return api.kubectl("apply", "-f", "-", *options, stdin=json.dumps(manifest))


def stored(api: Access, name: str = "chat") -> dict[str, Any]:
    """The service as the API server has it."""
    return json.loads(api.kubectl("get", "infsvc", name, "-n", NAMESPACE, "-o", "json"))


def assert_refused(api: Access, manifest: dict[str, Any], sentence: str) -> None:
    """The manifest is refused with one complaint that holds the sentence, and nothing is stored."""
    name = manifest["metadata"]["name"]
    try:
        apply(api, manifest)
    except CommandError as refused:
        stderr = refused.stderr
    else:
        # It must not stay, or every later row would change it instead of creating one.
        api.kubectl("delete", "infsvc", name, "-n", NAMESPACE)
        pytest.fail(f"accepted; expected: {sentence}")

    answer = [line for line in stderr.splitlines() if "some validation rules were not checked" not in line]
    complaints = sum(line.count("Invalid value") + line.count("Unsupported value") for line in answer)
    assert sentence in stderr
    assert complaints <= 1, stderr
    assert api.kubectl("get", "infsvc", name, "-n", NAMESPACE, "--ignore-not-found") == ""
