"""What the admin port tells of a replica: signals for the operator, and its whole state."""

import asyncio

import msgspec
import pytest

from slipway_api.runtime_api import Signals, State
from tests.runtime.gateway_token import as_gateway
from tests.runtime.server.serving import a_replica


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
        replica.steps.resume_steps()
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
            asyncio.create_task(replica.chat("Hi", headers=as_gateway(tenant=tenant), max_tokens=8, ignore_eos=True))
            for tenant in ("a", "b", "b", "b")
        ]
        await replica.until(lambda stats: stats.waiting == 4)
        replica.steps.allow(3)
        stats = await replica.until(lambda stats: stats.steps == 3)
        replica.clock.ahead += 100
        busy = State.model_validate_json((await replica.admin("/state")).content)
        replica.steps.resume_steps()
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
