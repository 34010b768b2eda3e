"""The life of a replica as the operator and the kubelet see it on the admin port."""

import asyncio
import json
import tempfile
from pathlib import Path

import httpx
import msgspec
import pytest

from slipway_api.admin_token import admin_token, token_digest
from slipway_api.runtime_api import DrainStatus, Ready, ReadyReason, Signals, StartupTimes, State
from slipway_runtime.engine.client import StepTimes
from slipway_runtime.main import ask_for_drain
from slipway_runtime.server.admin import serve_control
from slipway_runtime.server.replica import DRAINED_OUT, HUNG, MOST_WAITING
from tests.runtime.server.serving import FOREVER, Running, a_replica


async def ready_of(replica: Running) -> tuple[int, ReadyReason]:
    response = await replica.admin("/ready")
    body = Ready.model_validate_json(response.content)
    assert body.ready == (response.status_code == 200)
    return response.status_code, body.reason


@pytest.mark.capability("RD-3")
async def test_a_replica_is_alive_at_once_and_ready_only_when_its_model_answers():
    async with a_replica(load=False) as replica:
        assert await ready_of(replica) == (503, ReadyReason.LOADING)
        assert (await replica.admin("/health")).status_code == 200
        assert (await replica.admin("/metrics")).status_code == 200
        early = await replica.chat()
        assert early.status_code == 503
        assert early.headers["retry-after"] == "1"
        assert (await replica.http.get(f"{replica.url}/v1/models")).status_code == 503

        for step, reason in (
            (replica.replica.downloading, ReadyReason.DOWNLOADING),
            (replica.replica.loading, ReadyReason.LOADING),
            (replica.replica.warming_up, ReadyReason.WARMING_UP),
        ):
            step()
            assert await ready_of(replica) == (503, reason)
            assert replica.replica.signals().starting == reason.value

        replica.replica.ready_with(replica.models[0], StartupTimes(load_seconds=1.0))
        assert await ready_of(replica) == (200, ReadyReason.READY)
        assert replica.replica.signals().starting == ""
        assert (await replica.chat(max_tokens=1)).status_code == 200


@pytest.mark.capability("RD-3", "AS-5")
async def test_the_answer_to_a_startup_probe_waits_until_the_replica_is_ready():
    async with a_replica(load=False) as replica:
        waiting = asyncio.create_task(replica.admin("/ready?waitSeconds=2"))
        async with asyncio.timeout(60):
            while not replica.replica._waiting:  # noqa: ASYNC110  the request takes its way through a socket
                await asyncio.sleep(0)
        replica.replica.ready_with(replica.models[0], StartupTimes())
        assert (await waiting).status_code == 200
        assert (await replica.admin("/ready?waitSeconds=2")).status_code == 200


@pytest.mark.capability("RD-3")
async def test_the_answer_to_a_startup_probe_waits_no_longer_than_it_may_nor_when_a_drain_begins():
    async with a_replica(load=False) as replica:
        for wait, status in (("0.01", 503), ("-1", 400), ("3", 400), ("long", 400), ("nan", 400)):
            assert (await replica.admin(f"/ready?waitSeconds={wait}")).status_code == status
        waiting = [asyncio.create_task(replica.replica.wait_until_started(3600)) for _ in range(MOST_WAITING)]
        await asyncio.sleep(0)
        assert (await replica.admin("/ready?waitSeconds=2")).status_code == 503, "one more is answered at once"
        assert not any(one.done() for one in waiting)

        replica.replica.drain(60, "the pod is deleted")
        await asyncio.wait_for(asyncio.gather(*waiting), 60)


