"""A request leaves nothing behind that only Python's cyclic collector can free: it may hold a prompt of megabytes."""

import asyncio
import contextlib
import gc
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from slipway_gateway.collector import collect_rarely
from slipway_gateway.journal import Journal
from slipway_gateway.request_body import Body
from slipway_gateway.request_state import RequestState
from tests.gateway.doubles import (
    Runtime,
    a_caller,
    a_gateway,
    be_draining,
    be_full,
    begin_stream,
    die_after_two_words,
    end_without_saying_why,
    hang_up,
    speak,
    until,
)

OURS = (Body, RequestState, Journal)


async def be_silent(runtime: Runtime, request: Any) -> Any:
    await asyncio.Event().wait()


async def begin_and_be_silent(runtime: Runtime, request: Any) -> Any:
    await begin_stream(request)
    await asyncio.Event().wait()


async def speak_no_http(runtime: Runtime, request: Any) -> Any:
    request.transport.write(b"garbage\r\n\r\n")
    request.transport.close()


@contextlib.contextmanager
def collector_off() -> Iterator[Callable[[], list[Any]]]:
    """Yields a function that returns everything that the collector would have freed since then."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)

    def freed() -> list[Any]:
        gc.collect()
        found = list(gc.garbage)
        gc.garbage.clear()
        return found

    try:
        yield freed
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def ours(garbage: list[Any]) -> list[str]:
    frames = [
        f"{Path(one.f_code.co_filename).name}:{one.f_lineno}"
        for one in garbage
        if isinstance(one, types.FrameType) and "/slipway_gateway/" in one.f_code.co_filename
    ]
    return frames + [type(one).__name__ for one in garbage if isinstance(one, OURS)]


async def ask(caller: Any, **fields: Any) -> None:
    """One request, whatever becomes of it."""
    with contextlib.suppress(aiohttp.ClientError):
        async with caller.chat(**fields) as response:
            await response.read()


@pytest.mark.capability("OP-14")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "trouble",
    [
        speak, be_draining, be_full, hang_up, speak_no_http, die_after_two_words, end_without_saying_why, be_silent,
        begin_and_be_silent,
    ],
)  # fmt: skip
async def test_an_answer_or_failure_leaves_no_cycles(trouble: Any, stream: bool):
    async with (
        Runtime(trouble) as one,
        Runtime(trouble) as two,
        a_gateway(one, two, first_byte_seconds=0.1, stream_silence_seconds=0.1, request_seconds=0.3) as gateway,
        a_caller(gateway) as caller,
    ):
        await ask(caller, stream=stream)  # what the first request imports and caches
        with collector_off() as freed:
            await ask(caller, stream=stream)
            await until(lambda: not gateway.requests.open)
            await asyncio.sleep(0)
            assert ours(freed()) == []


@pytest.mark.capability("OP-14")
async def test_a_connection_that_cannot_be_made_leaves_no_cycles():
    async with Runtime() as gone:
        url = gone.url
    async with a_gateway(url) as gateway, a_caller(gateway) as caller:
        await ask(caller)
        with collector_off() as freed:
            await ask(caller)
            await asyncio.sleep(0)
            assert ours(freed()) == []


@pytest.mark.capability("OP-14")
@pytest.mark.parametrize(
    "fields", [{"model": "unknown"}, {"messages": 7}, {"max_tokens": -1}, {"stream": "yes"}], ids=lambda one: str(one)
)
async def test_a_refusal_leaves_no_cycles(fields: dict[str, Any]):
    async with Runtime() as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        await ask(caller, **fields)
        with collector_off() as freed:
            await ask(caller, **fields)
            await asyncio.sleep(0)
            assert ours(freed()) == []


@pytest.mark.capability("OP-14")
async def test_a_client_that_leaves_leaves_no_cycles():
    async with Runtime().hold() as runtime, a_gateway(runtime) as gateway, a_caller(gateway) as caller:
        await ask(caller, model="unknown")
        with collector_off() as freed:
            runtime.allow(2)
            asking = asyncio.create_task(ask(caller, stream=True))
            await runtime.streaming.wait()
            asking.cancel()
            await until(lambda: not gateway.requests.open)
            await asyncio.sleep(0)
            del asking
            assert ours(freed()) == []


@pytest.mark.capability("OP-14")
def test_what_lives_as_long_as_the_process_is_never_walked_again():
    thresholds = gc.get_threshold()
    try:
        collect_rarely()

        assert gc.get_freeze_count() > 10_000, "the modules"
        assert len(gc.get_objects()) < gc.get_freeze_count() // 10
        young, _, _ = gc.get_threshold()
        assert young > 10 * thresholds[0], "a thousand streams do not start it by their usual churn"
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
