"""Text blocks that are attached to published KV blocks, and which of them became cached or were evicted. Pure.

A gateway names the beginnings of its prompts by hashes (`slipway_api.text_blocks`). Each is attached to the key of the
KV block in which it ends. It counts as cached while one of its keys can be found, on the device or in host memory.
"""

from collections.abc import Callable, Iterable
from typing import Final

from slipway_runtime.messages import TextBlockChanges

MOST_OF_KEY: Final = (
    4  # text blocks of one KV block: about one ends in it, more only where requests differ in their JSON
)


class TextBlockIndex:
    """The text blocks of each key, and the changes since the last `take`."""

    def __init__(self, is_cached: Callable[[bytes], bool]) -> None:
        """`is_cached`: whether a KV block with that key can be found, in whatever memory."""
        self._is_cached = is_cached
        self._of_key: dict[bytes, list[int]] = {}
        self._num_keys: dict[int, int] = {}  # of each text block
        self._changes: dict[int, bool] = {}  # whether it is cached now; only what was reported otherwise

    def __len__(self) -> int:
        return len(self._num_keys)

    def attach(self, pairs: Iterable[tuple[bytes, int]]) -> None:
        """Attach text blocks to keys; a key that is not cached takes none."""
        for key, text_block in pairs:
            if not self._is_cached(key):
                continue
            attached = self._of_key.setdefault(key, [])
            if text_block in attached or len(attached) >= MOST_OF_KEY:
                continue
            attached.append(text_block)
            count = self._num_keys.get(text_block, 0)
            self._num_keys[text_block] = count + 1
            if not count:
                self._change(text_block, is_cached=True)

    def removed(self, key: bytes) -> None:
        """One memory has dropped the KV block of this key; another one may still hold it."""
        if key not in self._of_key or self._is_cached(key):
            return
        for text_block in self._of_key.pop(key):
            self._num_keys[text_block] -= 1
            if not self._num_keys[text_block]:
                del self._num_keys[text_block]
                self._change(text_block, is_cached=False)

    def take(self) -> TextBlockChanges | None:
        """The changes since the last call, in their order; None: there are none."""
        if not self._changes:
            return None
        changes, self._changes = self._changes, {}
        return TextBlockChanges(
            stored=tuple(one for one, is_cached in changes.items() if is_cached),
            removed=tuple(one for one, is_cached in changes.items() if not is_cached),
        )

    def _change(self, text_block: int, *, is_cached: bool) -> None:
        if text_block in self._changes:  # it is again as it was reported last
            del self._changes[text_block]
        else:
            self._changes[text_block] = is_cached
