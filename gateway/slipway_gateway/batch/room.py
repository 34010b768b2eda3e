"""The room of tenants on the volume while files arrive: bytes are taken before they are written, not counted after.

While uploads of a tenant run, its used bytes and files are kept here: read once from the volume, then counted as pieces
arrive. So twenty uploads at the same time cannot each find the same room free. Gateways that share a volume count
apart, and an upload is measured once more against the volume before it is shown (`BatchApi._upload`).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from slipway_api.words import count
from slipway_gateway.batch.limits import BatchLimits
from slipway_gateway.batch.store import Folder
from slipway_gateway.errors import bad_request, too_large


class Room:
    """The used bytes and files of one tenant."""

    def __init__(self, used_bytes: int, files: int) -> None:
        self.used_bytes = used_bytes
        self.files = files
        self.uploads = 0


class Upload:
    """The room of one file that arrives."""

    def __init__(self, room: Room, limits: BatchLimits) -> None:
        self._room = room
        self._limits = limits
        self._taken = 0

    def take(self, size: int) -> None:
        """Take the room of `size` more bytes, or raise the refusal of the file."""
        limits = self._limits
        if self._taken + size > limits.file_bytes:
            raise too_large(limits.file_bytes)
        if self._room.used_bytes + size > limits.tenant_bytes:
            raise too_large(max(0, limits.tenant_bytes - self._room.used_bytes + self._taken))
        self._taken += size
        self._room.used_bytes += size

    def give_back(self) -> None:
        """The file is not kept."""
        self._room.used_bytes -= self._taken
        self._room.files -= 1
        self._taken = 0


class Rooms:
    """The rooms of tenants with running uploads."""

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._rooms: dict[str, Room] = {}
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def upload(self, tenant: str, folder: Folder) -> AsyncIterator[Upload]:
        """The room for one more file; raises the refusal if the tenant has too many. An exception gives it back."""
        async with self._lock:
            room = self._rooms.get(tenant)
            if room is None:
                room = self._rooms[tenant] = Room(*await asyncio.to_thread(folder.usage))
        if room.files >= self._limits.files:
            if not room.uploads:
                self._rooms.pop(tenant, None)
            files = count(room.files, "file")
            raise bad_request(f"This tenant has {files}; the limit is {self._limits.files}. Delete some.")
        room.files += 1
        room.uploads += 1
        upload = Upload(room, self._limits)
        try:
            yield upload
        except BaseException:
            upload.give_back()
            raise
        finally:
            room.uploads -= 1
            if not room.uploads and self._rooms.get(tenant) is room:
                del self._rooms[tenant]
