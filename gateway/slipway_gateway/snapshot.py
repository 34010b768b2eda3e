"""The last routing table in a file, for a gateway that restarts while the API server does not answer (ADR 88).

The file has one JSON object a line: a header with the version and the counts, then services, endpoints and adapters.
Its modification time is when the watch last knew the table to be current. It has no keys, no tenants and no requests:
names, addresses, weights, and the SHA-256 digests of serving tokens, which pods carry in their annotations, too.
"""

import asyncio
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from slipway_gateway.picker.endpoints import Adapter, Endpoint, Service
from slipway_gateway.resolve import RoutingTable

VERSION: Final = 1
FILE_NAME: Final = "routes.jsonl"
MAX_BYTES: Final = 64 << 20  # some 150,000 replicas; the chart's volume has room for two files
BATCH: Final = 200  # objects that are encoded at once: streams go on between two batches

T = TypeVar("T")


class SnapshotError(Exception):
    """The snapshot cannot be used, or cannot be written; the message says why."""


class Header(msgspec.Struct, frozen=True):
    """The first line of the file."""

    version: int
    services: int
    endpoints: int
    adapters: int
    namespaces: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All services, endpoints and adapters of a routing table, and the namespaces that it knows."""

    services: tuple[Service, ...]
    endpoints: tuple[Endpoint, ...]
    adapters: tuple[Adapter, ...]
    namespaces: tuple[str, ...] = ()  # in which objects were ever seen: their names are not given to others

    @classmethod
    def of(cls, table: RoutingTable) -> "Snapshot":
        """The table as it is now."""
        return cls(
            tuple(table.services.values()),
            tuple(table.endpoints.values()),
            tuple(table.adapters.values()),
            tuple(sorted(table.namespaces)),
        )

    def lines(self) -> Iterator[bytes]:
        """The file's lines, in batches."""
        header = Header(VERSION, len(self.services), len(self.endpoints), len(self.adapters), self.namespaces)
        yield from encoded_lines((header,))
        for kind in (self.services, self.endpoints, self.adapters):
            yield from encoded_lines(kind)

    @classmethod
    def parse(cls, content: bytes) -> "Snapshot":
        """The snapshot of a file; raises SnapshotError for one that is cut short, or of another version."""
        try:
            first, *rest = content.splitlines()
            header = msgspec.json.decode(first, type=Header)
            if header.version != VERSION:
                raise SnapshotError(f"version {header.version} is not {VERSION}")
            if len(rest) != header.services + header.endpoints + header.adapters:
                raise SnapshotError("lines are missing")
            lines = iter(rest)
            return cls(
                _decoded(islice(lines, header.services), Service),
                _decoded(islice(lines, header.endpoints), Endpoint),
                _decoded(lines, Adapter),
                header.namespaces,
            )
        except (msgspec.MsgspecError, ValueError) as error:
            raise SnapshotError(f"not a snapshot: {error}") from error


def encoded_lines(objects: Sequence[Any]) -> Iterator[bytes]:
    """The objects as JSON lines, a batch at a time."""
    encoder = msgspec.json.Encoder()
    for start in range(0, len(objects), BATCH):
        yield b"".join(encoder.encode(one) + b"\n" for one in objects[start : start + BATCH])


def _decoded(lines: Iterable[bytes], kind: type[T]) -> tuple[T, ...]:
    return tuple(map(msgspec.json.Decoder(kind).decode, lines))


class SnapshotFile:
    """The snapshot of one gateway, in a directory that no one else writes to."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        self._temporary = directory / f"{FILE_NAME}.new"

    async def write(self, snapshot: Snapshot, confirmed_at: float) -> None:
        """Replace the file at once, or not at all; raises SnapshotError."""
        parts, size = [], 0
        for part in snapshot.lines():
            parts.append(part)
            size += len(part)
            if size > MAX_BYTES:
                raise SnapshotError(f"the routing table has more than {MAX_BYTES >> 20} MiB")
            await asyncio.sleep(0)  # streams go on
        try:
            await asyncio.to_thread(self._replace, parts, confirmed_at)
        except OSError as error:
            raise SnapshotError(str(error)) from error

    def confirm(self, confirmed_at: float) -> None:
        """Note when the table was known to be current last; raises SnapshotError."""
        try:
            os.utime(self._path, (confirmed_at, confirmed_at))
        except OSError as error:
            raise SnapshotError(str(error)) from error

    def read(self) -> tuple[Snapshot, float] | None:
        """The snapshot and when it was current, in seconds of the wall clock; None: there is none.

        A file that another user could have written is not believed: it says where prompts go.
        """
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SnapshotError(str(error)) from error
        with open(descriptor, "rb") as file:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
                raise SnapshotError(f"{self._path} must be a file of this user alone")
            return Snapshot.parse(file.read(MAX_BYTES + 1)), facts.st_mtime

    def _replace(self, parts: Sequence[bytes], confirmed_at: float) -> None:
        self._temporary.unlink(missing_ok=True)  # of a gateway that was killed while it wrote
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(self._temporary, flags, 0o600), "wb") as file:
            file.writelines(parts)
        os.utime(self._temporary, (confirmed_at, confirmed_at))
        self._temporary.replace(self._path)
