"""Sends one streamed chat request and measures it; the request is finished only when the server sends [DONE]."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

REVISION_HEADER = "x-slipway-revision"


class StreamFailedError(Exception):
    """The request failed or broke off; the message is a short class of failure, not text of the answer."""


class ReaderLeft(Exception):  # noqa: N818  not an error: the reader wanted to
    """The reader went away in the middle, as planned."""


class ShedError(Exception):
    """429: come back later."""

    def __init__(self, retry_after_seconds: float) -> None:
        super().__init__(f"429, retry after {retry_after_seconds:g} s")
        self.retry_after_seconds = retry_after_seconds


@dataclass
class Timings:
    """One finished stream."""

    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between events that brought text
    output_tokens: int = 0
    prompt_tokens: int = 0
    revision: str = ""
    text: str = ""


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Error(msgspec.Struct):
    message: str = ""
    type: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Event).decode


async def chat_stream(
    session: aiohttp.ClientSession, base_url: str, body: Mapping[str, Any], *, leave_after: int | None = None
) -> Timings:
    """Send `body` and read the stream to its end; raises ShedError or StreamFailedError.

    With `leave_after`, the connection is dropped after so many pieces of text: raises ReaderLeft.
    """
    started = time.monotonic()
    try:
        async with session.post(f"{base_url}/chat/completions", json=body) as response:
            if response.status == 429:
                raise ShedError(_retry_after(response.headers))
            if response.status != 200:
                raise StreamFailedError(f"status {response.status}")
            return await _read(response, started, leave_after)
    except TimeoutError as late:
        raise StreamFailedError("timed out") from late
    except aiohttp.ClientError as broken:
        raise StreamFailedError(type(broken).__name__) from broken


async def _read(response: aiohttp.ClientResponse, started: float, leave_after: int | None) -> Timings:
    timings = Timings(revision=response.headers.get(REVISION_HEADER, ""))
    buffer, last, pieces, reason, done = b"", 0.0, 0, "", False
    async for chunk in response.content.iter_any():
        now = time.monotonic()
        *events, buffer = (buffer + chunk).split(b"\n\n")
        for event in events:
            if not event.startswith(b"data: "):
                continue  # a comment that keeps the connection alive
            if event == b"data: [DONE]":
                done = True
                continue
            decoded = _decode(event[6:])
            if decoded.error is not None:
                raise StreamFailedError(f"error event: {decoded.error.type or 'unnamed'}")
            if decoded.usage is not None:
                timings.prompt_tokens = decoded.usage.prompt_tokens
                timings.output_tokens = decoded.usage.completion_tokens
            for choice in decoded.choices:
                reason = choice.finish_reason or reason
                if choice.delta.content:
                    pieces += 1
                    timings.text += choice.delta.content
                    if pieces == leave_after:
                        response.close()  # not read to its end: the server must notice
                        raise ReaderLeft
                    if last:
                        timings.gaps.append(now - last)
                    else:
                        timings.ttft = now - started
                    last = now
    if not done or not reason:
        raise StreamFailedError("the stream ended without saying why")
    timings.ttft = timings.ttft or time.monotonic() - started  # an empty answer is an answer
    timings.output_tokens = timings.output_tokens or pieces
    return timings


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds to wait; `retry-after-ms` is finer and wins. Without either: one second."""
    try:
        if "retry-after-ms" in headers:
            return max(0.0, float(headers["retry-after-ms"]) / 1000)
        return max(0.0, float(headers.get("retry-after", "1")))
    except ValueError:
        return 1.0
