"""Many streams read at once with the stock client, and something that happens while every one of them is live."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import openai

BEGUN = 3  # pieces after which a stream counts as live: its tokens arrive
BEGIN_SECONDS = 120.0  # for all streams, on a machine with other work
# What the stock client raises where the connection of a stream breaks; an error event raises APIError instead.
BROKEN_CONNECTIONS = frozenset({"APIConnectionError", "RemoteProtocolError", "ReadError"})


@dataclass
class Stream:
    """One streamed answer as far as its client has read it."""

    number: int
    request_id: str  # under which the gateway that served it logs it
    text: str = ""
    pieces: int = 0
    ids: set[str] = field(default_factory=set)
    finish: str | None = None
    completion_tokens: int = 0
    error: str = ""  # what the client raised; empty for a stream that ended well

    @property
    def is_live(self) -> bool:
        """Whether it has begun and has not ended."""
        return self.pieces >= BEGUN and self.finish is None and not self.error


@dataclass(frozen=True)
class Streams:
    """The streams to read: sampled with a fixed seed, each of another prompt, all of the same length."""

    base_url: str
    model: str
    count: int
    tokens: int

    def read(self, meanwhile: Callable[[], object] | None = None, *, run: str = "undisturbed") -> list[Stream]:
        """Read all of them at once; `meanwhile` is called in a thread when each is live.

        A stream that has begun is read on when all have: a fast one must not end before a slow one begins. Fails where
        one is not live. `run` is the first part of the request ids.
        """
        return asyncio.run(self._read(meanwhile, run))

    async def _read(self, meanwhile: Callable[[], object] | None, run: str) -> list[Stream]:
        streams = [Stream(number, f"{run}-{number}") for number in range(self.count)]
        begun, all_begun = asyncio.Semaphore(0), asyncio.Event()
        async with openai.AsyncOpenAI(base_url=self.base_url, api_key="none", timeout=300, max_retries=0) as client:
            reading = [asyncio.create_task(self._read_one(client, stream, begun, all_begun)) for stream in streams]
            async with asyncio.timeout(BEGIN_SECONDS):
                for _ in streams:
                    await begun.acquire()
            all_begun.set()
            if meanwhile is not None:
                ended = [stream for stream in streams if not stream.is_live]
                assert not ended, f"{len(ended)} of {self.count} streams are not live: {ended[:1]}"
                await asyncio.to_thread(meanwhile)
            await asyncio.gather(*reading)
        return streams

    async def _read_one(
        self, client: openai.AsyncOpenAI, stream: Stream, begun: asyncio.Semaphore, all_begun: asyncio.Event
    ) -> None:
        try:
            parts = await client.chat.completions.create(
                model=self.model,
                messages=[{"role": "user", "content": f"Tell me story number {stream.number} about a lamp."}],
                max_tokens=self.tokens,
                temperature=0.8,
                seed=stream.number,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
                extra_headers={"X-Request-Id": stream.request_id},
            )
            async for part in parts:
                stream.ids.add(part.id)
                if part.usage is not None:
                    stream.completion_tokens = part.usage.completion_tokens
                for choice in part.choices:
                    stream.text += choice.delta.content or ""
                    stream.pieces += 1
                    stream.finish = choice.finish_reason or stream.finish
                    if stream.pieces == BEGUN:
                        begun.release()
                        await all_begun.wait()
        except Exception as error:  # noqa: BLE001  the client of httpx and of openai raise different families
            stream.error = f"{type(error).__name__}: {error}"
        finally:
            if stream.pieces < BEGUN:
                begun.release()


def disturbances(streams: Sequence[Stream], undisturbed: Sequence[Stream]) -> list[str]:
    """What a client can see of a disturbance, as one sentence for each stream: nothing, where all are as they were."""
    return [
        f"stream {was.number}: {why}"
        for stream, was in zip(streams, undisturbed, strict=True)
        if (why := _disturbance(stream, was))
    ]


def _disturbance(stream: Stream, was: Stream) -> str:
    if stream.error:
        return stream.error
    if stream.text != was.text:
        return f"another text: {stream.text!r} instead of {was.text!r}"
    if len(stream.ids) != 1:
        return f"{len(stream.ids)} ids"
    if (stream.finish, stream.completion_tokens) != (was.finish, was.completion_tokens):
        return f"{stream.finish} after {stream.completion_tokens} tokens instead of {was.completion_tokens}"
    return ""
