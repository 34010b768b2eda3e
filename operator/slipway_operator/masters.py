"""The master secrets behind all admin tokens: the operator derives a pod's token from them and stores none.

The Secret is mounted as files, `current` and during a rotation `previous`. The kubelet swaps them in place, so they
are read again when they change; what was read last stays valid while the directory cannot be read.
"""

from pathlib import Path

from slipway_api.admin_token import admin_token, token_digest


class MissingMaster(RuntimeError):  # noqa: N818  reads as a fact where it is raised
    """There is no current master: no pod could ever be asked for its signals."""


class Masters:
    """The masters in order of use: `current` first."""

    def __init__(self, directory: Path) -> None:
        self._files = (directory / "current", directory / "previous")
        self._stamps: tuple[tuple[int, int] | None, ...] = ()
        self._masters: tuple[bytes, ...] = ()

    def read(self) -> tuple[bytes, ...]:
        """One master, or two during a rotation. Raises MissingMaster when there has never been one."""
        stamps = tuple(_stamp(file) for file in self._files)
        if stamps[0] is not None and stamps != self._stamps:
            masters = [file.read_bytes().strip() for file, stamp in zip(self._files, stamps, strict=True) if stamp]
            self._masters = tuple(dict.fromkeys(master for master in masters if master))
            self._stamps = stamps
        if not self._masters:
            raise MissingMaster(f"no admin master in {self._files[0]}: mount the Secret slipway-admin-master there")
        return self._masters

    def tokens(self, namespace: str, pod: str) -> list[str]:
        """What may open the pod's admin port, the likeliest first: an older pod knows only the old master."""
        return [admin_token(master, namespace, pod) for master in self.read()]

    def digests(self, namespace: str, pod: str) -> tuple[str, ...]:
        """What a new pod is told: the digests of all the tokens that it shall accept."""
        return tuple(token_digest(token) for token in self.tokens(namespace, pod))


def _stamp(file: Path) -> tuple[int, int] | None:
    """What changes whenever the file does: the kubelet replaces the whole directory behind a link."""
    try:
        status = file.stat()
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns)
