"""Prefix cache of sequences: finds and publishes their blocks, and admits waiting sequences with the prefix found.

A prefix consists of blocks that are published, blocks that return from host memory, or blocks that a fork shares. An
admitted sequence gets a row, a slot for its adapter, and blocks for all of its tokens.
"""

from enum import Enum, auto
from typing import NamedTuple

from slipway_runtime.scheduling.adapter_state import BASE_SLOT
from slipway_runtime.scheduling.block_pool import NULL_BLOCK, BlockPool
from slipway_runtime.scheduling.host_tier import HostTier
from slipway_runtime.scheduling.request_table import RequestTable
from slipway_runtime.scheduling.scheduler_output import SchedulerOutputBuilder
from slipway_runtime.scheduling.sequence import Sequence, State


class Prefix(NamedTuple):
    """The first blocks of a sequence that are in the prefix cache."""

    keys: list[bytes]
    blocks: list[int]  # parallel to the keys; NULL_BLOCK: in host memory
    next_keys: tuple[bytes, ...] = ()  # of the blocks after it that were not found, one under each root

    @property
    def device_blocks(self) -> list[int]:
        """The blocks that are on the device."""
        return [block for block in self.blocks if block != NULL_BLOCK]

    @property
    def host_keys(self) -> list[bytes]:
        """The keys of the blocks that are in host memory."""
        return [key for key, block in zip(self.keys, self.blocks, strict=True) if block == NULL_BLOCK]


def find_prefix(sequence: Sequence, most: int, pool: BlockPool) -> Prefix:
    """The longest cached prefix of a sequence, at most so many blocks: under its own salt or, where that is shorter,
    among the public prompts of the service. Blocks after a public prefix are under the sequence's own salt again.
    """
    keys = sequence.block_keys(most, pool.block_size)
    blocks = pool.match(keys)
    public = [] if sequence.request.public else pool.match(sequence.public_block_keys(most, pool.block_size))
    if len(public) > len(blocks):
        blocks = public + pool.match(keys[len(public) :])
        keys = sequence.public_keys[1 : len(public) + 1] + keys[len(public) :]
    after = (keys[len(blocks) : len(blocks) + 1], sequence.public_keys[len(public) + 1 : len(public) + 2])
    return Prefix(keys[: len(blocks)], blocks, tuple(key for next_key in after for key in next_key))


def promote_prefix(sequence: Sequence, prefix: Prefix, fresh: list[int], pool: BlockPool, tier: HostTier) -> list[int]:
    """The blocks of a held prefix, in order; those in host memory are promoted into the first of the fresh ones.

    These are published at once: a sequence that finds them computes in the same plan or later, after the copies.
    """
    taken, blocks = iter(fresh), []
    for index, (key, block) in enumerate(zip(prefix.keys, prefix.blocks, strict=True)):
        blocks.append(next(taken) if block == NULL_BLOCK else block)
        if block == NULL_BLOCK:
            _publish(sequence, index, blocks[-1], key, prefix.keys[index - 1] if index else None, pool)
    host_keys = prefix.host_keys
    tier.promote(host_keys, fresh[: len(host_keys)])
    return blocks


def publish_computed(sequence: Sequence, pool: BlockPool) -> None:
    """Publish the full, computed blocks of a sequence. Sampled tokens count once they are accepted."""
    size = pool.block_size
    # Where a draft token ended the sequence, more tokens were computed than kept.
    full = min(sequence.num_computed, sequence.num_tokens) // size
    if full <= sequence.num_published or not pool.shares_prefixes:
        return
    sequence.block_keys(full, size)
    keys = sequence.keys
    for index in range(sequence.num_published, full):
        # The key under which the block before is published, which may be that of a public prompt.
        parent = pool.key_of(sequence.blocks[index - 1]) or keys[index] if index else None
        _publish(sequence, index, sequence.blocks[index], keys[index + 1], parent, pool)
    sequence.num_published = full


def attach_text_blocks(sequence: Sequence, pool: BlockPool) -> None:
    """Attach the text blocks of a computed prompt to its blocks: its own, found ones, or equal ones of others."""
    if pool.text_blocks is None or sequence.num_computed < sequence.num_prompt_tokens:
        return
    sequence.has_text_blocks = False
    keys = sequence.block_keys(sequence.num_prompt_tokens // pool.block_size, pool.block_size)
    pool.text_blocks.attach(
        (pool.key_of(sequence.blocks[index]) or keys[index], text_block)
        for index, text_block in sequence.request.text_blocks
        if index < len(keys)
    )


def _publish(sequence: Sequence, index: int, block: int, key: bytes, parent: bytes | None, pool: BlockPool) -> None:
    """Publish a block as the `index`th full block of a sequence, and record the event."""
    if pool.publish(block, key, sequence.adapter) and pool.events is not None:
        tokens = sequence.token_ids[index * pool.block_size : (index + 1) * pool.block_size]
        pool.events.stored(parent, key, tokens, sequence.adapter)


def fork_source(sequence: Sequence) -> Sequence | None:
    """The leader, if its blocks hold all but the last token of this sequence; None: compute the prompt."""
    leader = sequence.leader
    if leader is None or leader.state is not State.RUNNING or sequence.num_output_tokens:
        return None
    return leader if leader.num_computed >= sequence.num_tokens - 1 else None


MAX_PREEMPTIONS = 2


def _still_lacks_blocks(sequence: Sequence, pool: BlockPool) -> bool:
    """Whether the sequence was refused for lack of blocks, and nothing has changed that could admit it.

    A lookup of 128k tokens takes milliseconds, so a waiting sequence is not looked up in each step. It can be admitted
    after blocks were given back, or if its prefix has become longer.
    """
    if sequence.lacked_blocks is None:
        return False
    returns, next_keys = sequence.lacked_blocks
    return returns == pool.returns and not any(pool.holds(key) for key in next_keys)


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
    if looks_up and table.running and _still_lacks_blocks(sequence, pool):
        return AdmissionResult.NO_BLOCKS
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
        sequence.lacked_blocks = pool.returns, prefix.next_keys
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
            found = promote_prefix(sequence, prefix, fresh, pool, tier)
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