@pytest.mark.capability("RD-3", "RD-9")
async def test_readiness_drops_while_the_step_loop_stalls_with_work_then_health_and_both_return():
    """Chaos C2: a hung engine is restarted by the kubelet."""
    async with a_replica() as replica:
        assert await ready_of(replica) == (200, ReadyReason.READY)
        replica.clock.ahead += 3600  # idle for an hour is no stall
        assert await ready_of(replica) == (200, ReadyReason.READY)

        replica.steps.hold()
        asking = asyncio.create_task(replica.chat(max_tokens=2))
        await replica.until(lambda stats: stats.running + stats.waiting == 1)
        assert await ready_of(replica) == (200, ReadyReason.READY), "work has only just come"
        replica.clock.ahead += 31
        assert await ready_of(replica) == (503, ReadyReason.STEP_LOOP_STALLED)
        assert (await replica.admin("/health")).status_code == 200, "a restart would lose the streams"
        replica.clock.ahead += 100
        assert await ready_of(replica) == (503, ReadyReason.STEP_LOOP_STALLED)
        hung = await replica.admin("/health")
        assert hung.status_code == 503, "no step takes that long: only a restart can help"
        assert "no step for 131 s" in hung.json()["message"]

        replica.steps.let_go()
        assert (await asking).status_code == 200
        assert await ready_of(replica) == (200, ReadyReason.READY)
        assert (await replica.admin("/health")).status_code == 200


@pytest.mark.capability("RD-9")
async def test_readiness_drops_within_ten_seconds_of_a_step_that_hangs():
    """The kubelet needs three more seconds to notice: 6 + 4 x 0.2 + 3 < 10."""
    async with a_replica() as replica:
        replica.client.times = StepTimes(0.2, replica.clock)
        replica.steps.hold()
        asking = asyncio.create_task(replica.chat(max_tokens=2))
        await replica.until(lambda stats: stats.running + stats.waiting == 1)
        replica.clock.ahead += 5.5
        assert await ready_of(replica) == (200, ReadyReason.READY)
        replica.clock.ahead += 1.4
        assert await ready_of(replica) == (503, ReadyReason.STEP_LOOP_STALLED)
        assert replica.replica.signals().not_ready == "StepLoopStalled"
        assert (await replica.admin("/health")).status_code == 200
        replica.steps.let_go()
        assert (await asking).status_code == 200
        assert await ready_of(replica) == (200, ReadyReason.READY)
        assert replica.replica.signals().not_ready == ""


@pytest.mark.capability("RD-9")
async def test_a_long_step_on_a_slow_machine_is_not_taken_for_a_hang():
    """A prompt of 30,000 tokens on a CPU: the widest step of the warm-up took 10 s."""
    async with a_replica() as replica:
        replica.client.times = StepTimes(10.0, replica.clock)
        replica.steps.hold()
        asking = asyncio.create_task(replica.chat(max_tokens=2))
        await replica.until(lambda stats: stats.running + stats.waiting == 1)
        replica.clock.ahead += 40
        assert await ready_of(replica) == (200, ReadyReason.READY)
        replica.clock.ahead += 10
        assert await ready_of(replica) == (503, ReadyReason.STEP_LOOP_STALLED)
        replica.steps.let_go()
        assert (await asking).status_code == 200


@pytest.mark.capability("RD-9")
async def test_an_engine_that_hangs_without_work_is_found_by_a_ping():
    async with a_replica() as replica:
        assert (await replica.chat(max_tokens=2)).status_code == 200
        replica.client.times = StepTimes(0.2, replica.clock)
        replica.steps.hold()
        replica.clock.ahead += 3
        assert await ready_of(replica) == (200, ReadyReason.READY), "the ping is on its way"
        replica.clock.ahead += 7
        assert await ready_of(replica) == (503, ReadyReason.STEP_LOOP_STALLED)
        asking = asyncio.create_task(replica.chat(max_tokens=2))
        await replica.until(lambda stats: stats.running + stats.waiting == 1)
        assert await ready_of(replica) == (503, ReadyReason.STEP_LOOP_STALLED), "a request does not begin the time anew"
        replica.clock.ahead += 120
        assert (await replica.admin("/health")).status_code == 503
        replica.steps.let_go()
        assert (await asking).status_code == 200
        assert await ready_of(replica) == (200, ReadyReason.READY)
        assert (await replica.admin("/health")).status_code == 200


@pytest.mark.capability("RD-9")
async def test_requests_that_come_and_leave_do_not_hide_a_hung_engine():
    """A gateway moves requests away from a hung replica, and tries it with one at a time."""
    async with a_replica() as replica:
        assert (await replica.chat(max_tokens=2)).status_code == 200
        replica.clock.ahead += 3600
        replica.steps.hold()
        for sent in range(1, 5):
            asking = asyncio.create_task(replica.chat(max_tokens=2))
            await replica.until(lambda stats, sent=sent: stats.running + stats.waiting >= sent)
            assert (await replica.admin("/health")).status_code == 200
            replica.clock.ahead += 35
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

        assert (await replica.admin("/health")).status_code == 503
        replica.steps.let_go()


