"""Writes a support bundle: objects, pods, events and versions of one namespace, without secrets and without prompts.

Removed before anything is written: values of environment variables, arguments of containers, chat templates, warm
prompts and prompts of gates. Secrets and ConfigMaps are not read at all.
"""

import json
import tarfile
from collections.abc import Mapping
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any, Final

REMOVED: Final = "<removed>"
# Fields whose text may be a prompt or a secret, wherever they stand in an object.
PRIVATE_FIELDS: Final = frozenset({"chatTemplate", "content", "prompt", "mustMatch", "args", "command", "value"})
PRIVATE_ANNOTATIONS: Final = frozenset({"kubectl.kubernetes.io/last-applied-configuration"})


def redact(value: Any) -> Any:
    """The same object without texts that may be secret or private; its structure stays."""
    if isinstance(value, Mapping):
        return {
            key: REMOVED if key in PRIVATE_FIELDS | PRIVATE_ANNOTATIONS and one is not None else redact(one)
            for key, one in value.items()
            if key != "managedFields"
        }
    if isinstance(value, list):
        return [redact(one) for one in value]
    return value


def write_bundle(path: Path, files: Mapping[str, Any]) -> list[str]:
    """Writes `name -> object` as JSON files of a tar.gz; returns their names."""
    made = datetime.now(UTC)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            data = json.dumps(redact(content), indent=1, sort_keys=True, default=str).encode()
            entry = tarfile.TarInfo(f"slipway-bundle/{name}.json")
            entry.size, entry.mtime, entry.mode = len(data), int(made.timestamp()), 0o600
            archive.addfile(entry, BytesIO(data))
    return list(files)
