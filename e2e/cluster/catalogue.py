"""The catalogue of images and their commands: `images.yaml`, resolved for one checkout and its environment."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster.paths import SYSTEM_PATH

DEFAULT_USER = 65532
CODE = ("api", "kube", "operator", "runtime", "gateway", "agent")  # folders of the checkout with code that images run


@dataclass(frozen=True)
class Image:
    """An image as a container needs it; nothing is stored, all is bound from the machine, read-only."""

    name: str
    command: list[str]  # the entrypoint: a pod's `args` are appended, its `command` replaces it
    user: int
    env: dict[str, str]
    binds: dict[str, str]  # path in the container -> path on the machine
    files: str = ""  # the folder of the machine that an image volume shows

    @property
    def id(self) -> str:
        """The id under which the kubelet knows a pulled image."""
        return "sha256:" + hashlib.sha256(self.name.encode()).hexdigest()


@dataclass(frozen=True)
class Environment:
    """Sources of the images: a checkout, and the virtual environment in which it is installed."""

    checkout: Path
    python: Path  # the environment's interpreter
    prefixes: tuple[Path, ...]  # folders that interpreter needs
    cache: Path  # where the environments of peers are

    def fill(self, text: str) -> str:
        """Replace {python}, {bin}, {checkout} and {version}."""
        return text.format(
            python=self.python, bin=self.python.parent, checkout=self.checkout, version=version_of(self.checkout)
        )


class Catalogue:
    """Images by name, and by the id that the kubelet uses once it has pulled one."""

    def __init__(self, images: Mapping[str, Any], environment: Environment) -> None:
        self.images = [_image(environment.fill(name), entry, environment) for name, entry in images.items()]
        self._found = {key: image for image in self.images for key in (image.name, image.id)}

    @classmethod
    def load(cls, path: Path, environment: Environment) -> "Catalogue":
        return cls(yaml.safe_load(path.read_text()), environment)

    def find(self, name: str) -> Image | None:
        """The image of that name or id; None when it cannot be pulled."""
        return self._found.get(name.removeprefix("docker.io/"))


def version_of(checkout: Path) -> str:
    """The version of Slipway in a checkout: the tag of its images."""
    source = (checkout / "api" / "slipway_api" / "__init__.py").read_text()
    match = re.search(r'^__version__ = "([^"]+)"', source, re.MULTILINE)
    if match is None:
        raise ValueError("api/slipway_api/__init__.py does not state __version__")
    return match[1]


def _image(name: str, entry: Mapping[str, Any], environment: Environment) -> Image:
    code = [environment.checkout / folder for folder in CODE] if entry.get("code") else []
    needed = {str(path) for path in (*environment.prefixes, *code)}
    peer = environment.cache / "bench" / "peers" / entry["peer"] if "peer" in entry else None
    needed |= {str(peer)} if peer is not None else set()
    own = {path: path for path in sorted(needed) if not f"{path}/".startswith("/usr/")}  # every container has /usr
    extra = {target: environment.fill(source) for target, source in entry.get("binds", {}).items()}
    path = f"{environment.python.parent}:{SYSTEM_PATH}" if entry.get("code") else SYSTEM_PATH
    path = f"{peer / 'bin'}:{path}" if peer is not None else path
    return Image(
        name=name,
        command=[environment.fill(word) for word in entry.get("command", [])],
        user=entry.get("user", DEFAULT_USER),
        env={"PATH": path, "LANG": "C.UTF-8", **entry.get("env", {})},
        binds=own | extra,
        files=environment.fill(entry.get("files", "")),
    )
