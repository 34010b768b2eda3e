"""KV events, read as a router of vLLM's fleet reads them: a real subscriber, and the structs of its documentation."""

import socket
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from slipway_runtime.engine.kv_events import KvEventPublisher, replay_endpoint
from slipway_runtime.messages import AllBlocksCleared, BlockRemoved, BlockStored, Medium


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list["BlockStoredEvent | BlockRemovedEvent | AllBlocksClearedEvent"]
    data_parallel_rank: int | None = None


class Event(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    pass


class BlockStoredEvent(Event, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    lora_name: str | None = None


class BlockRemovedEvent(Event, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None = None


class AllBlocksClearedEvent(Event, tag="AllBlocksCleared"):
    pass


DECODER = msgspec.msgpack.Decoder(EventBatch)


def two_free_ports() -> int:
    for _ in range(50):
        with socket.socket() as one, socket.socket() as next_one:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            try:
                next_one.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
    raise AssertionError("no two ports side by side are free")


@pytest.fixture
def endpoint() -> str:
    return f"tcp://127.0.0.1:{two_free_ports()}"


@pytest.fixture
def publisher(endpoint: str) -> Iterator[KvEventPublisher]:
    publisher = KvEventPublisher(endpoint)
    yield publisher
    publisher.close()


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


def subscribed(context, endpoint: str, publisher: KvEventPublisher):
    """A subscriber that has been noticed: until then its messages are lost, as ZeroMQ's are."""
    subscriber = context.socket(zmq.SUB)
    subscriber.subscribe(b"")
    subscriber.connect(endpoint)
    while not subscriber.poll(50):
        publisher.publish([AllBlocksCleared()])
    while subscriber.poll(300):
        last = subscriber.recv_multipart()
    return subscriber, int.from_bytes(last[1], "big")


def test_a_subscriber_of_vllm_reads_our_events(endpoint, publisher, context):
    subscriber, last = subscribed(context, endpoint, publisher)
    stored = BlockStored(
        block_hashes=(b"a" * 16, b"b" * 16), parent_block_hash=None, token_ids=(1, 2, 3, 4), block_size=2, adapter="sha"
    )
    child = BlockStored(block_hashes=(b"c" * 16,), parent_block_hash=b"b" * 16, token_ids=(5, 6), block_size=2)
    publisher.publish([stored, child])
    publisher.publish([BlockRemoved(block_hashes=(b"c" * 16,)), AllBlocksCleared()])
    assert subscriber.poll(10_000)
    topic, number, payload = subscriber.recv_multipart()
    batch = DECODER.decode(payload)
    assert (topic, int.from_bytes(number, "big")) == (b"", last + 1)
    assert batch.ts > 1_600_000_000, "seconds since the epoch"
    assert batch.data_parallel_rank is None
    assert batch.events == [
        BlockStoredEvent([b"a" * 16, b"b" * 16], None, [1, 2, 3, 4], 2, 1, "GPU", "sha"),
        BlockStoredEvent([b"c" * 16], b"b" * 16, [5, 6], 2, None, "GPU", None),
    ]
    assert subscriber.poll(10_000)
    _, number, payload = subscriber.recv_multipart()
    assert int.from_bytes(number, "big") == last + 2
    assert DECODER.decode(payload).events == [BlockRemovedEvent([b"c" * 16], "GPU"), AllBlocksClearedEvent()]


@pytest.mark.capability("KV-12")
def test_a_subscriber_hears_which_memory_a_block_is_in(endpoint, publisher, context):
    subscriber, _ = subscribed(context, endpoint, publisher)
    stored = BlockStored(
        block_hashes=(b"a" * 16,), parent_block_hash=None, token_ids=(), block_size=16, medium=Medium.HOST
    )
    publisher.publish([BlockRemoved(block_hashes=(b"a" * 16,)), stored])
    publisher.publish([BlockRemoved(block_hashes=(b"a" * 16,), medium=Medium.HOST)])
    heard = []
    for _ in range(2):
        assert subscriber.poll(10_000)
        heard += DECODER.decode(subscriber.recv_multipart()[2]).events
    assert heard == [
        BlockRemovedEvent([b"a" * 16], "GPU"),
        BlockStoredEvent([b"a" * 16], None, [], 16, None, "CPU", None),
        BlockRemovedEvent([b"a" * 16], "CPU"),
    ]


def test_missed_batches_are_told_again(endpoint, publisher, context):
    _, last = subscribed(context, endpoint, publisher)
    for _ in range(3):
        publisher.publish([AllBlocksCleared()])
    dealer = context.socket(zmq.DEALER)
    dealer.connect(replay_endpoint(endpoint))
    dealer.send_multipart((b"", (last + 1).to_bytes(8, "big")))
    numbers: list[int] = []
    while not numbers or numbers[-1] != -1:
        assert dealer.poll(10_000)
        _, number, payload = dealer.recv_multipart()
        numbers.append(int.from_bytes(number, "big", signed=True))
        assert payload == b"" if numbers[-1] == -1 else DECODER.decode(payload).events == [AllBlocksClearedEvent()]
    assert numbers == [last + 1, last + 2, last + 3, -1]


def test_an_address_that_is_taken_or_senseless_is_a_sentence(endpoint, publisher):
    with pytest.raises(OSError, match="KV events cannot be published on"):
        KvEventPublisher(endpoint)
    with pytest.raises(ValueError, match="must look like"):
        KvEventPublisher("5557")
