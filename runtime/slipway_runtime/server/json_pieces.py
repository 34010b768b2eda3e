"""Writes a large JSON body in pieces, so that a thread that writes it lets the event loop run in between. Pure.

Python's own encoder holds the interpreter for the whole value: seconds for a body with a million logprobs.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

ITEMS_OF_PIECE: Final = 256
_encode: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def json_in_pieces(value: Any) -> Iterator[bytes]:
    """Yield the JSON of a value; a piece holds at most `ITEMS_OF_PIECE` items of a list."""
    if isinstance(value, Mapping):
        separator = b"{"
        for name, item in value.items():
            yield separator + _encode(name).encode() + b":"
            yield from json_in_pieces(item)
            separator = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, list | tuple) and len(value) > ITEMS_OF_PIECE:
        separator, items = b"[", iter(value)
        while piece := list(islice(items, ITEMS_OF_PIECE)):
            yield separator + _encode(piece)[1:-1].encode()
            separator = b","
        yield b"]"
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):  # such as the choices
        separator = b"["
        for item in value:
            yield separator
            yield from json_in_pieces(item)
            separator = b","
        yield b"]"
    else:
        yield _encode(value).encode()
