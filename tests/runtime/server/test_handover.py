"""A deterministic deployment gives a request one answer: alone, in a crowd, preempted, on a replica that batches in
another way and draft tokens, and taken up by that one where the first was left or died. Real processes, over HTTP.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from slipway_api import stream_marks
from slipway_api.names import HEADER_TOKEN_IDS
from tests.runtime.processes import TINY, Process, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAILOR = TINY.parent / "adapters" / "sailor"
FLAGS = ["--deterministic", "--max-model-len", "256", "--max-adapters", "1", "--max-rank", "8"]
FLAGS += ["--adapter", f"sailor=file://{SAILOR}"]
OTHERWISE = ["--max-num-batched-tokens", "24", "--kv-cache-bytes", "1664Ki", "--speculation", "promptLookup"]
REPORT = {HEADER_TOKEN_IDS: stream_marks.REPORT}
RESUME = {HEADER_TOKEN_IDS: stream_marks.RESUME}


def asks(question: str, model: str = "tiny", **params: Any) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 48, "ignore_eos": True}
    return body | {"stream": True, "seed": 7} | params


REQUESTS = {
    "greedy": asks("What is a pod?", temperature=0),
    "sampled": asks("Tell me a story about a fox.", temperature=1.0, top_p=0.9),
    "adapter": asks("Hello! How are you?", "sailor", temperature=0.8),
    "penalized": asks("Tell me a story about a cat.", temperature=0.7, presence_penalty=1.0, min_tokens=40, n=1),
}


STEPS, ENDED = "vllm:num_preemptions", "vllm:request_num_preemptions"


@dataclass
class Said:
    """What arrived of an answer."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    error: str = ""
    id: str = ""


async def hear(
    http: httpx.AsyncClient,
    replica: Process,
    body: dict[str, Any],
    most_tokens: int = 10_000,
    said: Said | None = None,
) -> Said:
    """Listen to an answer, and go away after so many tokens. `said`: where to write it down."""
    said = said or Said()
    headers = RESUME if "slipway_resume" in body else REPORT
    async with http.stream("POST", f"{replica.url}/v1/chat/completions", json=body, headers=headers) as stream:
        assert stream.status_code == 200, await stream.aread()
        async for line in stream.aiter_lines():
            if mark := stream_marks.TOKENS_MARK.match(f"{line}\n\n".encode()):
                said.token_ids += tuple(int(token_id) for token_id in mark[2].split(b",") if token_id)
                if len(said.token_ids) >= most_tokens:
                    break
            if mark := stream_marks.HANDOVER_MARK.match(f"{line}\n\n".encode()):
                said.error = mark[1].decode()
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                said.error = chunk["error"]["message"]
                continue
            said.id = chunk["id"]
            for choice in chunk["choices"]:
                said.text += choice["delta"].get("content") or ""
                said.finish_reason = choice["finish_reason"]
    return said


async def go_on(http: httpx.AsyncClient, replica: Process, body: dict[str, Any], before: Said) -> Said:
    """What a gateway does: ask another replica for the rest, and put both together."""
    resume = {"slipway_resume": {"answers": [{"output_token_ids": before.token_ids}], "id": before.id}}
    rest = await hear(http, replica, body | resume)
    assert rest.id == before.id
    return Said(before.text + rest.text, before.token_ids + rest.token_ids, rest.finish_reason, rest.error, rest.id)


async def preemptions(http: httpx.AsyncClient, replica: Process) -> tuple[float, float]:
    """How often the replica preempted answers, by its steps and by the requests that have ended."""
    listening = await replica.logged("listening")
    text = (await http.get(f"http://127.0.0.1:{listening['admin_port']}/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = {s.name: s.value for name in (STEPS, ENDED) for s in families[name].samples}
    return samples[f"{STEPS}_total"], samples[f"{ENDED}_sum"]


@dataclass
class Deployment:
    one: Process
    other: Process
    http: httpx.AsyncClient
    answers: dict[str, Said]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment() -> AsyncIterator[Deployment]:
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(serving(*FLAGS))
        other = await stack.enter_async_context(serving(*FLAGS, *OTHERWISE))
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=120))
        await asyncio.gather(one.ready(), other.ready())
        answers = {name: await hear(http, one, body) for name, body in REQUESTS.items()}
        for said in answers.values():
            assert len(said.token_ids) == 48
            said.id = ""
        yield Deployment(one, other, http, answers)


def without_id(said: Said) -> Said:
    said.id = ""
    return said


@pytest.mark.capability("API-19")
@pytest.mark.parametrize("where", ["one", "other"])
async def test_the_same_request_has_the_same_answer_in_a_crowd(deployment: Deployment, where: str):
    replica = getattr(deployment, where)
    before = await preemptions(deployment.http, replica)
    crowd = [asks(f"Tell me {number} stories.", temperature=1.0, max_tokens=150, seed=number) for number in range(4)]
    bodies = [*crowd, *REQUESTS.values()]
    said = await asyncio.gather(*(hear(deployment.http, replica, body) for body in bodies))
    assert [without_id(each) for each in said[len(crowd) :]] == list(deployment.answers.values())
    preempted, told = (x - y for x, y in zip(await preemptions(deployment.http, replica), before, strict=True))
    assert told == preempted, "each request tells its own preemptions"
    assert (preempted > 0) == (where == "other"), "the small pool has to take blocks back, and nobody sees it"


@pytest.mark.capability("API-19")
async def test_a_replica_that_batches_in_another_way_and_draft_tokens_says_the_same(deployment: Deployment):
    for name, body in REQUESTS.items():
        assert without_id(await hear(deployment.http, deployment.other, body)) == deployment.answers[name], name


@pytest.mark.capability("API-19", "API-15")
@pytest.mark.parametrize("cut", [1, 17, 47])
async def test_another_replica_goes_on_where_the_first_was_left(deployment: Deployment, cut: int):
    async def handed_over(body: dict[str, Any]) -> Said:
        before = await hear(deployment.http, deployment.one, body, most_tokens=cut)
        return without_id(await go_on(deployment.http, deployment.other, body, before))

    said = await asyncio.gather(*map(handed_over, REQUESTS.values()))
    assert said == list(deployment.answers.values())


@pytest.mark.capability("API-19", "API-15", "RD-9")
async def test_another_replica_goes_on_when_the_engine_of_the_first_dies(deployment: Deployment):
    """The last test: the first replica is gone afterwards."""
    http = deployment.http
    long = {name: body | {"max_tokens": 150} for name, body in REQUESTS.items()}
    whole = await asyncio.gather(*(hear(http, deployment.other, body) for body in long.values()))
    broken = [Said() for _ in long]
    running = [
        asyncio.create_task(hear(http, deployment.one, body, said=said))
        for body, said in zip(long.values(), broken, strict=True)
    ]
    async with asyncio.timeout(60):
        while not all(said.token_ids for said in broken):  # noqa: ASYNC110  another process writes
            await asyncio.sleep(0.005)
    os.kill(deployment.one.engine_pid, signal.SIGKILL)
    await asyncio.gather(*running)
    assert any(said.error for said in broken), "some were cut"
    said = [
        await go_on(http, deployment.other, body, before) if before.error else before
        for body, before in zip(long.values(), broken, strict=True)
    ]
    assert [without_id(each) for each in said] == [without_id(each) for each in whole]
