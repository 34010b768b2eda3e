"""Makes the kubectl plugin: one file for each platform, and the manifest by which krew installs it.

The file needs Python 3.11 or newer, and no package. It contains the compiled modules of every supported Python, whose
names differ, so that one file serves them all.
"""

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = ("api/slipway_api", "operator/slipway_operator", "operator/slipway_cli")
PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS: Final[Mapping[str, str]] = {  # as krew names it -> as uv names it
    "linux-amd64": "x86_64-manylinux_2_28",
    "linux-arm64": "aarch64-manylinux_2_28",
    "darwin-arm64": "aarch64-apple-darwin",
    "darwin-amd64": "x86_64-apple-darwin",
}


def build(platform: str, folder: Path, *, pythons: Sequence[str] = PYTHONS) -> Path:
    """The file `kubectl-slipway` for a platform, in a folder of its name. Raises CalledProcessError."""
    target = folder / platform / "kubectl-slipway"
    target.parent.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        site = Path(scratch, "site")
        for python in pythons:  # beside each other: only the names of compiled modules differ
            one = Path(scratch, python)
            _install(one, PLATFORMS[platform], python)
            shutil.copytree(one, site, ignore=shutil.ignore_patterns("bin"), dirs_exist_ok=True)
        for package in PACKAGES:
            shutil.copytree(
                ROOT / package,
                site / Path(package).name,
                ignore=shutil.ignore_patterns("__pycache__"),
                dirs_exist_ok=True,
            )
        subprocess.run(
            [
                *(sys.executable, "-m", "shiv", "--site-packages", site, "--entry-point", "slipway_cli.main:main"),
                *("--python", "/usr/bin/env python3", "--compressed", "--reproducible", "--output-file", target),
            ],
            check=True,
        )
    return target


def archive(plugin: Path, folder: Path) -> Path:
    """The plugin and its licence as krew takes them: `kubectl-slipway-PLATFORM.tar.gz`."""
    path = folder / f"kubectl-slipway-{plugin.parent.name}.tar.gz"
    with tarfile.open(path, "w:gz") as made:
        made.add(plugin, plugin.name)
        made.add(ROOT / "LICENSE", "LICENSE")
    return path


def krew_manifest(version: str, repository: str, archives: Iterable[Path]) -> dict[str, Any]:
    """The manifest that a krew index has as `plugins/slipway.yaml`; `repository` is OWNER/NAME on GitHub."""
    platforms = []
    for path in archives:
        system, _, machine = path.name.removeprefix("kubectl-slipway-").removesuffix(".tar.gz").partition("-")
        platforms.append(
            {
                "selector": {"matchLabels": {"os": system, "arch": machine}},
                "uri": f"https://github.com/{repository}/releases/download/v{version}/{path.name}",
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                "bin": "kubectl-slipway",
            }
        )
    return {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "slipway"},
        "spec": {
            "version": f"v{version}",
            "homepage": f"https://github.com/{repository}",
            "shortDescription": "Show, roll out, drain and plan LLM inference services",
            "description": "Shows InferenceServices of Slipway with their rollouts and scaling decisions; promotes, "
            "rolls back, drains, plans and exports them.\n",
            "caveats": "The plugin needs python3 (3.11 or newer) on the PATH.\n",
            "platforms": platforms,
        },
    }


def requirements() -> list[str]:
    """The requirements of the plugin."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["cli"]]


def _install(site: Path, platform: str, python: str) -> None:
    """Install the wheels for one Python."""
    uv = Path(sys.executable).parent / "uv"
    subprocess.run(
        [
            *(uv, "pip", "install", "--quiet", "--target", site, "--python-platform", platform),
            *("--python-version", python, "--only-binary", ":all:", "--constraint", ROOT / "constraints.txt"),
            *requirements(),
        ],
        check=True,
    )
