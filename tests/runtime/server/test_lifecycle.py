"""The life of a replica as the operator and the kubelet see it on the admin port."""

import asyncio
import contextlib

import httpx
import pytest

from slipway_api.admin_token import admin_token, token_digest
from slipway_api.runtime_api import ReadyReason, StartupTimes
from slipway_runtime.engine.client import StepTimes
from slipway_runtime.server.replica import MOST_WAITING
from tests.runtime.gateway_token import GATEWAY_TOKEN, as_gateway
from tests.runtime.server.serving import a_replica, ready_of


@pytest.mark.capability("RD-3")
async def test_a_replica_is_alive_at_once_and_ready_only_when_its_model_answers():
    async with a_replica(load=False) as replica:
        assert await ready_of(replica) == (503, ReadyReason.LOADING)
        assert (await replica.admin("/health")).status_code == 200
        assert (await replica.admin("/metrics")).status_code == 200
        # review/peer-suites.md 11, review/engine.md F14: the docs name it on the serving port
        assert (await replica.http.get(f"{replica.url}/ready")).status_code == 503
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

        replica.steps.resume_steps()
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
        replica.steps.resume_steps()
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
        replica.steps.resume_steps()
        assert (await asking).status_code == 200


@pytest.mark.capability("RD-9")
async def test_a_second_hang_is_found_as_soon_as_the_first():
    """A hang of 12 s that ended raised the limit to 54 s for minutes."""
    async with a_replica() as replica:
        replica.client.times = StepTimes(0.2, replica.clock)
        for _ in range(2):
            replica.steps.hold()
            asking = asyncio.create_task(replica.chat(max_tokens=2))
            await replica.until(lambda stats: stats.running + stats.waiting == 1)
            replica.clock.ahead += 7
            assert await ready_of(replica) == (503, ReadyReason.STEP_LOOP_STALLED)
            replica.clock.ahead += 5
            replica.steps.resume_steps()
            assert (await asking).status_code == 200
            assert await ready_of(replica) == (200, ReadyReason.READY)


@pytest.mark.capability("RD-9")
async def test_a_stopped_engine_process_is_found_in_four_seconds_however_long_its_steps_may_take():
    """Measured: unready after 44 s, and a second hang unnoticed, because steps of 9 s had raised the limit to 42 s."""
    async with a_replica() as replica:
        replica.client.times = StepTimes(9.0, replica.clock)
        for _ in range(2):
            replica.client.times.pulsed()
            replica.clock.ahead += 2.4
            assert await ready_of(replica) == (200, ReadyReason.READY)
            replica.clock.ahead += 0.2
            assert await ready_of(replica) == (200, ReadyReason.READY), "this process may have been late itself"
            replica.clock.ahead += 1
            assert await ready_of(replica) == (503, ReadyReason.STEP_LOOP_STALLED)
            assert (await replica.admin("/health")).status_code == 200
            replica.clock.ahead += 20
            replica.client.times.pulsed()
            assert await ready_of(replica) == (200, ReadyReason.READY)


@pytest.mark.capability("RD-9")
async def test_a_long_step_is_not_taken_for_a_stopped_process():
    async with a_replica() as replica:
        replica.client.times = StepTimes(10.0, replica.clock)
        replica.steps.hold()
        asking = asyncio.create_task(replica.chat(max_tokens=2))
        await replica.until(lambda stats: stats.running + stats.waiting == 1)
        for _ in range(80):
            replica.clock.ahead += 0.5
            replica.client.times.pulsed()
            assert await ready_of(replica) == (200, ReadyReason.READY)
        replica.steps.resume_steps()
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
        replica.steps.resume_steps()
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
        replica.steps.resume_steps()


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
        assert (await replica.http.get(f"{replica.url}/health")).status_code == 200
        assert (await replica.http.get(f"{replica.url}/metrics")).status_code == 401, "review/shipping.md 24"
        assert (await replica.admin("/ready")).status_code == 200, "the admin port has a token of its own"


@pytest.mark.capability("SE-11", "MT-1")
@pytest.mark.parametrize("token", ["", "a draft token", token_digest(GATEWAY_TOKEN)], ids=["none", "wrong", "digest"])
async def test_tenant_and_priority_need_the_gateways_token_and_are_else_ignored_and_named(token):
    """review/shipping.md 1: any pod chose whose queue, quota and prefix cache it used."""
    forged = {"x-slipway-tenant": "shop", "x-slipway-priority": "1000", "x-slipway-serving-token": token}
    async with a_replica() as replica:
        answer = await replica.chat(max_tokens=2, headers={name: value for name, value in forged.items() if value})
        before = (await replica.admin("/metrics")).text
        proven = await replica.chat(max_tokens=2, headers=as_gateway(tenant="shop", priority="1000"))
        page = (await replica.admin("/metrics")).text

    assert answer.status_code == 200
    assert answer.headers["x-slipway-ignored-headers"] == "x-slipway-priority, x-slipway-tenant"
    assert "x-slipway-ignored-headers" not in proven.headers
    assert 'tenant="shop"' not in before
    assert 'tenant="shop"' in page, "the gateway's own request counts for its tenant"


@pytest.mark.capability("SE-11", "OB-1")
async def test_metrics_are_on_the_admin_port_alone_and_the_serving_port_says_so():
    """review/shipping.md 24: tenants, models and volumes were shown to every pod."""
    async with a_replica() as replica:
        refused = await replica.http.get(f"{replica.url}/metrics")
        assert refused.status_code == 404
        assert "admin port" in refused.json()["error"]["message"]
        assert (await replica.admin("/metrics")).status_code == 200


@pytest.mark.capability("SE-9")
async def test_of_a_caller_without_the_serving_token_a_constant_is_read():
    """review/control-plane.md 2: up to 64 MiB were read before the 401."""
    async with a_replica(serving_token_digests=(token_digest("the token"),)) as replica:
        sent = 0

        async def body():
            nonlocal sent
            while True:
                sent += 16_384
                yield b"x" * 16_384
                await asyncio.sleep(0)

        with contextlib.suppress(httpx.TransportError):
            answer = await replica.http.post(f"{replica.url}/v1/completions", content=body())
            assert answer.status_code == 401
            assert answer.headers["connection"] == "close"
        assert sent < 32 * 2**20, "64 KiB, and what the kernel's buffers hold"


# --- numbers
