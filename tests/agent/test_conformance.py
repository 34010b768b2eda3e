"""The admin protocol, asked in one way of our runtime and of agents beside other engines.

What holds here is what operator and gateway rely on. A difference between two replicas that a test below allows for is
in docs/engines.md.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from slipway_api.runtime_api import (
    AdapterInfo,
    AdapterList,
    DrainStatus,
    Health,
    ModelInfo,
    Ready,
    ReadyReason,
    Signals,
    SleepStatus,
    State,
)
from tests.agent.subjects import SAILOR, SUBJECTS, VLLM_START_SECONDS, Subject

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.capability("OP-11"),
    pytest.mark.timeout(VLLM_START_SECONDS + 120),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(SUBJECTS))
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    async with SUBJECTS[request.param]() as replica:
        yield replica


async def test_only_probes_and_metrics_are_open(subject: Subject):
    for path in ("/ready", "/health", "/metrics"):
        assert (await subject.admin(path, token="")).status_code == 200
    closed = [("GET", path) for path in ("/signals", "/state", "/adapters", "/model")]
    closed += [("POST", path) for path in ("/drain", "/undrain", "/adapters", "/model", "/sleep", "/wake_up")]
    closed += [("DELETE", "/adapters/x"), ("DELETE", "/model")]
    for method, path in closed:
        for token in ("", "wrong"):
            answer = await subject.admin(path, method, token=token)
            assert answer.status_code == 401, f"{method} {path}"
            assert answer.json()["error"]["type"] == "AuthenticationError"
    assert (await subject.admin("/ready", token="")).status_code == 200, "no drain came through"


async def test_probes_answer_with_their_bodies(subject: Subject):
    ready = await subject.admin("/ready", params={"waitSeconds": "1"})
    assert Ready.model_validate_json(ready.content) == Ready(ready=True, reason=ReadyReason.READY)
    assert (await subject.admin("/ready", "HEAD")).status_code == 200
    assert (await subject.admin("/ready", params={"waitSeconds": "3"})).status_code == 400
    assert Health.model_validate_json((await subject.admin("/health")).content).healthy
    page = (await subject.admin("/metrics")).text
    assert "vllm:num_requests_running" in page
    assert "vllm:time_to_first_token_seconds_bucket" in page


async def test_signals_of_an_idle_replica_are_short_and_balanced(subject: Subject):
    answer = await subject.admin("/signals")
    signals = Signals.model_validate_json(answer.content)
    assert len(answer.content) < 300
    assert signals.boot_id
    assert not signals.draining
    assert (signals.starting, signals.not_ready) == ("", "")
    assert signals.admitted == signals.finished + signals.aborted + signals.handed_over + signals.running
    assert (await subject.signals()).boot_id == signals.boot_id


async def test_a_request_is_counted_while_it_runs_and_after_it(subject: Subject):
    before = await subject.until_idle()
    async with subject.streaming() as stream:
        lines = stream.aiter_lines()
        await anext(lines)

        async def running() -> Signals | None:
            signals = await subject.signals()
            return signals if signals.running + signals.waiting == 1 and signals.kv_usage > 0 else None

        during: Signals = await subject.until(running)
        assert during.admitted == before.admitted + 1
        async for _ in lines:
            pass
    after = await subject.until_idle()
    assert after.finished == before.finished + 1
    assert after.generated_tokens == before.generated_tokens + subject.longest
    assert after.prompt_tokens > before.prompt_tokens


async def test_a_drain_lets_a_stream_finish_and_ends_after_it(subject: Subject):
    async with subject.streaming() as stream:
        lines = stream.aiter_lines()
        await anext(lines)
        asked = {"timeoutSeconds": 600, "refuseAfterSeconds": 0, "reason": "test"}
        status = DrainStatus.model_validate_json((await subject.admin("/drain", "POST", json=asked)).content)
        assert status.draining
        assert not status.is_drained
        ready = await subject.admin("/ready")
        assert (ready.status_code, Ready.model_validate_json(ready.content).reason) == (503, ReadyReason.DRAINING)
        again = DrainStatus.model_validate_json((await subject.admin("/drain", "POST")).content)
        assert again.draining
        assert not again.is_drained
        during = await subject.signals()
        assert during.draining
        assert during.running + during.waiting >= 1
        rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert len(rest) >= 100, "the stream was not cut"

    async def drained() -> bool:
        signals = await subject.signals()
        return signals.draining and signals.running + signals.waiting == 0

    await subject.until(drained)
    assert DrainStatus.model_validate_json((await subject.admin("/drain", "POST")).content).is_drained
    assert (await subject.admin("/health")).status_code == 200, "a drained replica is well"
    back = DrainStatus.model_validate_json((await subject.admin("/undrain", "POST")).content)
    assert not back.draining
    await subject.until_ready()
    assert not (await subject.signals()).draining
    assert (await subject.complete()).status_code == 200


async def test_bodies_that_make_no_sense_are_refused_and_change_nothing(subject: Subject):
    for path, body in (
        ("/drain", b"{"),
        ("/drain", b'{"timeoutSeconds": -1}'),
        ("/adapters", b""),
        ("/adapters", b'{"name": "x"}'),
        ("/sleep", b'{"level": 3}'),
        ("/sleep", b"\xff"),
    ):
        answer = await subject.admin(path, "POST", content=body)
        assert answer.status_code == 400, f"{path} {body!r}"
        assert answer.json()["error"]["message"]
    assert (await subject.admin("/nothing")).status_code == 404
    assert (await subject.admin("/drain")).status_code == 405
    assert (await subject.admin("/ready")).status_code == 200


async def adapters_of(subject: Subject) -> AdapterList:
    answer = await subject.admin("/adapters")
    assert answer.status_code == 200
    return AdapterList.model_validate_json(answer.content)


async def test_an_adapter_is_loaded_listed_used_and_unloaded(subject: Subject):
    empty = await adapters_of(subject)
    assert empty.adapters == ()
    assert empty.max_adapters >= 1
    assert empty.boot_id == (await subject.signals()).boot_id
    asked = {"name": "sailor", "uri": SAILOR, "version": "v1"}
    answer = await subject.admin("/adapters", "POST", json=asked)
    assert answer.status_code in (200, 202)
    assert AdapterInfo.model_validate_json(answer.content).name == "sailor"

    async def loaded() -> AdapterInfo | None:
        listed = (await adapters_of(subject)).adapters
        return next((one for one in listed if one.state in ("host", "slot")), None)

    info: AdapterInfo = await subject.until(loaded)
    assert (info.name, info.uri, info.version, info.pinned, info.reason) == ("sailor", SAILOR, "v1", False, "")
    assert info.digest, "the operator tells by it whether a content has answered its probe"
    assert (await subject.complete("sailor")).status_code == 200
    assert (await subject.admin("/adapters", "POST", json=asked)).status_code == 200, "asking again is harmless"
    state = State.model_validate_json((await subject.admin("/state")).content)
    assert [one.name for one in state.adapters] == ["sailor"]

    async def gone() -> bool:
        answer = await subject.admin("/adapters/sailor", "DELETE")
        assert answer.status_code in (200, 202)
        return answer.status_code == 200

    await subject.until(gone)
    assert (await adapters_of(subject)).adapters == ()
    assert (await subject.complete("sailor")).status_code == 404
    assert (await subject.admin("/adapters/sailor", "DELETE")).status_code == 200, "unloading again is harmless"


@pytest.mark.parametrize(
    "asked",
    [
        {"name": "a/b", "uri": SAILOR},
        {"name": "x", "uri": "ftp://host/x"},
        {"name": "x", "uri": "file://relative"},
        {"name": "x", "uri": SAILOR, "digest": "sha256:" + "0" * 64},
        {"name": "nowhere", "uri": SAILOR + "-that-is-not-there"},
    ],
    ids=["name", "scheme", "path", "digest", "missing"],
)
async def test_an_adapter_that_cannot_be_had_is_refused_with_a_sentence(subject: Subject, asked: dict[str, Any]):
    answer = await subject.admin("/adapters", "POST", json=asked)

    async def failed() -> str:
        listed = (await adapters_of(subject)).adapters
        return next((one.message for one in listed if one.state == "failed"), "")

    if answer.status_code == 202:
        assert await subject.until(failed)
    else:
        assert 400 <= answer.status_code < 500
        assert answer.json()["error"]["message"]
    await subject.admin(f"/adapters/{asked['name'].replace('/', '%2F')}", "DELETE")
    assert (await adapters_of(subject)).adapters == ()


async def test_the_state_adds_up(subject: Subject):
    state = State.model_validate_json((await subject.admin("/state")).content)
    blocks = state.blocks
    assert state.model_name == "tiny"
    assert state.boot_id == (await subject.signals()).boot_id
    assert blocks.live + blocks.cached + blocks.free == blocks.total > 0
    assert state.block_size > 0
    assert state.max_model_len >= 512
    assert state.max_num_seqs > 0
    assert not state.draining


async def test_the_model_is_named_and_another_one_is_refused(subject: Subject):
    info = ModelInfo.model_validate_json((await subject.admin("/model")).content)
    assert (info.served_name, info.loaded) == ("tiny", True)
    assert info.uri
    another = {"uri": "file:///another", "maxAdapters": 2, "maxCPUAdapters": 2}
    other = await subject.admin("/model", "POST", json=another)
    given_back = await subject.admin("/model", "DELETE")
    assert (other.status_code, given_back.status_code) == (409, 409)
    assert other.json()["error"]["message"]
    assert given_back.json()["error"]["message"]
    assert (await subject.complete()).status_code == 200


async def test_a_replica_sleeps_only_when_idle_is_not_ready_then_and_wakes_up(subject: Subject):
    async with subject.streaming() as stream:
        lines = stream.aiter_lines()
        await anext(lines)
        refused = await subject.admin("/sleep", "POST", json={"level": 1})
        assert refused.status_code == 409, "somebody is served"
        async for _ in lines:
            pass
    await subject.until_idle()

    async def asleep() -> bool:  # the last byte of a stream may be counted a moment longer
        answer = await subject.admin("/sleep", "POST")
        if answer.status_code == 409:
            return False
        assert SleepStatus.model_validate_json(answer.content) == SleepStatus(sleeping=True, level=1)
        return True

    await subject.until(asleep, 10)
    ready = await subject.admin("/ready")
    assert (ready.status_code, Ready.model_validate_json(ready.content).reason) == (503, ReadyReason.SLEEPING)
    assert (await subject.admin("/health")).status_code == 200
    assert (await subject.admin("/sleep", "POST")).status_code == 200, "asking again is harmless"
    woken = await subject.admin("/wake_up", "POST")
    assert SleepStatus.model_validate_json(woken.content) == SleepStatus(sleeping=False)
    assert (await subject.admin("/wake_up", "POST")).status_code == 200
    assert (await subject.admin("/ready")).status_code == 200
    assert (await subject.complete()).status_code == 200


async def test_many_callers_at_once_get_answers(subject: Subject):
    answers = await asyncio.gather(*(subject.admin("/signals") for _ in range(40)))
    assert {answer.status_code for answer in answers} == {200}
