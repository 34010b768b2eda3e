"""TLS of a server port, with a certificate that is read again when its files change: of gateway, runtime and agent.

The files are those of a mounted `kubernetes.io/tls` Secret. They are looked at when a client connects, at most once a
second: new connections get the new certificate, open ones keep theirs. Files that do not fit together, as between two
writes of a rotation, change nothing.
"""

import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

log = structlog.get_logger()

CHECK_SECONDS: Final = 1.0


class CertificateError(OSError):
    """There is no usable certificate at the start."""


class Certificate:
    """The certificate and key of a directory: `tls.crt` (with its chain) and `tls.key`."""

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises CertificateError where the files cannot be used: a server must not fall back to plain HTTP."""
        self._certificate, self._key = directory / "tls.crt", directory / "tls.key"
        self._clock = clock
        self._checked_at = clock()
        self._stamps = self._read_stamps()
        self.fault = ""  # why the files of now are not used
        self.loads = 1
        try:
            self._current = self._load()
        except (OSError, ssl.SSLError) as error:
            raise CertificateError(f"no usable TLS certificate in {directory}: {_describe(error)}") from error
        # The listener keeps this one; each handshake is given the current one.
        self.context = self._load()
        # Called for every client, also for one that sends no server name.
        self.context.sni_callback = self._use_current

    def _use_current(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        self.refresh(self._clock())
        connection.context = self._current

    def refresh(self, now: float) -> None:
        """Read the files again if they have changed."""
        if now - self._checked_at < CHECK_SECONDS:
            return
        self._checked_at = now
        stamps = self._read_stamps()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            self._current = self._load()
        except (OSError, ssl.SSLError) as error:
            self.fault = _describe(error)
            log.error("the new TLS certificate cannot be used; the last one stays", fault=self.fault)
        else:
            self.fault = ""
            self.loads += 1
            log.info("TLS certificate read", loads=self.loads)

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(self._certificate, self._key)
        return context

    def _read_stamps(self) -> list[tuple[int, int, int] | None]:
        """A value that changes whenever a file does: the kubelet replaces the directory behind a link."""
        stamps: list[tuple[int, int, int] | None] = []
        for path in (self._certificate, self._key):
            try:
                status = path.stat()
            except OSError:
                stamps.append(None)
            else:
                stamps.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return stamps


def _describe(error: OSError) -> str:
    """What is wrong, without the content of a file."""
    return getattr(error, "reason", None) or error.strerror or type(error).__name__
