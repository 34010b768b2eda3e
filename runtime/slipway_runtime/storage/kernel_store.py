"""Compiled kernels that the replicas of a service share on a node: sealed files in the model cache (ADR 158).

    kernels/<service>/<toolchain>/<kernel>    a seal of 32 bytes, then the files of one compiled kernel

Compiled kernels are code, and other pods may write to the folder. So a file is used only if its seal is the HMAC of its
content, name and toolchain under the key of the service, and it is checked in memory: what is used are the bytes that
were checked, never the file. Whatever does not verify is ignored, counted and compiled anew.

A file becomes visible by one rename. There are no locks: a process that does not end would hold up all others, and
everything that a race can do is a kernel compiled twice. Any failure to write stops the writing, never the serving.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import structlog

from slipway_runtime.storage.cache import size_of

log = structlog.get_logger()

FOLDER: Final = "kernels"
LIMIT_BYTES: Final = 1 << 30  # of all services of a namespace on a node; a kernel takes some tens of KB
LARGEST_BYTES: Final = 16 << 20  # of one file; larger ones are neither used nor written
SEAL_BYTES: Final = hashlib.sha256().digest_size
LOOK_BYTES: Final = LIMIT_BYTES // 16  # after so many written bytes the folder is measured again: others write too
ABANDONED_SECONDS: Final = 3600.0  # a file that is not complete after so long belongs to a process that has ended
_INCOMPLETE: Final = ".incomplete-"
_FILES: Final = msgspec.msgpack.Decoder(dict[str, bytes])


@dataclass(slots=True)
class KernelCounts:
    """Compiled kernels of this process, by their origin."""

    compiled: int = 0
    shared: int = 0
    """Read from the folder, so not compiled."""
    refused: int = 0
    """Found in the folder and not used, because they did not verify."""


class KernelStore:
    """The shared folder of one service and toolchain.

    key: that of the service, known to its replicas and to the operator.
    toolchain: everything that a compiled kernel depends on besides its own source, as text.
    """

    def __init__(self, root: Path, key: bytes, toolchain: str, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self.counts = KernelCounts()
        self._root = root
        self._limit = limit_bytes
        self._key = hmac.digest(key, b"seal", "sha256")
        self._toolchain = hashlib.sha256(toolchain.encode()).digest()
        self._folder = root / hmac.digest(key, b"folder", "sha256").hex()[:32] / self._toolchain.hex()[:32]
        self._room = 0
        self.fault = ""
        """Why nothing is written to the folder; empty: it is."""
        try:
            self._open()
        except OSError as error:
            self._stop_writing(error)

    def load(self, kernel: str) -> dict[str, bytes] | None:
        """The files of a compiled kernel, by name; None: it is not there, or does not verify."""
        body, fault = self._verified(kernel)
        if fault:
            self.counts.refused += 1
            log.warning(
                "deleted a compiled kernel from the model cache, which is compiled anew",
                reason=fault,
                path=str(self._folder / kernel),
            )
            with contextlib.suppress(OSError):
                (self._folder / kernel).unlink()  # its size would count against the limit
        if body is None:
            return None
        self.counts.shared += 1
        return _FILES.decode(body)

    def save(self, kernel: str, files: Mapping[str, bytes]) -> None:
        """Store the files of a kernel that this process has compiled, unless a verified one is there by now."""
        self.counts.compiled += 1
        body = msgspec.msgpack.encode(files)
        size = SEAL_BYTES + len(body)
        if self.fault or size > LARGEST_BYTES or self._verified(kernel)[0] is not None:
            return
        try:
            if size > self._room:
                self._room = self._make_room(size)
            self._write(kernel, self._seal(kernel, body) + body)
        except OSError as error:
            self._stop_writing(error)
        else:
            self._room -= size

    def _open(self) -> None:
        """Make the folder, mark it as used now, and delete what a process that has ended left incomplete."""
        for folder in (self._root, self._folder.parent, self._folder):
            folder.mkdir(exist_ok=True)
            if folder.is_symlink():
                raise OSError(f"{folder} is a link")
        os.utime(self._folder)
        for path in self._folder.glob(f"{_INCOMPLETE}*"):
            with contextlib.suppress(OSError):
                if path.lstat().st_mtime < time.time() - ABANDONED_SECONDS:
                    path.unlink()

    def _verified(self, kernel: str) -> tuple[bytes | None, str]:
        """The content of a stored kernel; or None, and why it must not be used, empty if there is none."""
        try:
            sealed = _read(self._folder / kernel)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return None, ""
        except OSError as error:
            return None, error.strerror or str(error)
        seal, body = sealed[:SEAL_BYTES], sealed[SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(kernel, body)):
            return None, "its seal is not the one of this service and toolchain: it was changed, or is not complete"
        return body, ""

    def _seal(self, kernel: str, body: bytes) -> bytes:
        name = hashlib.sha256(kernel.encode()).digest()  # of a fixed length, like the toolchain: no field runs over
        return hmac.digest(self._key, self._toolchain + name + body, "sha256")

    def _write(self, kernel: str, sealed: bytes) -> None:
        fresh = self._folder / f"{_INCOMPLETE}{secrets.token_hex(8)}"
        try:
            handle = os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o444)
            with open(handle, "wb") as file:
                file.write(sealed)
            fresh.rename(self._folder / kernel)
        except OSError:
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise

    def _make_room(self, needed: int) -> int:
        """Delete the folders that were not used for longest until `needed` bytes fit; the bytes that may be written."""
        used = size_of([self._root])
        others = sorted(self._other_folders(), key=_last_use)
        while used + needed > self._limit and others:
            oldest = others.pop(0)
            shutil.rmtree(oldest, ignore_errors=True)
            log.info("evicted compiled kernels from the model cache", folder=str(oldest))
            used = size_of([self._root])
        if used + needed > self._limit:
            raise OSError(f"{used} bytes of the limit of {self._limit} are in use")
        return max(needed, min(self._limit - used, LOOK_BYTES))

    def _other_folders(self) -> Iterator[Path]:
        for service in _folders(self._root):
            yield from (folder for folder in _folders(service) if folder != self._folder)

    def _stop_writing(self, error: OSError) -> None:
        self.fault = error.strerror or str(error)
        log.warning(
            "compiled kernels are not written to the model cache: other replicas of this node compile their own",
            reason=self.fault,
            folder=str(self._root),
        )


def _read(path: Path) -> bytes:
    """The content of a regular file. Neither follows a link nor waits for the writer of a pipe."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError("it is not a file")
        return file.read(LARGEST_BYTES)  # the rest of a larger one is missing from its seal


def _folders(folder: Path) -> list[Path]:
    """The folders in a folder, without links: nothing outside of it may be deleted."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return [folder / entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []


def _last_use(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return folder.stat().st_mtime
    return 0.0
