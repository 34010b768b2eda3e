"""Streams outlive their replica: it is killed, hangs, or is deleted with a short drain; clients see nothing of it."""

import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from e2e.cluster.launch import Cluster
from e2e.manifests import as_yaml, chat, static
from e2e.slipway import Slipway, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

STREAMS = 8
TOKENS = 900


@dataclass
class Stream:
    """One streamed answer, as far as its client has read it."""

    number: int
    text: str = ""
    pieces: int = 0
    ids: set[str] = field(default_factory=set)
    finish: str | None = None
    completion_tokens: int = 0


def read(slipway: Slipway, stream: Stream, begun: threading.Semaphore) -> Stream:
    """Read a stream to its end with the stock client, which raises on an error event."""
    parts = slipway.openai().chat.completions.create(
        model="sturdy",
        messages=[{"role": "user", "content": f"Tell me story number {stream.number} about a lamp."}],
        max_tokens=TOKENS,
        temperature=0.8,
        seed=stream.number,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    for part in parts:
        stream.ids.add(part.id)
        if part.usage is not None:
            stream.completion_tokens = part.usage.completion_tokens
        for choice in part.choices:
            stream.text += choice.delta.content or ""
            stream.pieces += 1
            stream.finish = choice.finish_reason or stream.finish
            if stream.pieces == 5:
                begun.release()
    return stream


def read_all(slipway: Slipway, meanwhile: Callable[[], object] = lambda: None) -> list[Stream]:
    """Read all streams at once; `meanwhile` is called when each has begun."""
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(STREAMS) as clients:
        running = [clients.submit(read, slipway, Stream(number), begun) for number in range(STREAMS)]
        for _ in range(STREAMS):
            assert begun.acquire(timeout=60)
        meanwhile()
        return [each.result(timeout=120) for each in running]


def handed_over(slipway: Slipway) -> int:
    """Number of handed-over streams in the logs of the gateways."""
    return slipway.logs("app.kubernetes.io/component=gateway").count('"stream handed over"')


@pytest.mark.capability("RD-4", "API-19", "RD-1", "RD-2", "RD-9", "PF-11")
def test_streams_of_a_killed_a_hung_and_a_deleted_replica_are_the_undisturbed_ones(
    clean: Slipway, cluster: Cluster
) -> None:
    """Chaos C10: streams of a killed replica ended with an error event."""
    runtime = chat()["spec"]["runtime"] | {"deterministic": True, "maxModelLen": 1024, "kvCache": {"bytes": "48Mi"}}
    drain = {"timeoutSeconds": 1, "endpointPropagationSeconds": 0}
    clean.apply(as_yaml(static("sturdy", 2, runtime=runtime, drain=drain)))
    clean.wait_ready("sturdy", replicas=2)
    undisturbed = read_all(clean)
    assert {stream.finish for stream in undisturbed} == {"length"}

    def kill() -> None:
        cluster.kill_container("default", clean.pods("sturdy")[0].metadata.name)

    def hang() -> None:
        cluster.kill_container("default", clean.pods("sturdy")[0].metadata.name, how=signal.SIGSTOP)

    def delete() -> None:
        clean.core.delete_namespaced_pod(clean.pods("sturdy")[0].metadata.name, "default")

    for disturb in (kill, hang, delete):
        before = handed_over(clean)
        disturbed = read_all(clean, disturb)

        assert all(len(stream.ids) == 1 for stream in disturbed)
        assert [stream.completion_tokens for stream in disturbed] == [TOKENS] * STREAMS
        assert [stream.text for stream in disturbed] == [stream.text for stream in undisturbed]
        assert handed_over(clean) > before, f"{disturb.__name__} cut no stream"
        if disturb is hang:
            cluster.kill_container("default", clean.pods("sturdy")[0].metadata.name)
        wait_for("two replicas", lambda: clean.service("sturdy")["status"]["readyReplicas"] == 2, timeout=120)
        clean.wait_ready("sturdy", replicas=2)
