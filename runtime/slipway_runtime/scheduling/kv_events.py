"""Log of KV events: blocks stored and removed, in vLLM's terms, for routers that look for a prefix. Pure."""

from collections.abc import Sequence

from slipway_runtime.messages import AllBlocksCleared, BlockRemoved, BlockStored, Medium

KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventLog:
    """Collects events until `take`; successive events of the same kind become one."""

    def __init__(self, block_size: int, medium: Medium = Medium.DEVICE) -> None:
        self._block_size = block_size
        self._medium = medium
        self._events: list[KvEvent] = []
        self._removed: list[bytes] = []
        self._stored: list[tuple[bytes, Sequence[int]]] = []  # of one chain
        self._parent: bytes | None = None
        self._adapter = ""

    def stored(self, parent: bytes | None, key: bytes, token_ids: Sequence[int], adapter: str) -> None:
        """Record that a block was published; `parent` is None for the first one of a chain.

        As in vLLM's events of host memory, a block without tokens is recorded by its key alone, and needs no chain.
        """
        if not self._stored or (token_ids and self._stored[-1][0] != parent):
            self._close()
            self._parent, self._adapter = parent, adapter
        self._stored.append((key, token_ids))

    def removed(self, key: bytes) -> None:
        """Record that a block is no longer published."""
        if self._stored:
            self._close()
        self._removed.append(key)

    def cleared(self) -> None:
        """Record that no block is published any more."""
        self._close()
        self._events.append(AllBlocksCleared())

    def take(self) -> tuple[KvEvent, ...]:
        """The events since the last call."""
        self._close()
        events, self._events = self._events, []
        return tuple(events)

    def _close(self) -> None:
        if self._removed:
            self._events.append(BlockRemoved(block_hashes=tuple(self._removed), medium=self._medium))
            self._removed = []
        if self._stored:
            self._events.append(
                BlockStored(
                    block_hashes=tuple(key for key, _ in self._stored),
                    parent_block_hash=self._parent,
                    token_ids=tuple(token_id for _, token_ids in self._stored for token_id in token_ids),
                    block_size=self._block_size,
                    adapter=self._adapter,
                    medium=self._medium,
                )
            )
            self._stored = []
