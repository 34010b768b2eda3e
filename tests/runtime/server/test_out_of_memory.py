"""What clients, dashboards and the kubelet see when the device's memory does not last for a step."""

import json

import pytest
import structlog

from slipway_runtime.engine.engine import MAX_OOM_STEPS
from tests.runtime.engine.failing_allocations import failing
from tests.runtime.server.serving import FOREVER, Running, a_replica


def errors_total(page: str) -> dict[str, float]:
    lines = [line for line in page.splitlines() if line.startswith("slipway:errors_total{")]
    return {line.split('class="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


async def statuses(replica: Running) -> tuple[int, int]:
    return (await replica.admin("/health")).status_code, (await replica.admin("/ready")).status_code


@pytest.mark.capability("OB-8", "API-3")
async def test_a_request_without_memory_is_a_503_that_may_be_sent_again_and_the_next_one_is_answered():
    async with a_replica() as replica:
        with failing(replica.steps._engine, 1), structlog.testing.capture_logs() as logged:
            refused = await replica.chat(max_tokens=3)
        answered = await replica.chat(max_tokens=3)
        page = (await replica.http.get(f"{replica.admin_url}/metrics")).text

        assert await statuses(replica) == (200, 200)

    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    error = refused.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("ServiceUnavailableError", 503, None)
    assert error["message"] == "this replica ran out of memory; the request may be sent again"
    assert answered.status_code == 200
    assert errors_total(page) == dict.fromkeys(errors_total(page), 0.0) | {"out_of_memory": 1.0}
    assert 'vllm:request_success_total{engine="0",finished_reason="error",model_name="tiny"} 1.0' in page
    assert len([line for line in logged if "memory" in line["event"]]) == 1


@pytest.mark.capability("OB-8", "API-2")
async def test_a_stream_without_memory_ends_with_an_error_event():
    async with a_replica() as replica, replica.streaming("Tell me a story.", **FOREVER) as stream:
        lines = stream.aiter_lines()
        await anext(lines)
        with failing(replica.steps._engine, 1):
            rest = [line async for line in lines if line]

    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == 503
    assert rest[-1] == "data: [DONE]"


@pytest.mark.capability("RD-3")
async def test_a_replica_that_never_has_enough_is_not_healthy_so_that_it_is_started_again():
    async with a_replica() as replica:
        with failing(replica.steps._engine, MAX_OOM_STEPS + 1):
            answers = [(await replica.chat(max_tokens=3)).status_code for _ in range(MAX_OOM_STEPS + 1)]

        assert answers == [503] * (MAX_OOM_STEPS + 1)
        assert await statuses(replica) == (503, 503)
        assert replica.client.error.startswith("StepOutOfMemoryError: CUDA out of memory")