@pytest.mark.capability("RD-3", "RD-9")
async def test_a_dead_engine_is_neither_ready_nor_healthy():
    async with a_replica() as replica:
        replica.steps.failure = RuntimeError("broken")
        during = await replica.chat()
        assert during.status_code == 503
        assert "x-slipway-not-started" not in during.headers, "the engine had taken it"

        assert await ready_of(replica) == (503, ReadyReason.ENGINE_DEAD)
        messages = [{"role": "user", "content": "Hi"}]
        for path, body in (
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/completions", {"prompt": "Hi"}),
            ("/tokenize", {"prompt": "Hi"}),
        ):
            after = await replica.post(path, body)
            assert after.status_code == 503, "chaos C3: another replica answers it"
            assert (after.headers["retry-after"], after.headers["x-slipway-not-started"]) == ("1", "1")
        for answer in (await replica.admin("/health"), await replica.http.get(f"{replica.url}/health")):
            assert answer.status_code == 503


@pytest.mark.capability("RD-1")
async def test_a_drain_refuses_what_is_new_and_finishes_what_runs():
    async with a_replica() as replica:
        async with replica.streaming("Tell me a story.", ignore_eos=True, max_tokens=40) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            replica.steps.hold()

            answer = await replica.admin("/drain", "POST", json={"timeoutSeconds": 30, "reason": "test"})
            status = DrainStatus.model_validate_json(answer.content)
            assert (status.draining, status.running + status.waiting, status.is_drained) == (True, 1, False)
            assert await ready_of(replica) == (503, ReadyReason.DRAINING)
            refused = await replica.chat()
            assert refused.status_code == 503
            assert (refused.headers["retry-after"], refused.headers["x-slipway-not-started"]) == ("1", "1")
            again = await replica.admin("/drain", "POST")
            assert DrainStatus.model_validate_json(again.content).draining

            replica.steps.let_go()
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        async with asyncio.timeout(60):
            await replica.replica.drained()
        assert replica.client.stats().finished == 1
        assert (await replica.admin("/metrics")).status_code == 200, "a drained replica still shows its numbers"

        back = await replica.admin("/undrain", "POST")
        assert not DrainStatus.model_validate_json(back.content).draining
        assert await ready_of(replica) == (200, ReadyReason.READY)
        assert (await replica.chat(max_tokens=1)).status_code == 200


@pytest.mark.capability("RD-1")
async def test_a_drain_takes_new_requests_until_every_router_knows():
    """Finding 21: /ready is 503 at once; whoever has not heard of it yet is still served."""
    async with a_replica() as replica:
        asked = await replica.admin("/drain", "POST", json={"timeoutSeconds": 600, "refuseAfterSeconds": 500})
        assert DrainStatus.model_validate_json(asked.content).draining
        assert await ready_of(replica) == (503, ReadyReason.DRAINING)
        assert (await replica.chat(max_tokens=1)).status_code == 200
        await replica.admin("/drain", "POST", json={"timeoutSeconds": 600, "refuseAfterSeconds": 501})
        drained = asyncio.create_task(replica.replica.drained())
        assert (await replica.chat(max_tokens=1)).status_code == 200, "asked again, it takes requests as long as before"
        assert not drained.done(), "more may come"

        replica.replica.drain(600, refuse_after_seconds=0.01)
        async with asyncio.timeout(60):
            await drained
        refused = await replica.chat(max_tokens=1)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")

        await replica.admin("/undrain", "POST")
        assert (await replica.chat(max_tokens=1)).status_code == 200


@pytest.mark.capability("RD-1")
async def test_a_drain_that_may_take_less_time_than_routers_need_refuses_at_its_deadline():
    async with a_replica() as replica:
        replica.replica.drain(0, refuse_after_seconds=500)
        assert (await replica.chat(max_tokens=1)).status_code == 503


