"""Writes archives of images, as `docker save` does. Pure Python; no daemon."""

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
MANIFEST = "manifest.json"


def write(archive: Path, image: str, program: Path, *arguments: str, user: str = "65532:65532") -> None:
    """Write an image called `image` whose only file is `program`; its entrypoint is the program with `arguments`."""
    layer = _tar({program.name: program.read_bytes()}, mode=0o755)
    config = {
        "architecture": ARCHITECTURES[platform.machine()],
        "os": "linux",
        "config": {"Entrypoint": [f"/{program.name}", *arguments], "User": user},
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [image], "Layers": ["layer.tar"]}]
    archive.write_bytes(_tar({MANIFEST: _json(manifest), "config.json": _json(config), "layer.tar": layer}, mode=0o644))


def derive(source: Path, archive: Path, image: str, entrypoint: Sequence[str], folders: Mapping[str, Path]) -> None:
    """Write an image with the layers of another archive, another entrypoint, and copies of folders."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, folder in folders.items():
            tar.add(folder, path.lstrip("/"), filter=_owned_by_root)
    layer = buffer.getvalue()
    with tarfile.open(source) as old, tarfile.open(archive, "w") as new:
        (manifest,) = json.loads(_member(old, MANIFEST))
        config: dict[str, Any] = json.loads(_member(old, manifest["Config"]))
        config["config"]["Entrypoint"] = list(entrypoint)
        config["rootfs"]["diff_ids"].append(_digest(layer))
        config.pop("history", None)  # it must have an entry for each layer, and may be absent
        replaced = {"config.json": _json(config), "added.tar": layer}
        manifest |= {"Config": "config.json", "RepoTags": [image], "Layers": [*manifest["Layers"], "added.tar"]}
        for name, content in {MANIFEST: _json([manifest]), **replaced}.items():
            _add(new, name, content, mode=0o644)
        for entry in old:
            if entry.name not in (MANIFEST, "repositories", *replaced):
                new.addfile(entry, old.extractfile(entry) if entry.isfile() else None)


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    assert file is not None, name
    return file.read()


def _owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    return entry


def _digest(layer: bytes) -> str:
    return f"sha256:{hashlib.sha256(layer).hexdigest()}"


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _tar(files: Mapping[str, bytes], mode: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            _add(tar, name, content, mode)
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    tar.addfile(entry, io.BytesIO(content))
