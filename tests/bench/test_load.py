"""The load generator is honest about what happened, obeys 429s, stays within its bounds and on this machine."""

import asyncio
import random
from collections import Counter
from itertools import islice

import pytest
from tokenizers import Tokenizer

from bench.arrivals import bursty, poisson
from bench.load import main, run_load
from bench.plan import LoadPlan, LoadReport, Percentiles, Slo
from bench.prompts import prompts
from bench.servers import EMBEDDED_MODEL
from bench.workload import HEAVY_TAILED_MIX, MIXED_MIX, Workload
from tests.gateway.doubles import (
    MODEL,
    Runtime,
    be_draining,
    begin_stream,
    chunk,
    die_after_two_words,
    end_without_saying_why,
    event,
    hang_up,
    speak,
)


async def load(runtime: Runtime, **plan) -> LoadReport:
    defaults = {"concurrency": 2, "max_requests": 6, "duration_seconds": 30.0}
    return await run_load(LoadPlan(base_url=f"{runtime.url}/v1", model=MODEL, **defaults | plan))


async def test_a_good_run_sends_what_was_planned_and_measures_it():
    async with Runtime() as runtime:
        report = await load(runtime)

    assert (report.sent, report.finished, report.failed, report.retries_429) == (6, 6, 0, 0)
    assert report.output_tokens == 30, "usage, as the server counts it"
    assert report.prompt_tokens == 42
    assert 0 < report.ttft.p50 <= report.ttft.p99
    assert report.tokens_per_second > 0
    assert len({body["messages"][0]["content"] for body in runtime.bodies}) > 1


@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        (die_after_two_words, "Client"),
        (end_without_saying_why, "the stream ended without saying why"),
        (be_draining, "status 503"),
        (hang_up, "ServerDisconnectedError"),
    ],
)
async def test_whatever_does_not_end_as_promised_has_failed(behaviour, sentence):
    async with Runtime(behaviour) as runtime:
        report = await load(runtime, max_requests=2)

    assert (report.finished, report.failed) == (0, 2)
    assert all(failure.startswith(sentence) for failure in report.failures)


async def test_an_error_event_is_a_failure():
    async def fail(runtime, request):
        response = await begin_stream(request)
        await response.write(event(chunk("Once")) + event({"error": {"message": "x", "type": "BadGatewayError"}}))
        return response

    async with Runtime(fail) as runtime:
        report = await load(runtime, max_requests=1)

    assert report.failures == {"error event: BadGatewayError": 1}


async def test_a_429_is_obeyed_counted_apart_and_no_failure():
    async def full_at_first(runtime, request):
        if runtime.requests <= 3:
            from aiohttp import web

            return web.json_response({}, status=429, headers={"Retry-After": "1", "retry-after-ms": "20"})
        return await speak(runtime, request)

    async with Runtime(full_at_first) as runtime:
        report = await load(runtime, max_requests=4)

    assert (report.sent, report.finished, report.failed, report.retries_429) == (4, 4, 0, 3)
    assert 1 <= report.retried <= 3, "requests, not attempts"
    assert report.shed_wait.p50 > 0


async def test_a_429_is_a_failure_where_first_attempts_count():
    async def full(runtime, request):
        from aiohttp import web

        return web.json_response({}, status=429, headers={"retry-after-ms": "20"})

    async with Runtime(full) as runtime:
        report = await load(runtime, max_requests=2, retry_429=False)

    assert report.failures == {"status 429": 2}
    assert report.retried == report.retries_429 == 0


async def test_the_open_loop_does_not_wait_for_answers():
    async with Runtime().hold() as runtime:
        running = asyncio.create_task(load(runtime, rate=1000.0, concurrency=5, max_requests=5))
        while runtime.requests < 5:  # noqa: ASYNC110  the requests arrive through sockets
            await asyncio.sleep(0.005)
        runtime.allow(100)

        assert (await running).finished == 5


async def test_stopping_ends_the_sending_and_lets_running_streams_finish():
    async with Runtime().hold() as runtime:
        stop = asyncio.Event()
        plan = LoadPlan(base_url=f"{runtime.url}/v1", model=MODEL, concurrency=3, duration_seconds=60)
        running = asyncio.create_task(run_load(plan, stop=stop))
        while runtime.requests < 3:  # noqa: ASYNC110  the requests arrive through sockets
            await asyncio.sleep(0.005)
        stop.set()
        runtime.allow(1000)
        report = await running

    assert (report.sent, report.finished) == (3, 3)


@pytest.mark.parametrize("url", ["http://10.0.0.1/v1", "http://example.com/v1", "http://0.0.0.0/v1", "no url"])
def test_other_machines_are_refused(url, capsys):
    with pytest.raises(ValueError, match="only to this machine"):
        LoadPlan(base_url=url, model=MODEL)
    with pytest.raises(SystemExit):
        main(["--base-url", url, "--model", MODEL])
    assert "only to this machine" in capsys.readouterr().err


