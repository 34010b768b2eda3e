"""Where fetched models lie on this machine, and that only one process at a time fetches the same one.

The lock is the kernel's (`flock`): it ends with the process that held it, however that process ended.
"""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import structlog

log = structlog.get_logger()


def hub_directory(cache: Path) -> Path:
    """Where models from the hub lie, in the hub's own layout: files by content, revisions as links to them."""
    return cache / "hub"


def is_verified(cache: Path, snapshot: Path) -> bool:
    """Whether the files of a snapshot had their checksums before; reading 140 GB again would cost minutes."""
    return _mark(cache, snapshot).is_file()


def remember_verified(cache: Path, snapshot: Path) -> None:
    """From now on these files are trusted: the cache belongs to this pod or to this user."""
    mark = _mark(cache, snapshot)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()


def _mark(cache: Path, snapshot: Path) -> Path:
    repository, commit = snapshot.parent.parent.name, snapshot.name  # models--org--name/snapshots/<commit>
    return cache / "verified" / f"{repository}@{commit}"


@contextlib.contextmanager
def only_one(cache: Path, what: str) -> Iterator[None]:
    """Hold the lock of one model; a second process waits, and then finds everything there."""
    locks = cache / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(what.encode()).hexdigest()[:32]
    handle = os.open(locks / f"{name}.lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process fetches this model, waiting for it", model=what)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
