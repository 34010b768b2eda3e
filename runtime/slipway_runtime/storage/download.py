"""Resumable parallel download of files into a folder: parts in threads, checksums at the end.

A file in progress is stored as two files; both are gone when it is complete:

    <name>.part     its bytes, each part at its offset; missing bytes are holes
    <name>.have     8 bytes for the size of a part, then for each part the number of its bytes on disk

Bytes are written before their count, so a killed process loses at most one piece for each thread. Damage by a crash of
the whole machine is found by the checksum.
"""

import contextlib
import errno
import hashlib
import os
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final

from slipway_runtime.storage.source import (
    BrokenFileError,
    Checksum,
    Interrupted,
    OutOfSpaceError,
    RemoteFile,
    RetryPolicy,
    Source,
    UnreachableError,
)

PART_BYTES: Final = 32 << 20
THREADS: Final = 8  # one connection rarely fills a link; with more than this, hubs begin to refuse
_COUNT: Final = struct.Struct("<Q")

OnProgress = Callable[[int, int], object]  # bytes fetched, bytes in all


class _Stopped(Exception):  # noqa: N818  another part has failed: this part ends without an error of its own
    pass


def download_files(
    source: Source,
    files: Sequence[RemoteFile],
    folder: Path,
    *,
    on_progress: OnProgress = lambda done, total: None,
    retry: RetryPolicy = RetryPolicy(),  # noqa: B008  frozen
) -> dict[str, str]:
    """Fetch the missing bytes of `files` into `folder`; returns SHA-256 by name. Blocks; safe to kill and repeat."""
    return _Download(source, files, folder, on_progress, retry).run()


class _Download:
    def __init__(
        self, source: Source, files: Sequence[RemoteFile], folder: Path, on_progress: OnProgress, retry: RetryPolicy
    ) -> None:
        self._source = source
        self._partials = [_PartialFile(file, folder) for file in files]
        self._on_progress = on_progress
        self._retry = retry
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._total = sum(file.size for file in files)
        self._done = sum(sum(partial.have) for partial in self._partials)

    def run(self) -> dict[str, str]:
        self._on_progress(self._done, self._total)
        with ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="fetch") as threads:
            # File by file, so that the check of one file runs beside the download of the next.
            work = [
                threads.submit(self._part, partial, part) for partial in self._partials for part in range(partial.parts)
            ]
            _, waiting = wait(work, return_when=FIRST_EXCEPTION)
            if waiting:
                self._stop.set()
        errors = [error for future in work if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, _Stopped):
                raise error
        return {partial.file.name: partial.sha256 for partial in self._partials}

    def _part(self, partial: "_PartialFile", part: int) -> None:
        attempt = 0
        while (missing := partial.missing(part)) is not None:
            start, end = missing
            if self._stop.is_set():
                raise _Stopped
            try:
                for piece in self._source.read(partial.file, start, end):
                    partial.take(part, piece[: end - start])
                    start += len(piece)
                    attempt = 0  # bytes arrive: only consecutive tries without any are counted
                    self._report(len(piece))
                    if self._stop.is_set():
                        raise _Stopped
                if partial.missing(part) is not None:
                    raise Interrupted("the file ended early")
            except Interrupted as interrupted:
                attempt += 1
                if attempt == self._retry.attempts:
                    raise UnreachableError(
                        f"{self._source.name}: {partial.file.name} does not come: {interrupted}, {attempt} times"
                    ) from interrupted
                if self._stop.wait(self._retry.delay(attempt, interrupted.retry_after)):
                    raise _Stopped from None
            except OSError as error:
                if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                    raise OutOfSpaceError(
                        f"{self._source.name}: the disk became full at {partial.file.name}"
                    ) from error
                raise
        with self._lock:
            partial.open_parts -= 1
            last = partial.open_parts == 0
        if last:
            partial.finish(self._source.name)

    def _report(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._on_progress(self._done, self._total)


class _PartialFile:
    """One file in progress: its parts, and how many bytes of each are on disk."""

    def __init__(self, file: RemoteFile, folder: Path) -> None:
        self.file = file
        self.sha256 = ""
        self._final = folder / file.name
        self._bytes = folder / f"{file.name}.part"
        self._counts = folder / f"{file.name}.have"
        self._part_size = size = PART_BYTES if file.in_parts else max(1, file.size)
        self._bounds = [(first, min(first + size, file.size)) for first in range(0, file.size, size)] or [(0, 0)]
        self.parts = self.open_parts = len(self._bounds)
        self.have = [0] * self.parts
        if self._final.exists() and self._final.stat().st_size == file.size:
            self.have = [end - start for start, end in self._bounds]
        elif not self._recall():
            self._bytes.write_bytes(b"")
            os.truncate(self._bytes, file.size)
            self._counts.write_bytes(_COUNT.pack(size) + bytes(8 * self.parts))

    def _recall(self) -> bool:
        """Read the counts that an earlier process left; False: none, or the sizes do not match."""
        if not self._bytes.exists() or not self._counts.exists():
            return False
        size, *counts = memoryview(self._counts.read_bytes().ljust(8, b"\0")).cast("Q")
        if size != self._part_size or len(counts) != self.parts or self._bytes.stat().st_size != self.file.size:
            return False
        self.have = [min(count, end - start) for count, (start, end) in zip(counts, self._bounds, strict=True)]
        return True

    def missing(self, part: int) -> tuple[int, int] | None:
        """Start and end of the bytes of a part that are still missing; None: the part is complete."""
        start, end = self._bounds[part]
        return (start + self.have[part], end) if start + self.have[part] < end else None

    def take(self, part: int, piece: bytes) -> None:
        """Write a piece at its offset, then its count."""
        place = self._bounds[part][0] + self.have[part]
        with self._bytes.open("r+b", buffering=0) as file:
            file.seek(place)
            view = memoryview(piece)
            while view:
                view = view[file.write(view) :]
        self.have[part] += len(piece)
        with self._counts.open("r+b", buffering=0) as counts:
            counts.seek(8 + 8 * part)
            counts.write(_COUNT.pack(self.have[part]))

    def finish(self, where: str) -> None:
        """Check the whole file and rename it; a file with a wrong checksum is removed."""
        path = self._bytes if self._bytes.exists() else self._final
        found, self.sha256 = _digests(path, self.file.checksum)
        if self.file.checksum is not None and found != self.file.checksum.digest:
            path.unlink()
            self._counts.unlink(missing_ok=True)
            raise BrokenFileError(
                f"{where}: {self.file.name} arrived broken ({self.file.checksum.algorithm} {found[:12]}…, expected "
                f"{self.file.checksum.digest[:12]}…) and was removed; it will be fetched again"
            )
        if path == self._bytes:
            with path.open("rb") as file:
                os.fsync(file.fileno())  # the content must be on disk before the name, also after a power cut
            path.rename(self._final)
        self._counts.unlink(missing_ok=True)


def _digests(path: Path, checksum: Checksum | None) -> tuple[str, str]:
    """The digest of the kind that `checksum` has, and the SHA-256, in one pass."""
    sha256 = hashlib.sha256()
    git = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    is_git = checksum is not None and checksum.algorithm == "git"
    with path.open("rb") as file:
        with contextlib.suppress(OSError):  # a hint
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while piece := file.read(4 << 20):
            sha256.update(piece)
            if is_git:
                git.update(piece)
    return (git.hexdigest() if is_git else sha256.hexdigest()), sha256.hexdigest()
