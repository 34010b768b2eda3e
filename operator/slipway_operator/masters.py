"""Derives the tokens of the pods' ports from the mounted admin master and gateway key; no token is stored."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from slipway_api.admin_token import admin_token, kernels_key, serving_token, token_digest
from slipway_api.mounted_key import MissingKey, MountedKey

LOOK_SECONDS: Final = 10.0  # between two looks at the mounted key
REPLACED_SECONDS: Final = 180.0  # a kubelet replaces mounted files within 90 s, each at its own time

__all__ = ["GatewayKeys", "Masters", "MissingKey"]


class Masters:
    """Derives the admin tokens of pods."""

    def __init__(self, directory: Path) -> None:
        self._key = MountedKey(directory, mounted_from="slipway-admin-master")

    def read(self) -> tuple[bytes, ...]:
        """One master, or two during a rotation, the current one first. Raises MissingKey when there was never one."""
        return self._key.read()

    def tokens(self, namespace: str, pod: str, nonce: str) -> list[str]:
        """Tokens that the pod's admin port may accept, the likeliest first: older pods have those of the old master."""
        return [admin_token(master, namespace, pod, nonce) for master in self.read()]

    def digests(self, namespace: str, pod: str, nonce: str) -> tuple[str, ...]:
        """The digests of all admin tokens that a new pod shall accept."""
        return tuple(token_digest(token) for token in self.tokens(namespace, pod, nonce))

    def kernels_key(self, namespace: str, service: str) -> str:
        """The key of the service's compiled kernels, from the current master."""
        return kernels_key(self.read()[0], namespace, service)


class GatewayKeys:
    """Derives the serving tokens of services, and the admin tokens of the gateways' own pods."""

    def __init__(self, directory: Path, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._key = MountedKey(directory, mounted_from="slipway-gateway-key")
        self._monotonic = monotonic
        self._mounted: tuple[bytes, ...] = ()
        self._gone: dict[bytes, float] = {}  # a key that was mounted -> until when it counts

    def read(self) -> tuple[bytes, ...]:
        """The keys that a gateway may have, the current one first. Raises MissingKey when there was never one.

        One, or two during a rotation; after a change those that are mounted no longer, for as long as a gateway may
        still have the old files: a replica that accepts only the new key would refuse it.
        """
        now, was, self._mounted = self._monotonic(), self._mounted, self._key.read()
        self._gone |= {key: now + REPLACED_SECONDS for key in was if key not in self._mounted}
        self._gone = {key: end for key, end in self._gone.items() if end > now and key not in self._mounted}
        return (*self._mounted, *self._gone)

    async def watch(self, on_change: Callable[[], None], *, every: float = LOOK_SECONDS) -> None:
        """Call `on_change` after the mounted keys have changed, until cancelled."""
        known: tuple[bytes, ...] = ()
        while True:
            with suppress(MissingKey):
                was, known = known, self.read()
                if was and was != known:
                    on_change()
            await asyncio.sleep(every)

    def digests(self, namespace: str, service: str) -> tuple[str, ...]:
        """The digests of all serving tokens that a new pod of the service shall accept."""
        return tuple(token_digest(token) for token in self.tokens(namespace, service))

    def tokens(self, namespace: str, service: str) -> list[str]:
        """Serving tokens that the replicas of the service may accept, that of the current key first."""
        return [serving_token(key, namespace, service) for key in self.read()]

    def admin_tokens(self, namespace: str, pod: str) -> list[str]:
        """Tokens that the admin port of a gateway's pod accepts, the likeliest first."""
        return [admin_token(key, namespace, pod) for key in self.read()]
