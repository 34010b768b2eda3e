"""A reader that takes nothing costs a bounded buffer and no step, and in the end its own request."""

import asyncio
import json
import socket

import pytest

from tests.runtime.server.serving import FOREVER, Running, a_replica


@pytest.mark.capability("API-10")
async def test_a_reader_that_takes_nothing_pauses_and_the_others_stream_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("slipway_runtime.engine.stream.PAUSE_UNREAD", 50)
    async with a_replica() as replica:
        stuck = await asyncio.to_thread(_asks_and_never_reads, replica)
        try:
            # Its events are large, so its socket is full soon; from there on its outputs are counted.
            paused = await replica.until(lambda stats: stats.paused == 1)
            async with replica.streaming(temperature=0, max_tokens=20, ignore_eos=True) as stream:
                events = [line async for line in stream.aiter_lines() if line.startswith("data: {")]
            after = await replica.until(lambda stats: stats.finished == 1)
            replica.clock.ahead = 1000.0  # no step for a long time, and nothing that waits for one
            ready = await replica.admin("/ready")
            replica.clock.ahead = 0.0
        finally:
            stuck.close()
        gone = await replica.until(lambda stats: stats.aborted == 1)

        assert paused.generated_tokens < 700, "it did not run to its end"
        assert len(events) >= 20
        assert after.steps - paused.steps <= 20 + 3, "no step was lost to the one who does not read"
        assert after.running == 1, "it keeps its place"
        assert ready.status_code == 200
        assert gone.blocks_live == gone.running == gone.waiting == 0


@pytest.mark.capability("API-10")
async def test_a_reader_that_comes_back_gets_everything_and_one_that_does_not_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("slipway_runtime.engine.stream.PAUSE_UNREAD", 50)
    async with a_replica() as replica:
        late = await asyncio.to_thread(_asks_and_never_reads, replica)
        try:
            await replica.until(lambda stats: stats.paused == 1)
            raw = await asyncio.to_thread(_read_to_the_end, late)
        finally:
            late.close()
        done = await replica.until(lambda stats: stats.finished == 1)
        monkeypatch.setattr(replica.client, "_paused_seconds", 0.0)
        stuck = await asyncio.to_thread(_asks_and_never_reads, replica)
        try:
            cancelled = await replica.until(lambda stats: stats.aborted == 1)
        finally:
            stuck.close()

        assert raw.count(b'"logprobs":{"content":[{') == 700, "every token came"
        assert b"data: [DONE]" in raw
        assert done.blocks_live == cancelled.blocks_live == 0


def _read_to_the_end(reader: socket.socket) -> bytes:
    raw = b""
    while b"data: [DONE]" not in raw[-200:]:
        raw += reader.recv(1 << 20)
    return raw


def _asks_and_never_reads(replica: Running) -> socket.socket:
    body = {
        "messages": [{"role": "user", "content": "Hello!"}],
        "stream": True,
        "logprobs": True,
        "top_logprobs": 20,
        **FOREVER,
        "max_tokens": 700,
    }
    raw = json.dumps(body).encode()
    host, port = replica.url.removeprefix("http://").split(":")
    stuck = socket.socket()
    stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stuck.connect((host, int(port)))
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n"
    )
    stuck.sendall(head.encode() + raw)
    return stuck
