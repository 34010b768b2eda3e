"""Admission of a waiting sequence to a row: a slot for its adapter, prefix hits, blocks for all of its tokens."""

from enum import Enum, auto

from slipway_runtime.scheduling.adapter import BASE_SLOT
from slipway_runtime.scheduling.prefixes import Prefix, bring_back, find_prefix, fork_source
from slipway_runtime.scheduling.request_table import RequestTable
from slipway_runtime.scheduling.scheduler_output import SchedulerOutputBuilder
from slipway_runtime.scheduling.sequence import Sequence

MAX_PREEMPTIONS = 2


class AdmissionResult(Enum):
    """Whether a waiting sequence was admitted, and if not, what it lacks."""

    ADMITTED = auto()
    NO_BLOCKS = auto()  # no sequence overtakes it: smaller ones would always take the blocks that it waits for
    NO_SLOT = auto()  # sequences with other adapters overtake it


def admit(
    sequence: Sequence, table: RequestTable, plan: SchedulerOutputBuilder, watermark_blocks: int, now: float
) -> AdmissionResult:
    """Give a waiting sequence a row and its blocks, if a slot and the blocks are available."""
    pool, residency, tier, adapter = table.pool, table.residency, table.tier, sequence.adapter
    slot = residency.slot_for(adapter, sequence.serial) if residency is not None and adapter else BASE_SLOT
    if slot is None:
        return AdmissionResult.NO_SLOT
    # At least one token stays to be computed: without it there would be nothing to sample the next one from.
    most = sequence.num_tokens - 1
    source = fork_source(sequence)
    looks_up = source is None and sequence.reads_cache and pool.shares_prefixes
    prefix = find_prefix(sequence, most // pool.block_size, pool) if looks_up else Prefix([], [])
    device_blocks, host_keys = prefix.device_blocks, prefix.host_keys
    shared = len(device_blocks) if source is None else most // pool.block_size
    length = sequence.max_tokens if sequence.preemptions >= MAX_PREEMPTIONS else sequence.num_tokens
    need = pool.blocks_for(length) - shared
    reserve = watermark_blocks + len(table.running) if table.running else 0
    pool.hold(device_blocks)  # before blocks are evicted: these must not be
    if tier is not None:
        tier.hold(host_keys)
    if residency is not None:
        residency.make_room(need, reserve)
    if pool.available - need < reserve:
        pool.release(device_blocks)
        if tier is not None:
            tier.release(host_keys)
        assert table.running or table.ending, "a sequence alone always fits: longer ones are refused"
        return AdmissionResult.NO_BLOCKS
    if source is not None:
        blocks, copy = pool.fork(source.blocks, most)
        plan.copies += [copy] if copy is not None else []
        blocks += pool.allocate(pool.blocks_for(length) - len(blocks))
        num_computed = most
    else:
        fresh = pool.allocate(need)
        found = prefix.blocks
        if tier is not None:
            found = bring_back(sequence, prefix, fresh, pool, tier)
            tier.count(most // pool.block_size - len(device_blocks) if looks_up else 0, len(host_keys))
        if sequence.preemptions == 0:
            pool.count_use(found)
        blocks, shared = found + fresh[len(host_keys) :], len(found)
        num_computed = shared * pool.block_size
    num_from_host = len(host_keys) * pool.block_size
    table.start(sequence, blocks, num_computed, num_from_host=num_from_host, num_published=shared, now=now)
    plan.new_blocks[sequence] = blocks.copy()
    plan.start_row(sequence, slot)
    return AdmissionResult.ADMITTED
