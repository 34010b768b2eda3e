"""Files and batches on a volume, one folder for each tenant. Everything that a restart must find again is here.

    <directory>/<tenant>/files/<id>.json       what the API says of a file
    <directory>/<tenant>/files/<id>.jsonl      its content
    <directory>/<tenant>/batches/<id>.json     what the API says of a batch
    <directory>/<tenant>/batches/<id>.lock     locked by the gateway that runs it

Answers are appended to the batch's output and error files line by line; what is in them is done. A last line without
its end was being written when its gateway died: it is cut off, and its request is made again. Several gateways may
share the directory (a ReadWriteMany volume): a lock, which the end of its process releases, decides which runs a batch.
"""

import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ANYONE_FOLDER: Final = "_anyone"  # no tenant can be called so
ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})

_ID: Final = re.compile(r"(file-|batch_)[0-9a-f]{24}")

Record = dict[str, Any]


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return prefix + secrets.token_hex(12)


@dataclass(frozen=True, slots=True)
class Folder:
    """The files and batches of one tenant."""

    path: Path

    def file(self, id: str) -> Record | None:
        """What the API says of a file; None: there is no such file."""
        return _read(self._path("files", id, ".json"))

    def batch(self, id: str) -> Record | None:
        """What the API says of a batch; None: there is no such batch."""
        return _read(self._path("batches", id, ".json"))

    def content(self, id: str) -> Path:
        """Where the content of a file is."""
        path = self._path("files", id, ".jsonl")
        assert path is not None, "ids of ours are valid"
        return path

    def files(self) -> list[Record]:
        """All files, the newest first."""
        return _all(self.path / "files")

    def batches(self) -> list[Record]:
        """All batches, the newest first."""
        return _all(self.path / "batches")

    def usage(self) -> tuple[int, int]:
        """The bytes of all contents, unfinished uploads included, and the number of files."""
        sizes = [size for path in (self.path / "files").glob("*.jsonl") if (size := _size(path)) is not None]
        return sum(sizes), len(sizes)

    def create_file(self, filename: str, purpose: str, now: int) -> Record:
        """The record of a new file, whose content is empty and which the API does not show before `save_file`."""
        (self.path / "files").mkdir(parents=True, exist_ok=True)
        record: Record = {
            "id": new_id("file-"), "object": "file", "bytes": 0, "created_at": now, "filename": filename,
            "purpose": purpose, "status": "processed",
        }  # fmt: skip
        self.content(record["id"]).touch()
        return record

    def save_file(self, record: Record) -> Record:
        """Show a file whose content is complete."""
        record = record | {"bytes": self.content(record["id"]).stat().st_size}
        _write(self.path / "files" / f"{record['id']}.json", record)
        return record

    def delete_file(self, id: str) -> None:
        """Delete a file and its content."""
        for suffix in (".json", ".jsonl"):
            if (path := self._path("files", id, suffix)) is not None:
                path.unlink(missing_ok=True)

    def save_batch(self, record: Record) -> Record:
        """Write what the API says of a batch."""
        (self.path / "batches").mkdir(parents=True, exist_ok=True)
        _write(self.path / "batches" / f"{record['id']}.json", record)
        return record

    def forget_ended(self, before: float, most: int) -> int:
        """Delete the records of batches that ended before this time, and of all but the `most` newest; how many."""
        ended = [record for record in self.batches() if record["status"] in ENDED]
        old = [one for at, one in enumerate(ended) if at >= most or one[f"{one['status']}_at"] < before]
        for record in old:
            for suffix in (".json", ".cancel", ".lock"):
                (self.path / "batches" / f"{record['id']}{suffix}").unlink(missing_ok=True)
        return len(old)

    def ask_to_cancel(self, id: str) -> None:
        """Leave the wish for the gateway that runs the batch: nobody else writes its record."""
        (self.path / "batches" / f"{id}.cancel").touch()

    def is_cancelled(self, id: str) -> bool:
        """Whether somebody asked to cancel the batch."""
        return (self.path / "batches" / f"{id}.cancel").exists()

    def lock(self, id: str) -> int | None:
        """Lock a batch for this process; a descriptor that `os.close` unlocks, or None: another one runs it."""
        descriptor = os.open(self.path / "batches" / f"{id}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        return descriptor

    def _path(self, kind: str, id: str, suffix: str) -> Path | None:
        """None: nothing of ours is called so, least of all `../x`."""
        return self.path / kind / f"{id}{suffix}" if _ID.fullmatch(id) else None


class BatchStore:
    """The folders of all tenants."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ended: dict[Path, set[str]] = {}  # by folder: names of records that need not be read again
        self.records_read = 0  # by `unfinished`, so far

    def folder(self, tenant: str) -> Folder:
        """The folder of a tenant; empty: of anyone. Names of tenants are valid names of folders."""
        return Folder(self._directory / (tenant or ANYONE_FOLDER))

    def unfinished(self) -> list[tuple[str, str]]:
        """Tenant and id of each batch that has not ended, the oldest first."""
        found = []
        for folder in self.folders():
            batches = folder.path / "batches"
            known, seen = self._ended.get(batches, set()), set()
            for name in _names(batches):
                if name in known:
                    seen.add(name)
                    continue
                record = _read(batches / name)
                self.records_read += 1
                if record is None:
                    continue
                if record["status"] in ENDED:
                    seen.add(name)
                else:
                    tenant = folder.path.name
                    found.append((record["created_at"], "" if tenant == ANYONE_FOLDER else tenant, record["id"]))
            self._ended[batches] = seen  # a batch that has ended never changes: its record is read once
        return [(tenant, id) for _, tenant, id in sorted(found)]

    def folders(self) -> list[Folder]:
        """The folders of all tenants that have one."""
        return [Folder(path.parent) for path in self._directory.glob("*/batches")]


def finished_lines(path: Path) -> Iterator[Record]:
    """The answers that are already in a results file; a torn last line is cut off."""
    whole = 0
    with path.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            yield json.loads(line)
    if whole < path.stat().st_size:
        os.truncate(path, whole)


def _names(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(".json")] if folder.is_dir() else []


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # deleted in the meantime
        return None


def _all(folder: Path) -> list[Record]:
    records = [record for path in folder.glob("*.json") if (record := _read(path)) is not None]
    return sorted(records, key=lambda record: (record["created_at"], record["id"]), reverse=True)


def _read(path: Path | None) -> Record | None:
    try:
        found: Record | None = json.loads(path.read_bytes()) if path is not None else None
    except FileNotFoundError:
        return None
    return found


def _write(path: Path, record: Record) -> None:
    """Whole or not at all, also when this process is killed."""
    beside = path.with_suffix(f".{secrets.token_hex(4)}.new")
    with beside.open("w") as file:
        json.dump(record, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
