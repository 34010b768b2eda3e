"""Who finds whose KV: what may be published, and whose blocks a fork may share."""

from slipway_runtime.scheduling.block_pool import BlockPool
from slipway_runtime.scheduling.sequence import Sequence, State


def find_prefix(sequence: Sequence, most: int, pool: BlockPool) -> list[int]:
    """The longest run of its first blocks, at most so many, that it may use: found under its own salt or, where that
    ends early, among the service's own prompts. Those are only read: what follows them goes under the own salt again.
    """
    keys = sequence.block_keys(most, pool.block_size)
    own = pool.match(keys)
    public = [] if sequence.request.public else pool.match(sequence.public_block_keys(most, pool.block_size))
    return own if len(own) >= len(public) else public + pool.match(keys[len(public) :])


def publish_computed(sequence: Sequence, pool: BlockPool) -> None:
    """Let others find the blocks that are full and computed. Drawn tokens count once they are accepted."""
    size, adapter = pool.block_size, sequence.adapter
    # After a guess that ended it, more was computed than was kept.
    full = min(sequence.num_computed, sequence.num_tokens) // size
    if full <= sequence.num_published or not pool.shares_prefixes:
        return
    sequence.block_keys(full, size)
    keys = sequence.keys
    for index in range(sequence.num_published, full):
        new = pool.publish(sequence.blocks[index], keys[index + 1], adapter)
        if new and pool.events is not None:
            tokens = sequence.token_ids[index * size : (index + 1) * size]
            # The parent as others can find it: the block before may be one of the public ones.
            parent = pool.key_of(sequence.blocks[index - 1]) or keys[index] if index else None
            pool.events.stored(parent, keys[index + 1], tokens, adapter)
    sequence.num_published = full


def fork_source(sequence: Sequence) -> Sequence | None:
    """Whose blocks hold all but its last token, the partly filled one included; None: compute, or look for prefixes."""
    leader = sequence.leader
    if leader is None or leader.state is not State.RUNNING or sequence.num_output_tokens:
        return None
    return leader if leader.num_computed >= sequence.num_tokens - 1 else None
