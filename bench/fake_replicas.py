"""Simulated replicas for benchmarks of the operator: real sockets that answer as the ports of a runtime's pod do.

A test compares their answers with those of the real runtime. They check no token, and serve admin and serving port at
once: the calls that the operator makes have different paths.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from slipway_api import names
from slipway_api.runtime_api import BlockCounts, DrainStatus, LoadAdapterRequest, QueueCounts, Signals, State
from tests.operator.adapter_double import AdapterDouble

NOT_FOUND: Final = b'{"error": {"message": "Not Found"}}'
SIGNALS_REQUEST: Final = f"GET {names.PATH_SIGNALS} ".encode()


@dataclass
class FakeReplica:
    """One replica: its load, and the adapters that it was asked to load."""

    boot_id: str = "boot"
    signals: Signals = field(init=False)
    signals_reply: bytes = field(init=False)
    download_seconds: float = 0.0
    """From the load of an adapter until it is there; 0: it is there with the answer."""
    downloaded: dict[str, float] = field(default_factory=dict)
    """By adapter: when its download ended, by the monotonic clock."""
    told_at: float = 0.0
    """When it first told its present load, by the monotonic clock; 0: not yet."""
    adapters: AdapterDouble = field(default_factory=AdapterDouble)

    def __post_init__(self) -> None:
        self.set_load()

    def set_load(
        self, *, running: int = 0, waiting: int = 0, kv_usage: float = 0.0, starting: str = "", draining: bool = False
    ) -> None:
        """The load that the replica tells from now on."""
        self.signals = Signals(
            boot_id=self.boot_id,
            kv_usage=kv_usage,
            running=running,
            waiting=waiting,
            admitted=running + waiting,
            starting=starting,
            draining=draining,
        )
        self.signals_reply = reply(200, self.signals.wire())
        self.told_at = 0.0

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer to one request."""
        if path == names.PATH_STATE and method == "GET":
            return 200, self._state().wire()
        if path in (names.PATH_DRAIN, names.PATH_UNDRAIN) and method == "POST":
            self.set_load(draining=path == names.PATH_DRAIN)
            return 200, DrainStatus(draining=self.signals.draining, running=0, waiting=0).wire()
        if not self.adapters.handles(path):
            return 404, NOT_FOUND
        self.adapters.loads_slowly = self.download_seconds > 0
        answered = self.adapters.answer(method, path, body, self.boot_id)
        if method == "POST" and path == names.PATH_ADAPTERS and answered[0] in (200, 202):
            self._download(LoadAdapterRequest.model_validate_json(body).name)
        return answered

    def _download(self, adapter: str) -> None:
        if adapter in self.adapters.slow:
            asyncio.get_running_loop().call_later(self.download_seconds, self._finish, adapter)
        else:
            self.downloaded[adapter] = time.monotonic()

    def _finish(self, adapter: str) -> None:
        self.adapters.finish(adapter)
        self.downloaded[adapter] = time.monotonic()

    def _state(self) -> State:
        return State(
            boot_id=self.boot_id,
            model_name="chat",
            uptime_seconds=1.0,
            block_size=16,
            bytes_per_token=4096,
            max_model_len=4096,
            max_num_seqs=64,
            blocks=BlockCounts(total=1000, live=0, cached=0, free=1000),
            queue=QueueCounts(running=self.signals.running, waiting=self.signals.waiting),
            draining=self.signals.draining,
            adapters=tuple(self.adapters.adapters.values()),
        )


def reply(status: int, body: bytes) -> bytes:
    """An HTTP response."""
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Port(asyncio.Protocol):
    """One connection to a port of a replica, which is found by the address that the client connected to."""

    def __init__(self, replica_at: Callable[[str], FakeReplica]) -> None:
        self._replica_at = replica_at
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Find the replica."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._replica = self._replica_at(transport.get_extra_info("sockname")[0])

    def data_received(self, data: bytes) -> None:
        """Answer the request once it is complete; there is one at a time on a connection."""
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found or len(body) < content_length(head):
            return
        self._buffer = b""
        if head.startswith(SIGNALS_REQUEST):  # 3,000 a second in one benchmark
            self._replica.told_at = self._replica.told_at or time.monotonic()
            self._transport.write(self._replica.signals_reply)
            return
        method, path, _ = head.partition(b"\r\n")[0].decode().split(" ")
        self._transport.write(reply(*self._replica.answer(method, path, body)))


def content_length(head: bytes) -> int:
    """The length of the body that the head of a request announces."""
    lines = (line.partition(b":") for line in head.lower().split(b"\r\n"))
    return next((int(value) for name, _, value in lines if name == b"content-length"), 0)


async def listen(replica_at: Callable[[str], FakeReplica], host: str, port: int) -> asyncio.Server:
    """Serve the replicas at an address; `replica_at` finds one by the IP address that was connected to."""
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: Port(replica_at), host, port, backlog=4096)
