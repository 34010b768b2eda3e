"""A LoRA adapter's files on disk: their paths, and the digest that identifies an adapter.

No torch: the API process identifies adapters by their digest, and refuses early what the engine would refuse.

| file                        | content                                       |
|-----------------------------|-----------------------------------------------|
| `adapter_config.json`       | PEFT's description: rank, scaling, modules    |
| `adapter_model.safetensors` | the matrices                                  |
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
MAX_CONFIG_BYTES: Final = 1 << 20
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "pytorch_model.bin")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


class AdapterRefusedError(Exception):
    """An adapter that this engine cannot serve; the message is a sentence for the user."""


class AdapterNotFoundError(AdapterRefusedError):
    """The adapter's path does not exist."""


@dataclass(frozen=True)
class AdapterFiles:
    """Paths of an adapter's two files, links resolved."""

    config: Path
    weights: Path


def check_adapter_name(name: str) -> None:
    """Raise AdapterRefusedError for an invalid name: names appear in URLs, metrics and logs."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise AdapterRefusedError(
            "an adapter's name is made of letters, digits, '.', '_' and '-', begins with a letter or digit, has no "
            "'..' in it, and is at most 253 characters long"
        )


def adapter_files(path: Path, roots: Sequence[Path] = ()) -> AdapterFiles:
    """The files of the adapter in the directory `path`; with `roots`, only inside one of these directories."""
    folder = path.resolve()
    if roots and not any(folder.is_relative_to(root.resolve()) for root in roots):
        raise AdapterRefusedError("the adapter lies outside the directories that adapters may be loaded from")
    if not folder.is_dir():
        raise AdapterNotFoundError("there is no directory at the adapter's path")
    if not (folder / WEIGHTS).exists():
        for name in _PICKLES:
            if (folder / name).exists():
                raise AdapterRefusedError(
                    f"the adapter is pickled ({name}): loading it could run code. Only safetensors is read; save the "
                    "adapter with safe_serialization=True"
                )
    return AdapterFiles(_file(folder, CONFIG), _file(folder, WEIGHTS))


def _file(folder: Path, name: str) -> Path:
    file = (folder / name).resolve()
    allowed = [folder]
    if folder.parent.name == "snapshots":  # Hugging Face cache: a revision is a folder of links to blobs
        allowed.append(folder.parent.parent / "blobs")
    if not any(file.is_relative_to(place) for place in allowed):
        raise AdapterRefusedError(f"{name} is a link out of the adapter's directory")
    if not file.is_file():
        raise AdapterRefusedError(f"there is no {name} in the adapter's directory")
    return file


def adapter_digest(path: Path, roots: Sequence[Path] = ()) -> str:
    """`sha256:…` of an adapter's content, at any path the same: the adapter's only name inside the engine.

    It is the output of `sha256sum adapter_config.json adapter_model.safetensors | sha256sum`.
    """
    files = adapter_files(path, roots)
    return digest_of(_sha256(files.config), _sha256(files.weights))


def digest_of(config_sha256: str, weights_sha256: str) -> str:
    """An adapter's digest from the SHA-256 digests of its files, in hex."""
    listing = f"{config_sha256}  {CONFIG}\n{weights_sha256}  {WEIGHTS}\n"
    return f"sha256:{hashlib.sha256(listing.encode()).hexdigest()}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
