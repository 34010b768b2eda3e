"""What happened to the prefixes, in vLLM's words, for routers that want to know where a prefix is. Pure."""

from collections.abc import Sequence

from slipway_runtime.messages import AllBlocksCleared, BlockRemoved, BlockStored

KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventLog:
    """Collects events until somebody takes them. What follows one another of the same kind becomes one event."""

    def __init__(self) -> None:
        self._events: list[KvEvent] = []
        self._removed: list[bytes] = []

    def stored(self, parent: bytes | None, keys: Sequence[bytes], token_ids: Sequence[int], adapter: str) -> None:
        """Blocks of one chain can be found from now on; `parent` is None for a first block."""
        self._close()
        self._events.append(
            BlockStored(
                block_hashes=tuple(keys),
                parent_block_hash=parent,
                token_ids=tuple(token_ids),
                block_size=len(token_ids) // len(keys),
                adapter=adapter,
            )
        )

    def removed(self, key: bytes) -> None:
        """A block cannot be found any more."""
        self._removed.append(key)

    def cleared(self) -> None:
        """Nothing can be found any more."""
        self._close()
        self._events.append(AllBlocksCleared())

    def take(self) -> tuple[KvEvent, ...]:
        """The events since the last call."""
        self._close()
        events, self._events = self._events, []
        return tuple(events)

    def _close(self) -> None:
        if self._removed:
            self._events.append(BlockRemoved(block_hashes=tuple(self._removed)))
            self._removed = []