@pytest.mark.capability("RD-2")
async def test_at_the_deadline_of_a_drain_a_stream_ends_with_an_error_event():
    async with a_replica() as replica, replica.streaming(**FOREVER) as stream:
        lines = stream.aiter_lines()
        await anext(lines)
        await replica.admin("/drain", "POST", json={"timeoutSeconds": 3600})

        await replica.admin("/drain", "POST", json={"timeoutSeconds": 0})
        rest = [line async for line in lines if line]

        assert json.loads(rest[-2][6:])["error"]["message"] == DRAINED_OUT
        assert rest[-1] == "data: [DONE]"
        async with asyncio.timeout(60):
            await replica.replica.drained()


@pytest.mark.capability("RD-2", "RD-9")
async def test_a_drain_of_a_hung_engine_ends_its_streams_at_once_and_leaves_no_request():
    """ADR 81: the hour of the drain is for streams that can finish."""
    async with a_replica() as replica, replica.streaming(**FOREVER) as stream:
        lines = stream.aiter_lines()
        await anext(lines)
        replica.steps.hold()
        replica.clock.ahead += 121
        assert (await replica.admin("/health")).status_code == 503
        await replica.admin("/drain", "POST", json={"timeoutSeconds": 3600, "refuseAfterSeconds": 3000})
        rest = [line async for line in lines if line]

        assert json.loads(rest[-2][6:])["error"]["message"] == HUNG
        async with asyncio.timeout(60):
            await replica.replica.drained()
        assert replica.client.stats().running == 1, "the engine counts it for ever"
        signals = Signals.model_validate_json((await replica.admin("/signals")).content)
        assert (signals.draining, signals.running, signals.waiting) == (True, 0, 0)
        replica.steps.let_go()


@pytest.mark.capability("RD-1", "RD-9")
async def test_a_drain_that_begins_during_a_stall_waits_until_the_engine_goes_on_or_hangs():
    """ADR 81: a stall of less than --hang-seconds does not shorten a drain."""
    async with a_replica() as replica, replica.streaming(**FOREVER) as stream:
        lines = stream.aiter_lines()
        await anext(lines)
        replica.steps.hold()
        replica.clock.ahead += 100
        await replica.admin("/drain", "POST", json={"timeoutSeconds": 3600})
        assert await ready_of(replica) == (503, ReadyReason.STEP_LOOP_STALLED)
        ending = replica.replica._until_it_hangs
        assert ending is not None
        replica.steps.allow(3)
        await replica.until(lambda stats: stats.generated_tokens >= 3)
        assert (ending.done(), replica.replica.drain_status().running) == (False, 1)

        replica.clock.ahead += 121
        rest = [line async for line in lines if line]
        assert json.loads(rest[-2][6:])["error"]["message"] == HUNG
        replica.steps.let_go()


@pytest.mark.capability("RD-1", "RD-9")
async def test_a_drain_ends_when_the_engine_dies():
    """ADR 81: the counts of a dead engine stay as they were."""
    async with a_replica() as replica:
        replica.steps.hold()
        asking = asyncio.create_task(replica.chat(**FOREVER))
        await replica.until(lambda stats: stats.running + stats.waiting == 1)
        await replica.admin("/drain", "POST", json={"timeoutSeconds": 3600})
        replica.steps.failure = RuntimeError("broken")
        replica.steps.let_go()

        assert (await asking).status_code == 503
        async with asyncio.timeout(60):
            await replica.replica.drained()


@pytest.mark.capability("RD-1")
async def test_a_replica_that_was_never_ready_has_drained_at_once():
    """ADR 81: no router sends it anything, so it does not wait for routers. Such is a container that restarted."""
    async with a_replica(load=False) as replica:
        replica.replica.drain(3600, refuse_after_seconds=3000)
        async with asyncio.timeout(60):
            await replica.replica.drained()


async def test_a_longer_deadline_does_not_replace_a_shorter_one():
    async with a_replica() as replica:
        asking = asyncio.create_task(replica.chat(**FOREVER))
        await replica.until(lambda stats: stats.running == 1)
        replica.replica.drain(0.2)
        replica.replica.drain(3600)

        assert (await asking).status_code == 503


@pytest.mark.capability("RD-1")
async def test_a_drain_that_comes_while_loading_is_not_forgotten():
    async with a_replica(load=False) as replica:
        await replica.admin("/drain", "POST")
        replica.replica.ready_with(replica.models[0], StartupTimes())

        assert await ready_of(replica) == (503, ReadyReason.DRAINING)
        assert (await replica.chat()).status_code == 503


