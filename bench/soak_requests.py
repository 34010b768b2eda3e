"""Requests of the soak beside its streamed chats: every other endpoint, adapters that come and go, sleep and wake-up.

A request counts as failed unless its answer has the status and the content that it must have.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from bench.prompts import prompt
from bench.servers import EMBEDDED_MODEL, MODEL_NAME, Server
from slipway_api import names

LOADED_LATER: Final = "later"  # an adapter that is loaded and unloaded all the time
_SCHEMA: Final = {
    "type": "object",
    "properties": {"glad": {"type": "boolean"}, "kind": {"enum": ["cat", "dog", "fox"]}},
    "required": ["glad", "kind"],
    "additionalProperties": False,
}
_TOOL: Final = {"type": "function", "function": {"name": "feed", "parameters": _SCHEMA}}
# What a streamed chat may ask for beside its messages; a third of them ask for nothing.
CHAT_EXTRAS: Final[tuple[Mapping[str, Any], ...]] = (
    {},
    {},
    {},
    {"logprobs": True, "top_logprobs": 3},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "pet", "schema": _SCHEMA}}},
    {"structured_outputs": {"regex": "[a-z]{3,9}"}},
    {"tools": [_TOOL], "tool_choice": "required"},
    {"n": 2, "stop": ["king"]},
    {"repetition_penalty": 1.1, "presence_penalty": 0.2, "logit_bias": {"20": -1.0}},
    {"temperature": 0.0},  # greedy: speculation drafts from the prompt
    {"min_p": 0.05, "top_k": 40, "top_p": 0.9},
)


@dataclass
class Answers:
    """Requests sent and failed, by their kind."""

    sent: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)


async def send_others(server: Server, seconds: float, seed: int, answers: Answers) -> None:
    """Send one request of each kind after another for so long."""
    draw, loop = random.Random(seed), asyncio.get_running_loop()
    deadline = loop.time() + seconds
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        while loop.time() < deadline:
            async for kind, problem in _round(session, server.url, draw):
                answers.sent[kind] += 1
                if problem:
                    answers.failures[f"{kind}: {problem}"] += 1
                if loop.time() >= deadline:
                    break


async def _round(session: aiohttp.ClientSession, url: str, draw: random.Random) -> AsyncIterator[tuple[str, str]]:
    text, seed = prompt(draw, 20), draw.getrandbits(31)
    sampled = {"model": MODEL_NAME, "temperature": 0.8, "seed": seed}
    phrase = " ".join([prompt(random.Random(seed % 5), 24)] * 3)
    bodies: dict[str, tuple[str, dict[str, Any], Callable[[dict[str, Any]], bool]]] = {
        "completion": (
            "/v1/completions",
            sampled | {"prompt": [text, phrase], "max_tokens": 12, "logprobs": 2, "prompt_logprobs": 1},
            lambda answer: len(answer["choices"]) == 2,
        ),
        "copying": (
            "/v1/completions",
            {"model": MODEL_NAME, "prompt": phrase, "max_tokens": 48, "temperature": 0.0, "ignore_eos": True},
            lambda answer: answer["usage"]["completion_tokens"] == 48,
        ),
        "response": (
            "/v1/responses",
            sampled | {"input": text, "max_output_tokens": 16, "store": False},
            lambda answer: answer["status"] in ("completed", "incomplete"),
        ),
        "message": (
            "/v1/messages",
            {"model": MODEL_NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 16},
            lambda answer: bool(answer["stop_reason"]),
        ),
        "tokenize": (
            "/tokenize",
            {"model": MODEL_NAME, "prompt": text},
            lambda answer: answer["count"] == len(answer["tokens"]),
        ),
        "refused": ("/v1/chat/completions", {"model": "nobody", "messages": []}, lambda answer: "error" in answer),
    }
    for kind, (path, body, is_right) in bodies.items():
        yield (
            kind,
            await _post(session, f"{url}{path}", body, is_right, expected=(400, 404) if kind == "refused" else (200,)),
        )
    yield "adapter loaded and unloaded", await _adapter_comes_and_goes(session, url, text)


async def _adapter_comes_and_goes(session: aiohttp.ClientSession, url: str, text: str) -> str:
    path = f"file://{EMBEDDED_MODEL.parent / 'adapters' / 'sailor'}"
    chat = {"model": LOADED_LATER, "messages": [{"role": "user", "content": text}], "max_tokens": 8}
    for where, body in (
        ("load_lora_adapter", {"lora_name": LOADED_LATER, "lora_path": path}),
        ("chat/completions", chat),
        ("unload_lora_adapter", {"lora_name": LOADED_LATER}),
    ):
        if problem := await _post(session, f"{url}/v1/{where}", body):
            return problem
    return ""


async def sleep_and_wake(server: Server, level: int, answers: Answers) -> None:
    """Put the replica to sleep, check that it is not ready, and wake it up. Only while no request is open."""
    async with aiohttp.ClientSession() as session:
        problem = await _post(session, f"{server.admin_url}{names.PATH_SLEEP}", {"level": level})
        async with session.get(f"{server.admin_url}{names.PATH_READY}") as response:
            if response.status != 503 and not problem:
                problem = f"ready while asleep: {response.status}"
        problem = await _post(session, f"{server.admin_url}{names.PATH_WAKE_UP}", {}) or problem
    answers.sent["sleep and wake-up"] += 1
    if problem:
        answers.failures[f"sleep {level}: {problem}"] += 1


async def _post(
    session: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Any],
    is_right: Callable[[dict[str, Any]], bool] = lambda answer: True,
    expected: tuple[int, ...] = (200,),
) -> str:
    """Why the answer is not what it must be; empty: it is."""
    try:
        async with session.post(url, json=body) as response:
            if response.status not in expected:
                return f"status {response.status}: {(await response.text())[:200]}"
            if response.content_type == "application/json" and not is_right(await response.json()):
                return f"unexpected content: {(await response.text())[:200]}"
    except (aiohttp.ClientError, TimeoutError) as error:
        return type(error).__name__
    return ""
