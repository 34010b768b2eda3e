"""A request that cannot be encoded, or that the worker could not start, ends alone; the engine and a drain go on."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from slipway_runtime.engine.client import EngineClient, Refused
from slipway_runtime.engine.engine import Engine
from slipway_runtime.messages import FinishReason, Message, Request, SamplingParams, StepReport
from tests.runtime.server.serving import tiny_engine

OUT_OF_RANGE: list[dict[str, Any]] = [
    {"top_k": 2**31},
    {"top_k": 2**63},
    {"top_k": -1},
    {"min_tokens": 2**63},
    {"seed": 2**64},
    {"seed": -(2**63) - 1},
    {"logprobs": 2**63},
    {"prompt_logprobs": 10**6},
    {"temperature": float("nan")},
    {"repetition_penalty": float("inf")},
    {"frequency_penalty": 1e308},
    {"logit_bias": ((10**9, 1.0),)},
    {"logit_bias": ((5, float("nan")),)},
]


def a_request(id: str, priority: int = 0, **params: Any) -> Request:
    given = SamplingParams(**{"max_tokens": 4, "ignore_eos": True, "temperature": 0.0} | params)
    return Request(id=id, prompt_token_ids=(5, 6, 7), params=given, arrived=0.0, priority=priority)


def ends(engine: Engine) -> dict[str, tuple[FinishReason, str]]:
    """How each request ended."""
    found = {}
    while engine.has_work:
        for output in engine.step(0.0).outputs:
            if output.finish_reason is not None:
                found[output.request_id] = output.finish_reason, output.error
    engine.idle()
    return found


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()


class Wire:
    """A transport that encodes each message, and has no engine behind it."""

    def __init__(self, engine: Engine) -> None:
        self.facts = engine.facts
        self.first_stats = engine.stats(0.0)

    def start(self, on_report: Callable[[StepReport], None], on_death: Callable[[str], None]) -> None:
        """Nothing runs."""

    def send(self, message: Message) -> None:
        msgspec.msgpack.encode(message)

    async def stop(self) -> None:
        """Nothing runs."""


@pytest.mark.capability("SE-2")
@pytest.mark.parametrize("params", OUT_OF_RANGE, ids=str)
def test_a_request_that_the_worker_could_not_start_ends_alone(engine: Engine, params: dict[str, Any]):
    engine.add(a_request("good"), 0.0)
    engine.add(a_request("bad", **params), 0.0)

    found = ends(engine)

    assert found["good"] == (FinishReason.LENGTH, "")
    assert found["bad"][0] is FinishReason.ERROR
    assert next(iter(params)) in found["bad"][1]


@pytest.mark.parametrize("params", OUT_OF_RANGE, ids=str)
async def test_the_client_refuses_such_a_request_before_anything_is_queued(engine: Engine, params: dict[str, Any]):
    client = EngineClient(Wire(engine))
    await client.start()

    with pytest.raises(Refused, match=next(iter(params))):
        client.generate(a_request("bad", **params))

    assert client.stats().waiting == 0


async def test_a_request_that_cannot_be_encoded_leaves_nothing_behind(engine: Engine):
    """As one whose text is no Unicode: nothing of it may count, or a drain would wait for it without end."""
    client = EngineClient(Wire(engine))
    await client.start()

    for number in range(3):
        with pytest.raises(UnicodeEncodeError):
            client.generate(msgspec.structs.replace(a_request(f"r{number}"), tenant="\ud800"))

    assert client.stats().waiting == 0
    client.drain()
    async with asyncio.timeout(1):
        await client.wait_drained()
