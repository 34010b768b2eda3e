"""Fifty live streams of real runtime processes: a replica is killed, hangs or is drained; a gateway is killed."""

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest

from bench.servers import MODEL_NAME, Server, a_gateway, a_runtime
from e2e.live_streams import BROKEN_CONNECTIONS, Stream, Streams, disturbances

pytestmark = pytest.mark.timeout(300)

COUNT = 50
TOKENS = 128
REPLICA = (
    *("--deterministic", "--revision", "r1", "--max-num-seqs", str(COUNT)),
    *("--kv-cache-bytes", "96Mi", "--drain-timeout", "0.2"),
)


@pytest.fixture(scope="module")
def steady() -> Iterator[Server]:
    """The replica that stays."""
    with a_runtime(*REPLICA) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(steady: Server) -> list[Stream]:
    """All streams while nothing is broken."""
    with a_gateway((MODEL_NAME, steady.url)) as gateway:
        return streams_at(gateway).read()


def streams_at(gateway: Server) -> Streams:
    return Streams(f"{gateway.url}/v1", MODEL_NAME, COUNT, TOKENS)


def running(runtime: Server) -> int:
    """How many requests the replica computes now."""
    with urllib.request.urlopen(f"{runtime.admin_url}/signals", timeout=30) as answer:
        return int(json.load(answer)["running"])


def engine_of(runtime: Server) -> int:
    """The process id of the replica's engine, the child of its API server."""
    pid = runtime.process.pid
    (engine,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(engine)


def kill(runtime: Server) -> None:
    """kill -9 of all processes of a replica."""
    for process in (engine_of(runtime), runtime.process.pid):
        os.kill(process, signal.SIGKILL)


def hang(runtime: Server) -> None:
    """The engine stops computing; the API server keeps its connections open and says nothing."""
    os.kill(engine_of(runtime), signal.SIGSTOP)


def drain(runtime: Server) -> None:
    """What the kubelet does to a pod; the drain's deadline is much shorter than the streams."""
    runtime.process.send_signal(signal.SIGTERM)


def handed_over(gateway: Server) -> list[str]:
    """The reasons of the handovers in the gateway's log."""
    lines = [json.loads(line) for line in gateway.log.read_text().splitlines() if line.startswith("{")]
    return [line["reason"] for line in lines if line["message"] == "stream handed over"]


@pytest.mark.capability("RD-4", "RD-1", "RD-2", "RD-9", "API-19")
@pytest.mark.parametrize(("disturb", "reason"), [(kill, "lost"), (hang, "hung"), (drain, "drained")])
def test_fifty_live_streams_outlive_a_replica_and_say_what_they_would_have_said(
    steady: Server, undisturbed: list[Stream], disturb: Callable[[Server], None], reason: str
) -> None:
    with (
        a_runtime(*REPLICA) as leaving,
        a_gateway(
            (MODEL_NAME, leaving.url), (MODEL_NAME, steady.url), environment={"SLIPWAY_HANG_SECONDS": "1"}
        ) as gateway,
    ):
        moved: list[int] = []

        def disturb_it() -> None:
            moved.append(running(leaving))
            disturb(leaving)

        streams = streams_at(gateway).read(disturb_it)
        reasons = handed_over(gateway)
        if disturb is hang:
            kill(leaving)

    assert disturbances(streams, undisturbed) == []
    assert moved[0] >= COUNT // 4, "both replicas had live streams"
    assert reasons == [reason] * moved[0], "each stream of the replica that left, once, and no other"


@pytest.mark.capability("RD-1", "RD-4", "API-7")
def test_a_killed_gateway_breaks_only_its_own_connections(steady: Server, undisturbed: list[Stream]) -> None:
    half = COUNT // 2

    def ask(gateway: Server) -> str | None:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            answer = client.completions.create(model=MODEL_NAME, prompt="Once", max_tokens=4)
        return answer.choices[0].finish_reason

    with ExitStack() as stack:
        leaving, staying = (stack.enter_context(a_gateway((MODEL_NAME, steady.url))) for _ in range(2))
        other = stack.enter_context(ThreadPoolExecutor(1))
        live, after = threading.Event(), []

        def kill_the_other_one() -> None:
            assert live.wait(60)
            assert running(steady) == 2 * half
            leaving.process.kill()
            leaving.process.wait()
            after.extend(ask(staying) for _ in range(10))

        broken = other.submit(Streams(f"{leaving.url}/v1", MODEL_NAME, half, TOKENS).read, live.set)
        whole = Streams(f"{staying.url}/v1", MODEL_NAME, half, TOKENS).read(kill_the_other_one)

        assert disturbances(whole, undisturbed[:half]) == []
        assert after == ["length"] * 10, "each new request is served by the other gateway, at its first attempt"
        ended = broken.result(timeout=60)
        assert [stream.number for stream in ended if stream.error and not stream.finish] == list(range(half))
        assert all(undisturbed[stream.number].text.startswith(stream.text) for stream in ended), "cut off, never wrong"
        assert {stream.error.partition(":")[0] for stream in ended} <= BROKEN_CONNECTIONS
        with pytest.raises(openai.APIConnectionError):
            ask(leaving)
        while running(steady):  # the runtime frees what nobody reads
            time.sleep(0.05)
