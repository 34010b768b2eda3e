"""Benchmark of what a request leaves behind in the API process: its resident memory, kind by kind, round after round.

In the first round caches fill: the tokenizer's of words (10,000 of them), compiled grammars, buffers of the allocator.
What grows after that grows for ever, so the last round is the one with an aim.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from string import ascii_lowercase
from typing import Any, Final

import aiohttp

from bench.figures import Figure, Section
from bench.servers import EMBEDDED_MODEL, MODEL_NAME, Server, a_runtime

ROUNDS: Final = 4
AT_ONCE: Final = 4
AIM_BYTES: Final = 32  # a request, in the last round
WORDS: Final = 20_000  # more than the tokenizer remembers
FLAGS: Final = ("--max-adapters", "1", "--max-cpu-adapters", "2", "--adapter-endpoints")

Send = Callable[[aiohttp.ClientSession, random.Random], Awaitable[None]]


def measure() -> Section:
    """All figures."""
    with a_runtime(*FLAGS) as server:
        return Section("Memory that requests leave behind in the API process", tuple(asyncio.run(_rounds(server))))


async def _rounds(server: Server) -> list[Figure]:
    draw = random.Random(0)
    words = ["".join(draw.choices(ascii_lowercase, k=draw.randrange(3, 9))) for _ in range(WORDS)]
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    begun = server.rss_bytes()
    for _ in range(ROUNDS):
        for kind, (count, send) in _kinds(server, words).items():
            before = server.rss_bytes()
            await _repeat(send, count, draw)
            last[kind] = (server.rss_bytes() - before) / count
            first.setdefault(kind, last[kind])
    return [
        *(
            Figure(f"{kind}: left by a request", value, "B", f"{first[kind]:.0f} in round 1", at_most=AIM_BYTES)
            for kind, value in last.items()
        ),
        Figure("resident at the start", begun / 2**20, "MiB"),
        Figure("resident at the end", server.rss_bytes() / 2**20, "MiB", f"after {ROUNDS} rounds"),
    ]


def _kinds(server: Server, words: list[str]) -> Mapping[str, tuple[int, Send]]:
    """How many requests of a kind a round has, and how one is sent."""

    def post(path: str, **body: Any) -> Send:
        async def send(session: aiohttp.ClientSession, _draw: random.Random) -> None:
            async with session.post(f"{server.url}{path}", json={"model": MODEL_NAME} | body) as response:
                await response.read()

        return send

    async def other_words(session: aiohttp.ClientSession, draw: random.Random) -> None:
        await post("/v1/completions", prompt=" ".join(draw.choices(words, k=30)), max_tokens=1)(session, draw)

    async def leave(session: aiohttp.ClientSession, _draw: random.Random) -> None:
        body = {"model": MODEL_NAME, "prompt": "Once", "max_tokens": 200, "stream": True, "ignore_eos": True}
        response = await session.post(f"{server.url}/v1/completions", json=body)
        await response.content.read(1)
        response.close()

    async def load_adapter(session: aiohttp.ClientSession, draw: random.Random) -> None:
        name = f"adapter-{draw.getrandbits(60)}"
        path = f"file://{EMBEDDED_MODEL.parent / 'adapters' / 'sailor'}"
        for endpoint, body in (("load", {"lora_name": name, "lora_path": path}), ("unload", {"lora_name": name})):
            async with session.post(f"{server.url}/v1/{endpoint}_lora_adapter", json=body) as response:
                assert response.status == 200, await response.text()

    hello = [{"role": "user", "content": "Hi"}]
    return {
        "tokenize": (4000, post("/tokenize", prompt="Once upon a time there was a bear.")),
        "refused": (4000, post("/v1/chat/completions", messages=[])),
        "completion of other words": (4000, other_words),
        "streamed chat": (2000, post("/v1/chat/completions", messages=hello, max_tokens=4, stream=True)),
        "chat with a schema": (
            1000,
            post("/v1/chat/completions", messages=hello, max_tokens=4, response_format={"type": "json_object"}),
        ),
        "response": (1000, post("/v1/responses", input="Hi", max_output_tokens=4)),
        "message": (1000, post("/v1/messages", messages=hello, max_tokens=4)),
        "client that leaves": (1000, leave),
        "adapter loaded and unloaded": (300, load_adapter),
    }


async def _repeat(send: Send, count: int, draw: random.Random) -> None:
    async with aiohttp.ClientSession() as session:

        async def some(number: int) -> None:
            for _ in range(number):
                await send(session, draw)

        await asyncio.gather(*(some(count // AT_ONCE) for _ in range(AT_ONCE)))
