"""A reader that takes nothing costs a bounded buffer, then its own request; everybody else's steps go on."""

import asyncio
import json
import socket

import pytest

from slipway_runtime.engine.stream import OutputStream
from slipway_runtime.messages import FinishReason, Output
from tests.runtime.server.serving import FOREVER, Running, a_replica


async def test_a_stream_that_nobody_reads_holds_a_bounded_number_of_outputs_and_ends():
    aborted: list[tuple[FinishReason, int | None]] = []
    stream = OutputStream("r", 1, lambda reason, index: aborted.append((reason, index)))
    for token in range(stream.max_unread + 10):
        stream.put(Output(request_id="r", token_ids=(token,)))
        assert stream.unread <= stream.max_unread

    assert aborted == [(FinishReason.CANCELLED, None)]
    [last] = [output async for output in stream]
    assert last.finish_reason is FinishReason.CANCELLED
    assert "too slow" in last.error


@pytest.mark.capability("API-10")
async def test_a_reader_that_takes_nothing_is_cancelled_and_the_others_stream_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("slipway_runtime.engine.stream.MAX_UNREAD", 50)
    async with a_replica() as replica:
        stuck = await asyncio.to_thread(_asks_and_never_reads, replica)
        try:
            # Its events are large, so its socket is full soon; from there on its outputs are counted.
            stats = await replica.until(lambda stats: stats.aborted == 1)
            before = stats.steps
            async with replica.streaming(temperature=0, max_tokens=20, ignore_eos=True) as stream:
                events = [line async for line in stream.aiter_lines() if line.startswith("data: {")]
            after = await replica.until(lambda stats: stats.running == 0)
        finally:
            stuck.close()

        assert stats.generated_tokens < 1900, "it did not run to its end"
        assert len(events) >= 20
        assert after.steps - before <= 20 + 3, "no step was lost to the one who does not read"
        assert after.blocks_live == 0


def _asks_and_never_reads(replica: Running) -> socket.socket:
    body = {
        "messages": [{"role": "user", "content": "Hello!"}],
        "stream": True,
        "logprobs": True,
        "top_logprobs": 20,
        **FOREVER,
        "max_tokens": 1900,
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
