"""Builds the body of `GET /state`: the full state of a replica, for people and the operator."""

from slipway_api.runtime_api import BlockCounts, LastStep, QueueCounts, State
from slipway_runtime.messages import EngineFacts, EngineStats
from slipway_runtime.server.engine_metrics import longest_queues
from slipway_runtime.server.replica import Replica


def state_of(replica: Replica) -> State:
    """The current state of the replica; before the engine is loaded, its numbers are zeros."""
    stats, loaded = replica.stats(), replica.loaded
    facts = loaded.engine.facts if loaded else None
    blocks = BlockCounts(
        total=stats.blocks_total,
        live=stats.blocks_live,
        cached=stats.blocks_cached,
        free=stats.blocks_total - stats.blocks_live - stats.blocks_cached,
    )
    return State(
        boot_id=replica.boot_id,
        model_name=replica.identity.model,
        revision=replica.identity.revision,
        tokenizer_sha256=loaded.tokenizer_sha256 if loaded else "",
        uptime_seconds=replica.uptime_seconds,
        block_size=facts.block_size if facts else 0,
        bytes_per_token=facts.bytes_per_token if facts else 0,
        max_model_len=facts.max_model_len if facts else 0,
        max_num_seqs=facts.max_num_seqs if facts else 0,
        blocks=blocks,
        queue=QueueCounts(
            running=stats.running,
            waiting=stats.waiting,
            waiting_tokens=stats.waiting_tokens,
            waiting_by_tenant=longest_queues(stats),
        ),
        draining=replica.draining,
        startup=replica.startup,
        kv_tiers=_tiers(blocks, facts, stats),
        last_step=_last_step(stats, replica.clock()),
        adapters=tuple(loaded.adapters.infos()) if loaded else (),
        quantization=facts.quantization if facts else "",
        warnings=facts.warnings if facts else (),
    )


def _tiers(device: BlockCounts, facts: EngineFacts | None, stats: EngineStats) -> dict[str, BlockCounts]:
    """KV block counts by memory tier; no block in host memory is live."""
    if facts is None:
        return {}
    if not facts.host_blocks:
        return {"device": device}
    cached, total = stats.host_blocks, facts.host_blocks
    return {"device": device, "host": BlockCounts(total=total, live=0, cached=cached, free=total - cached)}


def _last_step(stats: EngineStats, now: float) -> LastStep | None:
    batch = stats.last_batch
    if batch is None:
        return None
    ago = max(now - batch.at, 0.0)
    return LastStep(rows=batch.rows, tokens=batch.tokens, seconds=round(batch.seconds, 6), seconds_ago=round(ago, 3))
