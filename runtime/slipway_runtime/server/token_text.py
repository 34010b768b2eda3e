"""The exact bytes of a single token, and their text.

A token may be part of a character. Decoders replace it by U+FFFD, so the bytes are read from the vocabulary.
"""

from functools import cached_property
from typing import Final

from tokenizers import Tokenizer

_SPACE: Final = "\u2581"  # how SentencePiece writes a space


def _byte_alphabet() -> dict[str, int]:
    """The inverse of GPT-2's mapping from bytes to printable characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES: Final = _byte_alphabet()


class TokenText:
    """Bytes and text of the tokens of one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _added(self) -> dict[int, str]:
        return {token_id: added.content for token_id, added in self._tokenizer.get_added_tokens_decoder().items()}

    @cached_property
    def _is_byte_level(self) -> bool:
        # Only a byte-level vocabulary writes a space as this letter.
        return any(piece.startswith("Ġ") for piece in self._tokenizer.get_vocab(with_added_tokens=False))

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of the token; empty for an id that is not in the vocabulary."""
        if (added := self._added.get(token_id)) is not None:
            return added.encode()
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._is_byte_level:
            return bytes(_BYTES[char] for char in piece if char in _BYTES)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(_SPACE, " ").encode()

    def text_of(self, token_id: int) -> str:
        """The text of the token; incomplete characters become U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", "replace")
