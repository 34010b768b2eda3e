"""The kinds of ours whose CustomResourceDefinition is not installed: the operator works for the others meanwhile.

The API server answers 404 to a list of a kind that it does not know. kopf looks only once which kinds there are, so
when a missing one appears the process has to start again to watch it; a restarted leader takes its Lease back at once.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Final

import structlog

from slipway_kube.errors import KubeError, NotFound

log = structlog.get_logger()

LOOK_EVERY_SECONDS: Final = 30.0


class MissingKinds:
    """Which kinds are missing, and whether one of them has appeared."""

    def __init__(self) -> None:
        self._missing: frozenset[str] = frozenset()

    def __contains__(self, kind: str) -> bool:
        return kind in self._missing

    def note(self, kinds: Collection[str]) -> None:
        """These are missing, by the last lists."""
        for kind in sorted(set(kinds) - self._missing):
            log.warning("the CRD of a kind is not installed: its objects are not served until it is", kind=kind)
        self._missing = frozenset(kinds)

    def describe(self) -> str:
        """For the answer of /readyz; empty where none is missing."""
        named = ", ".join(sorted(self._missing))
        return f"without {named}, whose CRD is not installed" if named else ""

    async def wait_until_installed(self, read: Callable[[str], Awaitable[object]]) -> str:
        """Look for the missing kinds until one of them can be listed; returns its name."""
        while True:
            await asyncio.sleep(LOOK_EVERY_SECONDS)
            for kind in sorted(self._missing):
                try:
                    await read(kind)
                except NotFound:
                    continue
                except KubeError as exc:
                    log.info("cannot look for a missing kind", kind=kind, error=str(exc))
                else:
                    return kind
