"""Reads a secret key that is mounted as files: `current`, and during a rotation `previous`.

The kubelet swaps the files in place, so they are read again when they change. The keys that were read last stay valid
while the files cannot be read.
"""

from pathlib import Path


class MissingKey(RuntimeError):  # noqa: N818  reads as a fact where it is raised
    """There has never been a current key; the message names the file."""


class MountedKey:
    """The keys of one directory in order of use: `current` first."""

    def __init__(self, directory: Path, *, mounted_from: str) -> None:
        """`mounted_from` is the name of the Secret, for the message when it is missing."""
        self._secret = mounted_from
        self._files = (directory / "current", directory / "previous")
        self._stamps: tuple[tuple[int, int] | None, ...] = ()
        self._keys: tuple[bytes, ...] = ()

    def read(self) -> tuple[bytes, ...]:
        """One key, or two during a rotation. Raises MissingKey when there has never been one."""
        stamps = tuple(_stamp(file) for file in self._files)
        if stamps[0] is not None and stamps != self._stamps:
            self._reload(stamps)
        if not self._keys:
            raise MissingKey(f"no key in {self._files[0]}: mount the Secret {self._secret} there")
        return self._keys

    def _reload(self, stamps: tuple[tuple[int, int] | None, ...]) -> None:
        try:
            read = [file.read_bytes().strip() for file, stamp in zip(self._files, stamps, strict=True) if stamp]
        except OSError:  # removed since it was looked at: what was read last stays valid
            return
        if read[0]:
            self._keys = tuple(dict.fromkeys(key for key in read if key))
            self._stamps = stamps


def _stamp(file: Path) -> tuple[int, int] | None:
    """A value that changes whenever the file does: the kubelet replaces the whole directory behind a link."""
    try:
        status = file.stat()
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns)
