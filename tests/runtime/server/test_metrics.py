"""Dashboards, autoscaling recipes and gateway pickers made for vLLM read our numbers; logs say all but the text."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import structlog
from prometheus_client.parser import text_string_to_metric_families

from slipway_runtime.engine.client import QueueLimits
from slipway_runtime.server.metrics import one_two_five
from tests.runtime.gateway_token import as_gateway
from tests.runtime.server.serving import FOREVER, Running, a_replica

GAUGES = ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"]
COUNTERS = [
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
]
HISTOGRAMS = [
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_max_num_generation_tokens",
    "vllm:request_params_max_tokens",
    "vllm:request_params_n",
    "vllm:request_num_preemptions",
    "vllm:iteration_tokens_total",
]


@pytest_asyncio.fixture
async def replica() -> AsyncIterator[Running]:
    async with a_replica() as running:
        yield running


# What a Prometheus 2 sends.
ACCEPT = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,*/*;q=0.1"


async def samples(replica: Running, url: str | None = None) -> dict[str, float]:
    """Every sample as `name{label="value",…}`, without the two labels that all of them share."""
    page = (await replica.http.get(url or f"{replica.admin_url}/metrics", headers={"accept": ACCEPT})).text
    found = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in {"model_name", "engine"}}
            if family.name.startswith("vllm:"):
                assert sample.labels["model_name"] == "tiny"
                assert sample.labels["engine"] == "0"
            inner = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
            found[sample.name + (f"{{{inner}}}" if inner else "")] = sample.value
    return found


@pytest.mark.capability("OB-1")
async def test_the_names_are_those_of_vllm(replica: Running):
    await replica.chat(max_tokens=6, ignore_eos=True)
    found = await samples(replica)

    assert not set(GAUGES + COUNTERS) - set(found)
    for name in HISTOGRAMS:
        assert f"{name}_count" in found
        assert f"{name}_bucket{{le=+Inf}}" in found
    config = next(name for name in found if name.startswith("vllm:cache_config_info"))
    assert "block_size=16" in config
    assert "num_gpu_blocks=" in config


@pytest.mark.capability("OB-1", "PF-7")
async def test_the_numbers_are_those_of_the_requests(replica: Running):
    await replica.chat("One.", max_tokens=6, ignore_eos=True)
    await replica.chat("Two.", max_tokens=4, ignore_eos=True, stream=True)
    refused = await replica.chat(temperature=9)
    stats = await replica.until(lambda stats: stats.finished == 2)
    found = await samples(replica)

    assert refused.status_code == 400
    assert found["vllm:request_success_total{finished_reason=length}"] == 2
    assert found["vllm:request_success_total{finished_reason=abort}"] == 0
    assert found["vllm:generation_tokens_total"] == 10 == stats.generated_tokens
    assert found["vllm:request_generation_tokens_sum"] == 10
    assert found["vllm:request_max_num_generation_tokens_sum"] == 10
    assert found["vllm:request_prompt_tokens_sum"] == found["vllm:prompt_tokens_total"]
    # First tokens and the gaps between tokens are apart: two of these, eight of those.
    assert found["vllm:time_to_first_token_seconds_count"] == 2
    assert found["vllm:inter_token_latency_seconds_count"] == 8
    assert found["vllm:iteration_tokens_total_count"] == stats.steps
    # As in vLLM: a prompt counts in the step of its first token, cached or not, and the last token counts, too.
    assert found["vllm:iteration_tokens_total_sum"] == found["vllm:prompt_tokens_total"] + 10
    assert found["vllm:e2e_request_latency_seconds_sum"] >= found["vllm:time_to_first_token_seconds_sum"]


@pytest.mark.capability("OB-1")
async def test_the_longest_of_several_answers_is_the_length_of_their_request(replica: Running):
    ask = {"n": 2, "seed": 7, "temperature": 2.0, "max_tokens": 20, "ignore_eos": True}
    one, other = [choice["message"]["content"] for choice in (await replica.chat(**ask)).json()["choices"]]
    stop = next(one[at : at + 4] for at in range(4, len(one) - 9) if one[at : at + 4] not in other)
    before = await samples(replica)

    usage = (await replica.chat(**ask, stop=stop)).json()["usage"]
    after = await samples(replica)

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert 20 < usage["completion_tokens"] < 40, "one of the two ends early"
    assert grown("vllm:request_max_num_generation_tokens_sum") == 20
    assert grown("vllm:request_max_num_generation_tokens_count") == 1
    assert grown("vllm:request_generation_tokens_sum") == usage["completion_tokens"]
    # The engine may have sampled some more before it heard of the stop string.
    assert grown("vllm:generation_tokens_total") >= usage["completion_tokens"]


@pytest.mark.capability("OB-1", "KV-4")
async def test_load_is_visible_while_it_lasts_and_aborts_are_counted(replica: Running):
    async with replica.streaming(**FOREVER) as stream:
        await anext(stream.aiter_lines())
        busy = await samples(replica)
    await replica.until(lambda stats: stats.blocks_live == 0)
    async with asyncio.timeout(60):
        idle = await samples(replica)
        while not idle["vllm:request_success_total{finished_reason=abort}"]:
            idle = await samples(replica)

    assert busy["vllm:num_requests_running"] == 1
    assert busy["vllm:kv_cache_usage_perc"] > 0
    assert idle["vllm:num_requests_running"] == idle["vllm:kv_cache_usage_perc"] == 0
    states = [idle[f"slipway:kv_cache_blocks{{state={state}}}"] for state in ("live", "cached", "free")]
    assert sum(states) == replica.client.stats().blocks_total


@pytest.mark.capability("OB-1")
async def test_prefix_hits_are_counted_in_tokens(replica: Running):
    for _ in range(2):
        await replica.chat("The sea and the wind and the boats. " * 8, max_tokens=1)
    found = await samples(replica)

    assert 0 < found["vllm:prefix_cache_hits_total"] < found["vllm:prefix_cache_queries_total"]


async def test_requests_refused_before_they_were_queued_are_counted():
    async with a_replica(limits=QueueLimits(max_requests=0)) as replica:
        assert (await replica.chat()).status_code == 429
        found = await samples(replica)

    assert found["vllm:admission_rejections_total{reason=max_num_queued_reqs}"] == 1


@pytest.mark.capability("OB-7", "API-3", "PF-9")
async def test_each_request_leaves_one_log_line_with_its_stages_and_without_its_text(replica: Running):
    secret = "the treasure is under the third palm"
    with structlog.testing.capture_logs() as logged:
        await replica.chat(secret, headers={"x-request-id": "r1"} | as_gateway(tenant="acme"), max_tokens=4)
        await replica.chat(secret, stream=True, max_tokens=4, stop=["treasure"])
        await replica.chat(secret, temperature=9)
        await replica.post("/v1/completions", {"prompt": secret * 500})
        async with replica.streaming(secret, **FOREVER) as stream:
            await anext(stream.aiter_lines())
        # The server notices the disconnect, and writes its line, after the engine has ended the request.
        await replica.until(lambda _: sum(line["event"] == "request" for line in logged) == 3)

    lines = [line for line in logged if line["event"] == "request"]
    assert [line["finish_reason"] for line in lines][-1] == "cancelled"
    assert len(lines) == 3
    refused = [line for line in logged if line["event"] == "refused"]
    assert [(line["status"], line["path"]) for line in refused] == [
        (400, "/v1/chat/completions"),
        (400, "/v1/completions"),
    ]
    first = lines[0]
    assert (first["request_id"], first["tenant"], first["model"]) == ("r1", "acme", "tiny")
    assert first["completion_tokens"] <= 4
    stages = ["prepare_seconds", "queue_seconds", "prefill_seconds", "decode_seconds"]
    assert all(first[stage] >= 0 for stage in stages)
    assert sum(first[stage] for stage in stages) == pytest.approx(first["total_seconds"], abs=0.05)
    assert "treasure" not in repr(logged)
    assert "palm" not in repr(logged)


def test_token_buckets_follow_one_two_five():
    assert one_two_five(2048) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)


@pytest.mark.capability("OB-8")
async def test_failures_are_counted_by_their_class(replica: Running):
    await replica.chat(temperature=9)
    await replica.chat(headers={"x-slipway-deadline": "0"})
    await replica.chat(headers={"x-slipway-deadline": "0.05"}, **FOREVER)
    leaving = asyncio.create_task(replica.chat(**FOREVER))
    await replica.until(lambda stats: stats.running == 1)
    leaving.cancel()
    await replica.until(lambda stats: stats.aborted >= 1 and stats.running == 0)
    replica.replica.drain(60)
    await replica.chat()

    found = await samples(replica)
    counted = {name: value for name, value in found.items() if name.startswith("slipway:errors_total")}
    assert counted["slipway:errors_total{class=malformed}"] == 1
    assert counted["slipway:errors_total{class=timeout}"] == 2
    assert counted["slipway:errors_total{class=cancelled}"] == 1
    assert counted["slipway:errors_total{class=unavailable}"] == 1


@pytest.mark.capability("OB-9")
async def test_goodput_can_be_read_for_any_bounds_of_the_grid(replica: Running):
    for _ in range(3):
        await replica.chat(max_tokens=4, ignore_eos=True)
    found = await samples(replica)

    cells = {name: value for name, value in found.items() if name.startswith("slipway:requests_by_latency_total")}
    assert sum(cells.values()) == 3
    assert all("ttft_le=" in name and "tpot_le=" in name for name in cells)


@pytest.mark.capability("CO-2")
async def test_tokens_are_counted_by_tenant_and_kind(replica: Running):
    answers = [
        await replica.chat("A long prompt. " * 20, headers=as_gateway(tenant=tenant), max_tokens=5, ignore_eos=True)
        for tenant in ("a", "a", "b")
    ]
    found = await samples(replica)

    def counted(tenant: str, kind: str) -> float:
        return sum(
            value
            for name, value in found.items()
            if name.startswith("slipway:tokens_total") and f"tenant={tenant}" in name and f"kind={kind}" in name
        )

    usage = [answer.json()["usage"] for answer in answers]
    assert counted("a", "output") == 10
    assert counted("b", "output") == 5
    cached = usage[1]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0, "the second prompt of tenant a is the first one"
    assert counted("a", "cached") == cached
    assert counted("a", "input") == 2 * usage[0]["prompt_tokens"], "as in `usage`, with the cached ones"
    assert counted("b", "cached") == 0, "tenants share no prefixes"
    assert counted("b", "input") == usage[2]["prompt_tokens"]


@pytest.mark.capability("SE-2")
async def test_labels_do_not_grow_with_what_callers_send(replica: Running, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("slipway_runtime.server.metrics.MAX_TOKEN_LABELS", 2)
    for tenant in ("a", "b", "c", "d"):
        await replica.chat("SECRETWORD", headers=as_gateway(tenant=tenant), max_tokens=2, user="SECRETWORD")
        await replica.chat(model=f"SECRETWORD{tenant}")
    page = (await replica.http.get(f"{replica.admin_url}/metrics")).text
    found = await samples(replica)

    tenants = {name.split("tenant=")[1].rstrip("}") for name in found if name.startswith("slipway:tokens_total")}
    assert tenants == {"a", "b", "other"}
    assert "SECRETWORD" not in page
    state = await replica.admin("/state")
    assert "SECRETWORD" not in state.text


@pytest.mark.capability("SE-2")
async def test_keys_of_callers_are_in_no_log_no_metric_and_no_error(replica: Running):
    key = {"Authorization": "Bearer sk-SECRETKEY", "x-api-key": "SECRETKEY", "x-slipway-admin-token": "SECRETKEY"}
    with structlog.testing.capture_logs() as logged:
        answers = [
            await replica.chat(headers=key, max_tokens=2),
            await replica.chat(headers=key, max_tokens=2, stream=True),
            await replica.chat(headers=key, temperature=9),
            await replica.chat(headers=key, model="nobody"),
            await replica.chat(headers=key | {"x-slipway-deadline": "0"}),
            await replica.post("/v1/nothing", {}, headers=key),
            await replica.http.get(f"{replica.admin_url}/metrics", headers=key),
            await replica.admin("/state", headers=key),
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 400, 404, 504, 404, 200, 200]
    assert len(logged) >= 5
    assert "SECRETKEY" not in repr(logged)
    assert not [answer.text for answer in answers if "SECRETKEY" in answer.text]