@pytest.mark.capability("RD-1")
async def test_the_drain_socket_answers_when_the_last_stream_has_ended():
    with tempfile.TemporaryDirectory(prefix="slw") as short:  # socket paths have room for 107 bytes
        directory = Path(short)
        async with a_replica() as replica:
            server = await serve_control(replica.replica, directory)
            assert server is not None
            asking = asyncio.create_task(replica.chat(ignore_eos=True, max_tokens=60))
            await replica.until(lambda stats: stats.running == 1)

            answer = await asyncio.to_thread(ask_for_drain, directory / "drain.sock", 30)

            assert answer == {"draining": True, "running": 0, "waiting": 0}
            assert asking.done() or (await asking).status_code == 200
            server.close()


# --- the token


async def test_the_admin_port_wants_the_pods_token_except_for_probes():
    token, other = admin_token(b"master", "team-a", "pod-1"), admin_token(b"master", "team-a", "pod-2")
    previous = admin_token(b"old master", "team-a", "pod-1")
    async with a_replica(token_digests=(token_digest(token), token_digest(previous))) as replica:
        for method, path in [("GET", "/signals"), ("GET", "/state"), ("POST", "/drain"), ("POST", "/undrain")]:
            bare = await replica.admin(path, method)
            wrong = await replica.admin(path, method, headers={"x-slipway-admin-token": other})
            assert [bare.status_code, wrong.status_code] == [401, 401]
            assert other not in wrong.text
            for right in (token, previous):
                answer = await replica.admin(path, method, headers={"x-slipway-admin-token": right})
                assert answer.status_code == 200
        for path in ("/ready", "/health", "/metrics"):
            assert (await replica.admin(path)).status_code == 200
        assert (await replica.http.get(f"{replica.url}/signals")).status_code == 404, "clients have no admin port"


async def test_with_a_serving_token_only_its_holder_gets_an_answer_and_probes_stay_open():
    current, previous = "the token of today", "the token of yesterday"
    async with a_replica(serving_token_digests=(token_digest(current), token_digest(previous))) as replica:
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/nowhere"):
            for headers in (
                {},
                {"x-slipway-serving-token": "a draft token"},
                {"x-slipway-serving-token": token_digest(current)},
            ):
                refused = await replica.post(path, {"prompt": "Hi", "max_tokens": 1}, headers=headers)
                assert refused.status_code == 401, (path, headers)
                assert refused.json()["error"]["type"] == "AuthenticationError"
                assert "draft" not in refused.text
        assert (await replica.http.get(f"{replica.url}/v1/models")).status_code == 401
        assert replica.client.stats().admitted == 0, "nothing reached the engine"

        for token in (current, previous):
            answer = await replica.chat(max_tokens=1, headers={"x-slipway-serving-token": token})
            assert answer.status_code == 200
        for path in ("/health", "/metrics"):
            assert (await replica.http.get(replica.url + path)).status_code == 200
        assert (await replica.admin("/ready")).status_code == 200, "the admin port has a token of its own"


# --- numbers


@pytest.mark.capability("KV-4")
async def test_signals_are_small_and_count_live_blocks_only():
    async with a_replica() as replica:
        await replica.chat("A long prompt that fills some blocks. " * 8, max_tokens=8, ignore_eos=True)
        await replica.until(lambda stats: stats.running == 0 and stats.finished == 1)

        idle = await replica.admin("/signals")
        signals = Signals.model_validate_json(idle.content)

        assert len(idle.content) < 300
        assert signals.kv_usage == 0, "reusable prefixes are not load"
        assert (signals.admitted, signals.finished, signals.running, signals.waiting) == (1, 1, 0, 0)
        assert (signals.generated_tokens, signals.draining) == (8, False)
        state = State.model_validate_json((await replica.admin("/state")).content)
        assert state.blocks.cached > 0
        assert state.blocks.live + state.blocks.cached + state.blocks.free == state.blocks.total

        replica.steps.hold()
        asking = asyncio.create_task(replica.chat("x " * 200, max_tokens=2))
        await replica.until(lambda stats: stats.waiting == 1)
        waiting = Signals.model_validate_json((await replica.admin("/signals")).content)
        assert (waiting.waiting, waiting.running) == (1, 0)
        assert waiting.waiting_tokens >= 200
        replica.steps.allow(1)
        await replica.until(lambda stats: stats.running == 1)
        busy = Signals.model_validate_json((await replica.admin("/signals")).content)
        assert busy.kv_usage > 0
        replica.steps.let_go()
        await asking


