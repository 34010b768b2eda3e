"""KV events, read as a router of vLLM's fleet reads them: a real subscriber, and the structs of its documentation."""

import os
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from slipway_runtime.engine.kv_events import KvEventPublisher, bound_endpoint, replay_endpoint
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


@pytest.fixture
def endpoint() -> str:
    """Two ports side by side are free on an address of the loopback that no other process has."""
    pid = os.getpid()
    return f"tcp://127.{1 + pid // 62_500 % 250}.{pid // 250 % 250}.{1 + pid % 250}:5557"


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
    last = -1
    while not subscriber.poll(50):
        publisher.publish([AllBlocksCleared()])
        last += 1
    arrives(subscriber, last)
    return subscriber, last


def arrives(subscriber, wanted: int) -> None:
    """Read on until the batch of this number."""
    number = -1
    while number != wanted:
        assert subscriber.poll(10_000)
        number = int.from_bytes(subscriber.recv_multipart()[1], "big")


def test_a_subscriber_that_filters_by_topic_gets_the_events_of_its_topic(endpoint, context):
    """llm-d's picker subscribes to `kv@` and reads pod and model from the topic (reference/field-2026.md F1)."""
    publisher = KvEventPublisher(endpoint, "kv@10.0.0.7:8000@chat")
    try:
        everything, last = subscribed(context, endpoint, publisher)
        picker, other = context.socket(zmq.SUB), context.socket(zmq.SUB)
        picker.subscribe(b"kv@")
        other.subscribe(b"kv@10.0.0.8")
        for socket in (picker, other):
            socket.connect(endpoint)
        while not picker.poll(50):
            publisher.publish([AllBlocksCleared()])
            last += 1
        topic, _, payload = picker.recv_multipart()
        arrives(everything, last)
    finally:
        publisher.close()

    assert topic.split(b"@") == [b"kv", b"10.0.0.7:8000", b"chat"]
    assert [type(event) for event in DECODER.decode(payload).events] == [AllBlocksClearedEvent]
    assert not other.poll(200), "the topic of another pod"


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
    subscriber, last = subscribed(context, endpoint, publisher)
    for _ in range(3):
        publisher.publish([AllBlocksCleared()])
    arrives(subscriber, last + 3)
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


def test_kv_events_are_published_on_loopback_unless_an_address_is_given():
    """review/shipping.md 23: tcp://*:5557 showed the tokens of prompts to every pod."""
    assert bound_endpoint("tcp://*:5557") == "tcp://127.0.0.1:5557"
    assert bound_endpoint("tcp://0.0.0.0:5557") == "tcp://0.0.0.0:5557"
