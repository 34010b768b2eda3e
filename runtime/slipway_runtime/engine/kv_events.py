"""Publisher of KV events, which tell routers the prefixes of this replica, over ZeroMQ in vLLM's format.

A message has three parts: the topic, a sequence number (8 bytes, big-endian), and a batch in msgpack: an array
[time, events, data-parallel rank], each event an array that begins with its name. Field order and names are those of
vLLM's `distributed/kv_events.py`, so that a subscriber can decode it; new fields go to the end. The topic is empty,
as vLLM's, if none is set; llm-d's picker filters on `kv@` and reads pod and model from `kv@<address>@<model>`.

The last `KEPT` batches can be asked for again on a second socket, at the port after this one: a request is an empty
part and the first sequence number wanted, the answer is (sequence number, batch) messages and one of number -1.
"""

import queue
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec
import zmq

from slipway_runtime.messages import AllBlocksCleared, BlockRemoved, BlockStored
from slipway_runtime.scheduling.block_pool import KvEvent

KEPT: Final = 10_000
END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)


class Stored(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, tag="BlockStored"):
    """vLLM's BlockStored. `lora_id` numbers the adapters that this replica has met, from 1."""

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class Removed(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, tag="BlockRemoved"):
    """vLLM's BlockRemoved."""

    block_hashes: tuple[bytes, ...]
    medium: str | None


class Cleared(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, tag="AllBlocksCleared"):
    """vLLM's AllBlocksCleared."""


class Batch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The KV events of one step."""

    ts: float  # seconds since the epoch
    events: tuple[Stored | Removed | Cleared, ...]
    data_parallel_rank: int | None = None


def bound_endpoint(endpoint: str) -> str:
    """The endpoint with loopback in the place of `*`.

    >>> bound_endpoint("tcp://*:5557")
    'tcp://127.0.0.1:5557'
    """
    return endpoint.replace("tcp://*:", "tcp://127.0.0.1:", 1)


class KvEventPublisher:
    """Sends batches from a thread of its own: a slow subscriber loses messages and may ask for them again."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        """endpoint: tcp://host:port, `*` for loopback; port + 1 answers replays. OSError: a port is taken.

        The events contain the tokens of prompts and have no authentication, so all interfaces need an address: 0.0.0.0.
        """
        endpoint = bound_endpoint(endpoint)
        self._topic = topic.encode()
        addresses = (endpoint, replay_endpoint(endpoint))
        self._adapters: dict[str, int] = {}
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._out = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        for socket, address in zip((self._out, self._replay), addresses, strict=True):
            socket.linger = 0
            try:
                socket.bind(address)
            except zmq.ZMQError as error:
                self._context.destroy(linger=0)  # an open socket would keep the process from ending
                raise OSError(error.errno, f"KV events cannot be published on {address}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Send the KV events of one step. Never blocks."""
        self._batches.put(Batch(ts=time.time(), events=tuple(map(self._event, events))))

    def close(self) -> None:
        """Send the batches that are left, and end the thread."""
        self._batches.put(None)
        self._thread.join()
        self._context.destroy(linger=0)

    def _event(self, event: KvEvent) -> Stored | Removed | Cleared:
        match event:
            case BlockStored():
                adapter = event.adapter or None
                return Stored(
                    block_hashes=event.block_hashes,
                    parent_block_hash=event.parent_block_hash,
                    token_ids=event.token_ids,
                    block_size=event.block_size,
                    lora_id=None if adapter is None else self._adapters.setdefault(adapter, len(self._adapters) + 1),
                    medium=event.medium,
                    lora_name=adapter,
                )
            case BlockRemoved():
                return Removed(event.block_hashes, event.medium)
            case AllBlocksCleared():
                return Cleared()

    def _run(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        kept: deque[tuple[bytes, bytes]] = deque(maxlen=KEPT)
        number = 0
        while True:
            self._answer_replays(kept)
            try:
                batch = self._batches.get(timeout=0.1)  # replays are rare, and may wait so long
            except queue.Empty:
                continue
            if batch is None:
                return
            kept.append((number.to_bytes(8, "big"), encoder.encode(batch)))
            self._out.send_multipart((self._topic, *kept[-1]))
            number += 1

    def _answer_replays(self, kept: deque[tuple[bytes, bytes]]) -> None:
        while self._replay.poll(0):
            frames = self._replay.recv_multipart()
            if len(frames) != 3:
                continue  # not a request for a replay
            client, _, first = frames
            for number, batch in kept:
                if number >= first:
                    self._replay.send_multipart((client, b"", number, batch))
            self._replay.send_multipart((client, b"", END_OF_REPLAY, b""))


def replay_endpoint(endpoint: str) -> str:
    """The endpoint at which batches can be asked for again: the next port."""
    found = re.fullmatch(r"(tcp://.+:)(\d+)", endpoint)
    if found is None:
        raise ValueError(f"the endpoint of KV events is {endpoint!r}; it must look like tcp://*:5557")
    return f"{found[1]}{int(found[2]) + 1}"
