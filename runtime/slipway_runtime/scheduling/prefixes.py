"""Who finds whose KV: what may be published, and whose blocks a fork may share."""

from slipway_runtime.scheduling.block_pool import BlockPool
from slipway_runtime.scheduling.sequence import Sequence, State


def publish_computed(sequence: Sequence, pool: BlockPool) -> None:
    """Let others find the blocks that are full and computed. Drawn tokens count once they are accepted."""
    size, adapter = pool.block_size, sequence.adapter
    # After a guess that ended it, more was computed than was kept.
    full = min(sequence.num_computed, sequence.num_tokens) // size
    if full <= sequence.num_published:
        return
    sequence.block_keys(full, size)
    keys = sequence.keys
    for index in range(sequence.num_published, full):
        new = pool.publish(sequence.blocks[index], keys[index + 1], adapter)
        if new and pool.events is not None:
            tokens = sequence.token_ids[index * size : (index + 1) * size]
            pool.events.stored(keys[index] if index else None, keys[index + 1], tokens, adapter)
    sequence.num_published = full


def fork_source(sequence: Sequence) -> Sequence | None:
    """Whose blocks hold all but its last token, the partly filled one included; None: compute, or look for prefixes."""
    leader = sequence.leader
    if leader is None or leader.state is not State.RUNNING or sequence.num_output_tokens:
        return None
    return leader if leader.num_computed >= sequence.num_tokens - 1 else None
