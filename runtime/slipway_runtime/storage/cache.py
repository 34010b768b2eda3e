"""The model cache: fetched models on this machine, shared by every process and pod that mounts it (ADR 0018).

    models/<key>/      a complete, checked model; `key` is a digest, so two addresses of one content share it
    partial/<key>/     a download in progress; becomes models/<key> by one rename
    locks/<key>.lock   exclusive during download and eviction, shared while in use; its mtime is the time of last use
    names/<name>.json  the key that an address resolved to last

Locks are the kernel's (`flock`): they end with the process that held them, however it ended. A file that two models
share is one file with two names (a hard link), so nothing counts references but the file system.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import random
import shutil
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from slipway_runtime.storage.source import OutOfSpaceError, RemoteFile

log = structlog.get_logger()

MANIFEST: Final = ".slipway.json"
_GIB: Final = 1 << 30


def content_key(files: Sequence[RemoteFile]) -> str:
    """The cache key of a model: a digest of the names, sizes and identities of its files."""
    lines = sorted(f"{file.name}\0{file.size}\0{file.identity}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


@dataclass(slots=True)
class _Hold:
    """A shared lock of this process on a model, and the number of its users."""

    descriptor: int
    users: int = 1


class Cache:
    """The models of one folder; `limit_bytes` 0: only the disk limits it, and nothing is ever evicted."""

    _held: Final[dict[Path, _Hold]] = {}  # models that this process uses
    _holding = threading.Lock()

    def __init__(self, root: Path, limit_bytes: int = 0) -> None:
        self._root = root
        self._limit = limit_bytes
        for part in ("models", "partial", "locks", "names"):
            (root / part).mkdir(parents=True, exist_ok=True)

    # --- addresses

    def remember(self, address: str, key: str) -> None:
        """Store the key that this address resolves to now."""
        name = self._name(address)
        fresh = name.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        fresh.write_text(json.dumps({"address": address, "key": key}))
        fresh.rename(name)

    def remembered(self, address: str) -> str | None:
        """The key that this address resolved to last; None: unknown."""
        try:
            return str(json.loads(self._name(address).read_text())["key"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _name(self, address: str) -> Path:
        return self._root / "names" / f"{hashlib.sha256(address.encode()).hexdigest()[:32]}.json"

    # --- models in use

    def hold(self, key: str) -> Path | None:
        """The model's folder, which stays until this process ends or releases it as often as it was held; None: the
        model is not in the cache, or is incomplete.

        Waits for a process that is fetching the model.
        """
        folder = self._root / "models" / key
        if self._hold_again(folder):
            return folder
        handle = self._open(key)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process fetches this model, waiting for it", key=key)
            fcntl.flock(handle, fcntl.LOCK_SH)
        if not (folder / MANIFEST).is_file():
            os.close(handle)
            return None
        os.utime(handle)  # the time of the last use
        with self._holding:
            if folder not in self._held:
                self._held[folder] = _Hold(handle)
                return folder
        os.close(handle)  # another thread was faster
        return self.hold(key)

    def _hold_again(self, folder: Path) -> bool:
        with self._holding:
            if (hold := self._held.get(folder)) is not None:
                hold.users += 1
            return hold is not None

    def release(self, folder: Path) -> None:
        """Drop one user of the model; without users it stays in the cache until it is evicted for space."""
        with self._holding:
            if (hold := self._held.get(folder)) is None:
                return
            hold.users -= 1
            if not hold.users:
                os.close(self._held.pop(folder).descriptor)

    # --- downloads

    @contextlib.contextmanager
    def coming(self, key: str) -> Iterator[Path | None]:
        """The partial folder, locked for this process; None: another process has completed the model meanwhile."""
        handle = self._open(key)
        try:
            if not self._lock_to_fetch(handle, key):
                yield None
                return
            partial = self._root / "partial" / key
            partial.mkdir(exist_ok=True)
            yield partial
        finally:
            os.close(handle)

    def _lock_to_fetch(self, handle: int, key: str) -> bool:
        """Take the exclusive lock of a model; False, without it: the model is complete.

        A blocking LOCK_EX could wait for ever: whoever fetched the model holds it shared for the life of its process,
        and may take that lock before this one is granted. A shared lock is granted as soon as the fetch has ended.
        """
        complete = self._root / "models" / key / MANIFEST
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fcntl.flock(handle, fcntl.LOCK_SH)
                if complete.is_file():
                    return False
                fcntl.flock(handle, fcntl.LOCK_UN)  # the fetch failed: one of those that wait is the next to try
                time.sleep(random.uniform(0, 0.01))  # noqa: S311  two that still hold it shared would refuse each other
            else:
                return not complete.is_file()

    def finish(self, key: str, address: str, files: Sequence[RemoteFile], sha256: dict[str, str]) -> None:
        """Write the manifest and move the complete, checked model to `models`."""
        partial = self._root / "partial" / key
        about = {
            file.name: {"size": file.size, "sha256": sha256[file.name], "identity": file.identity} for file in files
        }
        for file in files:
            (partial / file.name).chmod(0o444)  # shared by all processes on this machine
        (partial / MANIFEST).write_text(json.dumps({"address": address, "files": about}, indent=1))
        folder = self._root / "models" / key
        shutil.rmtree(folder, ignore_errors=True)  # without a manifest: left over from an interrupted eviction
        partial.rename(folder)

    def link_known(self, files: Sequence[RemoteFile], partial: Path) -> None:
        """Hard-link identical files of other cached models, so that a new revision downloads only what has changed."""
        known: dict[tuple[str, int], Path] = {}
        for folder in (self._root / "models").iterdir():
            for name, about in manifest(folder).items():
                known[about.get("identity", ""), about.get("size", -1)] = folder / name
        for file in files:
            source, target = known.get((file.identity, file.size)), partial / file.name
            if source is not None and not target.exists():
                with contextlib.suppress(OSError):  # evicted meanwhile, or no hard links here: it is downloaded
                    os.link(source, target)

    # --- eviction

    def make_room(self, needed: int, missing: int, key: str) -> None:
        """Evict least recently used models until `needed` more bytes fit; never one that a process uses or fetches.

        missing: bytes that the disk does not hold yet; more than `needed` where partial files have holes.
        """
        if self._limit:
            used = self._used()
            for folder in self._by_last_use(besides=key) if used + needed > self._limit else ():
                if used + needed <= self._limit:
                    break
                used -= self._evict(folder, used)
            if used + needed > self._limit:
                raise OutOfSpaceError(
                    f"the model needs {_gib(needed)}, and {_gib(used)} of the cache's limit of {_gib(self._limit)} "
                    "are in use"
                )
        free = shutil.disk_usage(self._root).free
        if missing > free:
            raise OutOfSpaceError(f"the model needs {_gib(missing)}, and the disk of the cache has {_gib(free)} left")

    def _used(self) -> int:
        return size_of([self._root / "models", self._root / "partial"])

    def _by_last_use(self, besides: str) -> list[Path]:
        folders = [*(self._root / "partial").iterdir(), *(self._root / "models").iterdir()]
        used = {folder: self._last_use(folder.name) for folder in folders if folder.name != besides}
        return sorted(used, key=lambda folder: used[folder])

    def _last_use(self, key: str) -> float:
        try:
            return (self._root / "locks" / f"{key}.lock").stat().st_mtime
        except OSError:
            return 0.0

    def _evict(self, folder: Path, used: int) -> int:
        """Remove a model that no process holds; returns the bytes that were freed."""
        handle = self._open(folder.name)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0  # in use, or being fetched
        try:
            (folder / MANIFEST).unlink(missing_ok=True)  # first: a model without a manifest counts as incomplete
            shutil.rmtree(folder, ignore_errors=True)
            freed = used - self._used()  # less than its size where another model shares its files
        finally:
            os.close(handle)
        log.info("evicted a model from the cache", key=folder.name, bytes=freed)
        return freed

    def _open(self, key: str) -> int:
        path = self._root / "locks" / f"{key}.lock"
        is_new = not path.exists()
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        if is_new:
            os.utime(handle, (time.time(), time.time()))
        return handle


def manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """Size, SHA-256 and identity of each file of a cached model; empty for a folder without a manifest."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return files if isinstance(files, dict) else {}


def size_of(folders: Sequence[Path]) -> int:
    """Bytes of all files in the folders; hard links are counted once, partial files with their full size."""
    seen: dict[int, int] = {}
    for folder in folders:
        for path in folder.rglob("*"):
            with contextlib.suppress(OSError):  # gone in the meantime
                about = path.lstat()
                if stat.S_ISREG(about.st_mode):
                    seen[about.st_ino] = about.st_size
    return sum(seen.values())


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"
