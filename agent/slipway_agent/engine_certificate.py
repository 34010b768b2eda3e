"""Compares the certificate that the engine serves with the mounted one, which is renewed while the engine runs.

Engines differ in whether they read changed files, and none reports it. So a connection is opened now and then, and
what it shows is compared with the file. An engine that has missed a renewal is reported to the operator, which
replaces the replica long before the end of the old certificate. After its end the engine counts as silent, because
no call to it can be verified.
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from slipway_api import internal_tls
from slipway_api.trust import Trust

log = structlog.get_logger()

LOOK_SECONDS: Final = 60.0
HANDSHAKE_SECONDS: Final = 10.0
OUTDATED_AFTER_SECONDS: Final = 600.0  # engines that watch their files need seconds; some look every few minutes


class EngineCertificate:
    """Whether the engine still serves a certificate that has been replaced."""

    def __init__(
        self, directory: Path, trust: Trust, name: str, port: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`name` is what the certificate is for; the engine listens on `port` of the loopback."""
        self._file = directory / internal_tls.CERTIFICATE_FILE
        self._trust = trust
        self._name = name
        self._port = port
        self._clock = clock
        self._differs_since: float | None = None
        self._ends = 0
        self._is_reported = False

    def outdated_ends(self) -> int:
        """End of the served certificate, if another one has been mounted for OUTDATED_AFTER_SECONDS; else 0."""
        if self._differs_since is None or self._clock() - self._differs_since < OUTDATED_AFTER_SECONDS:
            return 0
        return self._ends

    async def watch(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Compare once. Without a connection or a readable file nothing changes: `Replica` reports a silent engine."""
        try:
            mounted = ssl.PEM_cert_to_DER_cert(_first_of(self._file.read_text()))
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                served, ends = await self._served()
        except (OSError, ValueError) as error:
            log.debug("the certificate of the engine cannot be compared", error=type(error).__name__)
            return
        if served == mounted:
            self._differs_since, self._is_reported = None, False
            return
        self._ends = ends
        if self._differs_since is None:
            self._differs_since = self._clock()
        if self.outdated_ends() and not self._is_reported:
            self._is_reported = True
            log.warning("the engine has not read the renewed certificate", ends=ends)

    async def _served(self) -> tuple[bytes, int]:
        """The certificate that a new connection shows, and its end in seconds since 1970."""
        _, writer = await asyncio.open_connection(
            "127.0.0.1", self._port, ssl=self._trust.context, server_hostname=self._name
        )
        try:
            connection: ssl.SSLObject = writer.get_extra_info("ssl_object")
            served, facts = connection.getpeercert(binary_form=True), connection.getpeercert()
        finally:
            writer.transport.abort()
        assert served is not None
        assert facts is not None
        return served, int(ssl.cert_time_to_seconds(str(facts["notAfter"])))


def _first_of(chain: str) -> str:
    """The certificate itself; its authorities follow it."""
    end = "-----END CERTIFICATE-----"
    first, mark, _ = chain.partition(end)
    if not mark:
        raise ValueError("no certificate")
    return first + end
