"""Writes the archive of an image with one program in it, as `docker save` does. Pure Python; no daemon."""

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping
from pathlib import Path

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def write(archive: Path, image: str, program: Path, *arguments: str, user: str = "65532:65532") -> None:
    """Write an image called `image` whose only file is `program`; its entrypoint is the program with `arguments`."""
    layer = _tar({program.name: program.read_bytes()}, mode=0o755)
    config = {
        "architecture": ARCHITECTURES[platform.machine()],
        "os": "linux",
        "config": {"Entrypoint": [f"/{program.name}", *arguments], "User": user},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [image], "Layers": ["layer.tar"]}]
    files = {"manifest.json": _json(manifest), "config.json": _json(config), "layer.tar": layer}
    archive.write_bytes(_tar(files, mode=0o644))


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _tar(files: Mapping[str, bytes], mode: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
