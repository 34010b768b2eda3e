"""Text blocks of prompts: hashes by which a gateway and a runtime agree on what the KV cache of a replica holds.

A gateway cuts the text of a prompt into blocks and knows nothing of tokens; a runtime caches blocks of tokens and keeps
no text. So the gateway sends the chained hashes of its text blocks with a request (`x-slipway-text-blocks`). The
runtime attaches each to the KV block that holds the same share of the prompt, and reports when that KV block is cached
and when it is evicted (`GET /internal/text-blocks`, one JSON object a line):

| field   | meaning                                                                                     |
|---------|---------------------------------------------------------------------------------------------|
| cursor  | where the feed is after this line; `?after=<cursor>` continues there                         |
| reset   | true: forget what was known of this replica; this line and the next ones tell all that it has |
| stored  | hashes, 8 bytes each (little-endian), in base64: cached from now on                          |
| removed | the same: no longer cached                                                                  |

A line without `stored` and `removed` says that the replica is there.
"""

import base64
import binascii
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

MAX_TEXT_BLOCKS: Final = 256
HASHES_OF_LINE: Final = 2048  # 22 KB of base64
HEARTBEAT_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class TextBlocks:
    """The whole blocks of a prompt's text, in order."""

    total_bytes: int  # of the prompt's text
    block_bytes: int  # of each block
    hashes: tuple[int, ...]

    def header(self) -> str:
        """The value of `x-slipway-text-blocks`."""
        return f"{self.total_bytes}:{self.block_bytes}:{pack(self.hashes)}"

    @classmethod
    def of_header(cls, value: str) -> "TextBlocks":
        """Parse the value of a header; raises ValueError."""
        total, block, packed = value.split(":")
        blocks = cls(int(total), int(block), unpack(packed))
        if not (blocks.block_bytes > 0 and len(blocks.hashes) * blocks.block_bytes <= blocks.total_bytes):
            raise ValueError("more text blocks than text")
        if len(blocks.hashes) > MAX_TEXT_BLOCKS:
            raise ValueError(f"more than {MAX_TEXT_BLOCKS} text blocks")
        return blocks

    def in_kv_blocks(self, num_tokens: int, block_size: int) -> tuple[tuple[int, int], ...]:
        """Pairs of a KV block's index and the text block that ends in it, for a prompt of so many tokens.

        Text and tokens are taken to run evenly; a text block that ends in the last, partial KV block counts as in the
        last full one. Worked: 1,024 bytes, 260 tokens, text blocks of 256 bytes, KV blocks of 16 tokens → the first
        text block ends at token 65, which is in KV block 4.
        """
        full = num_tokens // block_size
        if not full or not self.hashes:  # without a block, the bytes may be any number, 0 too
            return ()
        per_block = self.block_bytes / self.total_bytes * num_tokens
        return tuple(
            (min(max(math.ceil(number * per_block / block_size), 1), full) - 1, one)
            for number, one in enumerate(self.hashes, 1)
        )


@dataclass(frozen=True, slots=True)
class TextBlockUpdate:
    """One line of the feed."""

    cursor: str
    stored: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    is_reset: bool = False

    def line(self) -> bytes:
        """The line, with its end."""
        fields: dict[str, Any] = {"cursor": self.cursor}
        if self.is_reset:
            fields["reset"] = True
        for name, hashes in (("stored", self.stored), ("removed", self.removed)):
            if hashes:
                fields[name] = pack(hashes)
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def of_line(cls, line: bytes) -> "TextBlockUpdate":
        """Parse a line; raises ValueError."""
        fields = json.loads(line)
        if not isinstance(fields, dict) or not isinstance(fields.get("cursor"), str):
            raise ValueError("not an object with a cursor")
        stored, removed = (unpack(str(fields.get(name, ""))) for name in ("stored", "removed"))
        return cls(fields["cursor"], stored, removed, fields.get("reset") is True)


def pack(hashes: Sequence[int]) -> str:
    """Hashes of 64 bits as base64."""
    return base64.b64encode(struct.pack(f"<{len(hashes)}Q", *hashes)).decode()


def unpack(text: str) -> tuple[int, ...]:
    """The hashes in this base64; raises ValueError."""
    try:
        packed = base64.b64decode(text, validate=True)
        return struct.unpack(f"<{len(packed) // 8}Q", packed)
    except (binascii.Error, struct.error) as error:
        raise ValueError("not hashes of 8 bytes in base64") from error
