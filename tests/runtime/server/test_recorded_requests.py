"""Requests that agent programs really sent, recorded by `e2e.record_programs`, are answered with the scripted call.

The whole programs run in `e2e/stories/test_agent_programs.py`. review/peer-suites.md 1, 2, 3, 7.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from slipway_runtime.server.tokenizer import load_tokenizer
from tests.runtime.server.serving import Running, a_replica
from tests.scripted_model import ANSWER, write_checkpoint

RECORDED = [
    pytest.param(request, id=f"{file.stem}-{number}")
    for file in sorted((Path(__file__).parent / "recorded").glob("*.json"))
    for number, request in enumerate(json.loads(file.read_text()))
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("scripted"))
    async with a_replica(model_path=checkpoint, tokenizer=load_tokenizer(checkpoint)) as running:
        yield running


def text_of(stream: str) -> str:
    """All pieces of text and arguments of an event stream, of any of the three APIs, put together."""
    pieces = []
    for line in stream.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            delta = event.get("delta") or {}
            pieces.append(delta if isinstance(delta, str) else delta.get("text") or delta.get("partial_json") or "")
            for choice in event.get("choices") or ():
                calls = choice["delta"].get("tool_calls") or ()
                pieces += [choice["delta"].get("content") or "", *(call["function"]["arguments"] for call in calls)]
    return "".join(pieces)


def has_result(body: dict[str, Any]) -> bool:
    """Whether the conversation ends with the result of a call."""
    last = (body.get("messages") or body["input"])[-1]
    blocks = last.get("content")
    return (
        last.get("role") == "tool"
        or last.get("type") == "function_call_output"
        or (isinstance(blocks, list) and any(block.get("type") == "tool_result" for block in blocks))
    )


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.capability("API-26", "API-27")
@pytest.mark.parametrize("recorded", RECORDED)
async def test_a_recorded_request_gets_its_call_or_its_answer(replica: Running, recorded: dict[str, Any]):
    body = recorded["body"]

    answer = await replica.post(recorded["path"], body)

    assert answer.status_code == 200, answer.text
    if has_result(body):
        assert text_of(answer.text) == ANSWER
    elif body.get("tools"):
        assert "proof.txt" in text_of(answer.text)
