"""Whether a waiting sequence can start now, and with what: a slot for its adapter, a row, blocks for all its tokens."""

from enum import Enum, auto

from slipway_runtime.scheduling.adapter import BASE_SLOT
from slipway_runtime.scheduling.books import Books
from slipway_runtime.scheduling.plans import PlanBuilder
from slipway_runtime.scheduling.prefixes import Prefix, bring_back, find_prefix, fork_source
from slipway_runtime.scheduling.sequence import Sequence

MAX_PREEMPTIONS = 2


class Turn(Enum):
    """How the try to admit a sequence went."""

    ADMITTED = auto()
    NO_BLOCKS = auto()  # nobody overtakes: what is short for the first may be short for the next one for ever
    NO_SLOT = auto()  # others need not wait for an adapter


def admit(sequence: Sequence, books: Books, plan: PlanBuilder, watermark_blocks: int, now: float) -> Turn:
    """Give a waiting sequence a row and its blocks, if they are there."""
    pool, residency, tier, adapter = books.pool, books.residency, books.tier, sequence.adapter
    slot = residency.slot_for(adapter, sequence.serial) if residency is not None and adapter else BASE_SLOT
    if slot is None:
        return Turn.NO_SLOT
    # At least one token stays to be computed: without it there would be nothing to draw the next one from.
    most = sequence.num_tokens - 1
    source = fork_source(sequence)
    looks_up = source is None and sequence.reads_cache and pool.shares_prefixes
    prefix = find_prefix(sequence, most // pool.block_size, pool) if looks_up else Prefix([], [])
    near, far = prefix.near, prefix.far
    shared = len(near) if source is None else most // pool.block_size
    length = sequence.max_tokens if sequence.preemptions >= MAX_PREEMPTIONS else sequence.num_tokens
    need = pool.blocks_for(length) - shared
    reserve = watermark_blocks + len(books.running) if books.running else 0
    pool.hold(near)  # before room is made: it must not be made of them
    if tier is not None:
        tier.hold(far)
    if residency is not None:
        residency.make_room(need, reserve)
    if pool.available - need < reserve:
        pool.release(near)
        if tier is not None:
            tier.release(far)
        assert books.running or books.ending, "a sequence alone always fits: longer ones are refused"
        return Turn.NO_BLOCKS
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
            tier.count(most // pool.block_size - len(near) if looks_up else 0, len(far))
        if sequence.preemptions == 0:
            pool.count_use(found)
        blocks, shared = found + fresh[len(far) :], len(found)
        num_computed = shared * pool.block_size
    num_from_host = len(far) * pool.block_size
    books.start(sequence, blocks, num_computed, num_from_host=num_from_host, num_published=shared, now=now)
    plan.new_blocks[sequence] = blocks.copy()
    plan.start_row(sequence, slot)
    return Turn.ADMITTED
