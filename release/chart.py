"""Packages the chart with the registry and the digests of a release in its values, and renders it as one manifest."""

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import yaml

ROOT: Final = Path(__file__).resolve().parent.parent
CHART: Final = ROOT / "charts" / "slipway"


def pinned(values: str, registry: str, digests: Mapping[str, str]) -> str:
    """The text of values.yaml with the registry, and with the digests of the images by their part; comments stay.

    Raises LookupError for a part whose image has no value.
    """
    wanted = {("image", "registry"): registry} | {(part, "image", "digest"): one for part, one in digests.items()}
    marks = [(_scalar(yaml.compose(values), path), text) for path, text in wanted.items()]
    for node, text in sorted(marks, key=lambda one: one[0].start_mark.index, reverse=True):
        values = values[: node.start_mark.index] + json.dumps(text) + values[node.end_mark.index :]
    return values


def package(version: str, registry: str, digests: Mapping[str, str], folder: Path, *, helm: str = "helm") -> Path:
    """The chart as `helm push` takes it: `slipway-VERSION.tgz` in the folder. Raises CalledProcessError."""
    copy = folder / "chart" / "slipway"
    shutil.copytree(CHART, copy)
    try:
        values = copy / "values.yaml"
        values.write_text(pinned(values.read_text(), registry, digests))
        _run(helm, "package", copy, "--version", version, "--app-version", version, "--destination", folder)
    finally:
        shutil.rmtree(copy.parent)
    return folder / f"slipway-{version}.tgz"


def render(packaged: Path, namespace: str, *, helm: str = "helm") -> str:
    """Everything that the packaged chart installs with its defaults, with the namespace, as one manifest."""
    made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    rendered = _run(helm, "template", "slipway", packaged, "--namespace", namespace)
    return f"# kubectl apply --server-side -f install.yaml\n{yaml.safe_dump(made, sort_keys=False)}---\n{rendered}"


def _scalar(node: yaml.Node | None, path: tuple[str, ...]) -> yaml.Node:
    for name in path:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        node = next((value for key, value in pairs if key.value == name), None)
    if not isinstance(node, yaml.ScalarNode):
        raise LookupError(f"values.yaml has no {'.'.join(path)}")
    return node


def _run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