@pytest.mark.parametrize("bound", [{"concurrency": 100_000}, {"duration_seconds": 1e9}, {"concurrency": 0}])
def test_the_load_is_bounded(bound):
    with pytest.raises(ValueError, match="not"):
        LoadPlan(base_url="http://127.0.0.1:8000/v1", model=MODEL, **bound)


def test_the_same_seed_gives_the_same_prompts():
    first, second, other = prompts(1), prompts(1), prompts(2)

    assert [next(first) for _ in range(20)] == [next(second) for _ in range(20)]
    assert next(first) != next(other)


def test_percentiles_are_nearest_rank():
    assert Percentiles.of([float(number) for number in range(1, 101)]) == Percentiles(50.0, 95.0, 99.0)
    assert Percentiles.of([3.0, 1.0]) == Percentiles(1.0, 3.0, 3.0)
    assert Percentiles.of([]) == Percentiles()


@pytest.mark.capability("BM-1")
async def test_readers_that_leave_are_counted_apart_and_really_leave():
    async with Runtime() as runtime:
        report = await load(runtime, workload=Workload(leaving=1.0), max_tokens=4)

    assert (report.sent, report.left, report.finished, report.failed) == (6, 6, 0, 0)


@pytest.mark.capability("BM-1")
async def test_each_turn_brings_along_all_that_was_said():
    async with Runtime() as runtime:
        await load(runtime, workload=Workload(turns=3, prefixes=1), concurrency=1, max_requests=3)

    first, second, third = [body["messages"] for body in runtime.bodies]
    assert [message["role"] for message in third] == ["system"] + ["user", "assistant"] * 2 + ["user"]
    assert third[: len(second)] == second
    assert second[: len(first)] == first


@pytest.mark.capability("BM-1")
async def test_conversations_share_their_system_prompts():
    async with Runtime() as runtime:
        await load(runtime, workload=Workload(prefixes=2), max_requests=12)

    assert len({body["messages"][0]["content"] for body in runtime.bodies}) == 2
    assert len({body["messages"][1]["content"] for body in runtime.bodies}) == 12


@pytest.mark.capability("BM-1")
def test_half_of_the_traffic_asks_adapters_and_the_first_most():
    workload, draw = Workload(adapters=("a", "b", "c", "d")), random.Random(0)

    asked = Counter(workload.conversation(draw).adapter for _ in range(2000))

    assert 900 < asked[""] < 1100
    assert asked["a"] > asked["b"] > asked["d"] > 0


@pytest.mark.capability("BM-1")
async def test_cold_requests_are_reported_apart_and_only_good_ones_are_goodput():
    async with Runtime() as runtime:
        all_good = await load(runtime, cold_requests=2, slo=Slo(ttft_seconds=60, itl_seconds=60))
        none_good = await load(runtime, slo=Slo(ttft_seconds=0, itl_seconds=0))

    assert all_good.cold_ttft.p50 > 0
    assert all_good.good == 6
    assert none_good.cold_ttft.p50 == 0
    assert (none_good.finished, none_good.good) == (6, 0)


@pytest.mark.capability("BM-1", "PF-28")
async def test_short_prompts_are_reported_apart():
    async with Runtime() as runtime:
        all_short = await load(runtime, short_prompt_tokens=1_000_000)
        none_short = await load(runtime)

    assert all_short.short_ttft == all_short.ttft
    assert all_short.short_ttft.p50 > 0
    assert none_short.short_ttft.p50 == 0


@pytest.mark.capability("BM-1")
def test_arrivals_keep_their_rate_and_bursts_are_denser():
    plain = list(islice(poisson(10.0, random.Random(1)), 20_000))
    burst = list(islice(bursty(10.0, random.Random(1), burst=8.0), 20_000))

    for pauses in (plain, burst):
        assert sum(pauses) / len(pauses) == pytest.approx(0.1, rel=0.15)

    def share_of_short(pauses):
        return sum(pause < 0.03 for pause in pauses) / len(pauses)

    assert share_of_short(plain) < 0.3 < 0.8 < share_of_short(burst)


@pytest.mark.capability("BM-1", "PF-28")
def test_the_mix_is_of_chats_of_50_tokens_and_prompts_of_50_000_tokens():
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    draw = random.Random(0)
    texts = [Workload(mix=MIXED_MIX).conversation(draw).ask()[0]["content"] for _ in range(60)]
    lengths = sorted(len(tokenizer.encode(text).ids) for text in texts)
    chats, long_prompts = lengths[:50], [length for length in lengths if length > 80]

    assert 40 <= lengths[30] <= 60, "the median is a chat"
    assert chats[-1] <= 80
    assert long_prompts
    assert min(long_prompts) >= 50_000
    assert min(long_prompts) > sum(chats), "one long prompt has more tokens than all chats"


@pytest.mark.capability("BM-1")
def test_heavy_tailed_lengths_have_a_long_tail():
    (share,) = HEAVY_TAILED_MIX
    draw = random.Random(0)
    lengths = sorted(share.words(draw) for _ in range(4000))

    assert 25 <= lengths[2000] <= 35
    assert lengths[3960] > 8 * lengths[2000]
    assert lengths[-1] <= 2000