async def test_state_tells_all_there_is_to_know():
    async with a_replica() as replica:
        state = State.model_validate_json((await replica.admin("/state")).content)

    assert state.model_name == "tiny"
    assert state.revision == "rev1"
    assert state.tokenizer_sha256 == replica.models[0].tokenizer_sha256
    assert state.boot_id == replica.replica.boot_id
    assert state.max_model_len == 2048
    assert state.block_size == 16
    assert state.bytes_per_token > 0
    assert state.startup.load_seconds == 0.1
    assert (state.quantization, state.warnings) == ("none", ())


@pytest.mark.capability("QZ-4")
async def test_state_tells_how_the_weights_are_rounded_and_what_that_costs():
    async with a_replica() as replica:
        engine = replica.replica.loaded.engine
        warning = "the checkpoint is quantized (gptq, int4) and --quantization int8 rounds it again"
        engine.facts = msgspec.structs.replace(engine.facts, quantization="int8", warnings=(warning,))
        state = State.model_validate_json((await replica.admin("/state")).content)
    assert (state.quantization, state.warnings) == ("int8", (warning,))


@pytest.mark.capability("OB-1", "BS-6")
async def test_state_tells_the_queue_of_each_tenant_and_the_shape_of_the_last_batch():
    async with a_replica(max_num_seqs=2) as replica:
        before = State.model_validate_json((await replica.admin("/state")).content)
        replica.steps.hold()
        asking = [
            asyncio.create_task(replica.chat("Hi", headers={"x-slipway-tenant": tenant}, max_tokens=8, ignore_eos=True))
            for tenant in ("a", "b", "b", "b")
        ]
        await replica.until(lambda stats: stats.waiting == 4)
        replica.steps.allow(3)
        stats = await replica.until(lambda stats: stats.steps == 3)
        replica.clock.ahead += 100
        busy = State.model_validate_json((await replica.admin("/state")).content)
        replica.steps.let_go()
        await asyncio.gather(*asking)

    assert (before.last_step, before.queue.waiting_by_tenant) == (None, {})
    assert before.kv_tiers == {"device": before.blocks}
    assert (busy.queue.running, busy.queue.waiting) == (2, 2)
    assert busy.queue.waiting_by_tenant == dict(stats.waiting_by_tenant)
    assert sum(busy.queue.waiting_by_tenant.values()) == 2
    assert busy.last_step is not None
    assert (busy.last_step.rows, busy.last_step.tokens) == (2, 2), "both decode"
    assert busy.last_step.seconds_ago >= 100 > busy.last_step.seconds > 0


@pytest.mark.capability("OB-1", "KV-12")
async def test_state_tells_what_host_memory_holds():
    async with a_replica(kv_cache_bytes=8 * 16 * 8192, kv_cache_host_bytes=1 << 20) as replica:
        for number in range(8):
            await replica.chat(f"{number} times the sea was calm, and the boat came home. " * 4, max_tokens=1)
        state = State.model_validate_json((await replica.admin("/state")).content)

    host = state.kv_tiers["host"]
    assert (host.live, host.cached + host.free) == (0, host.total)
    assert host.cached > 0
    assert state.kv_tiers["device"] == state.blocks


async def test_state_of_a_replica_that_loads_is_mostly_zeros():
    async with a_replica(load=False) as replica:
        state = State.model_validate_json((await replica.admin("/state")).content)

    assert (state.blocks.total, state.kv_tiers, state.last_step, state.adapters) == (0, {}, None, ())


async def test_a_senseless_drain_request_is_a_400():
    async with a_replica() as replica:
        answer: httpx.Response = await replica.admin("/drain", "POST", content=b'{"timeoutSeconds": -1}')

        assert answer.status_code == 400
        assert not replica.replica.draining
