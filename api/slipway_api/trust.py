"""The certificate authorities by which gateway and operator verify replicas and each other, as a context for clients.

Fails closed: without a trusted certificate no context is made, and ports that serve TLS cannot be called.
"""

import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

log = structlog.get_logger()

CHECK_SECONDS: Final = 1.0


class NoTrustError(OSError):
    """No authority is trusted, so no certificate can be verified; the message has the reason."""


class Trust:
    """Authorities that are trusted now; each change makes a new context, and open connections keep theirs."""

    def __init__(self, missing: str = "no certificate authority is known yet") -> None:
        """`missing` says where the authorities should come from."""
        self._missing = missing
        self._pem = ""
        self._context: ssl.SSLContext | None = None

    @property
    def context(self) -> ssl.SSLContext:
        """Verifies certificate, validity and server name. Raises NoTrustError."""
        if self._context is None:
            raise NoTrustError(self._missing)
        return self._context

    @property
    def is_known(self) -> bool:
        """Whether there is an authority to verify with."""
        return self._context is not None

    def use(self, pem: str) -> None:
        """Trust these authorities, and no others. Raises ssl.SSLError or ValueError, and keeps the last ones then."""
        if pem != self._pem:
            self._context, self._pem = client_context(pem), pem


class TrustFile(Trust):
    """Authorities of a mounted file, read again when it changes; it may appear later."""

    def __init__(self, file: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(f"{file} does not exist: the operator has not issued internal certificates")
        self._file = file
        self._clock = clock
        self._checked_at = -CHECK_SECONDS
        self._stamp: tuple[int, int, int] | None = None
        self.fault = ""  # why the file of now is not used

    @property
    def context(self) -> ssl.SSLContext:
        """As of the file now, or as it was last usable. Raises NoTrustError."""
        self.refresh()
        return super().context

    @property
    def is_known(self) -> bool:
        """Whether the file has been read at least once."""
        self.refresh()
        return super().is_known

    def refresh(self) -> None:
        """Read the file again if it has changed; one that is gone or unreadable changes nothing."""
        now = self._clock()
        if now - self._checked_at < CHECK_SECONDS:
            return
        self._checked_at, stamp = now, None
        try:
            status = self._file.stat()
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            if stamp == self._stamp:
                return
            self.use(self._file.read_text())
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:  # SSLError is an OSError
            self.fault = getattr(error, "reason", None) or type(error).__name__
            log.error("the internal certificate authorities cannot be read; the last ones stay", fault=self.fault)
        else:
            self.fault = ""
            log.info("internal certificate authorities read", file=str(self._file))
        self._stamp = stamp


def client_context(pem: str) -> ssl.SSLContext:
    """Verifies by these authorities alone; both ends are ours, so TLS 1.3 is the only version."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.hostname_checks_common_name = False
    context.load_verify_locations(cadata=pem)
    return context
