"""Incremental parser for one tool call as a JSON object: the function's name, and its arguments so far. Pure."""

import json
from typing import Final

_ARGUMENTS: Final = ("arguments", "parameters")


class CallObject:
    """Reads `{"name": "f", "arguments": {…}}` one character at a time."""

    def __init__(self) -> None:
        self.raw = ""
        self.name: str | None = None
        self.arguments = ""  # the part that has been read
        self.is_complete = False
        self.is_broken = False
        self._where = "start"
        self._key = ""
        self._value = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, char: str) -> None:
        """Parse one more character."""
        assert not self.is_complete
        self.raw += char
        if self._in_string:
            self._inside_a_string(char)
        elif self._where == "value":
            self._inside_a_value(char)
        elif char == '"' and self._where == "key":
            self._in_string, self._key = True, char
        elif self._where == "start" and char == "{":
            self._where = "key"
        elif self._where == "colon" and char == ":":
            self._where, self._value = "value", ""
        elif self._where == "key" and char == "}":
            self.is_complete = True
        elif not (char.isspace() or (self._where == "key" and char == ",")):
            self.is_broken = True

    @property
    def value_is_whole(self) -> bool:
        """Whether the arguments are a complete object."""
        return self._where == "value" and self._depth == 0 and not self._in_string and self._value.endswith("}")

    def _inside_a_string(self, char: str) -> None:
        if self._where == "key":
            self._key += char
        else:
            self._add(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            if self._where == "key":
                self._where = "colon"

    def _inside_a_value(self, char: str) -> None:
        if self._depth == 0 and char in ",}":
            self._end_value()
            self._where = "key"
            self.is_complete = char == "}"
            return
        if char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        elif char == '"':
            self._in_string = True
        elif char.isspace() and not self._value:
            return
        self._add(char)
        self.is_broken |= self._depth < 0

    def _add(self, char: str) -> None:
        self._value += char
        if _text_of(self._key) in _ARGUMENTS:
            self.arguments = self._value

    def _end_value(self) -> None:
        if _text_of(self._key) == "name":
            self.name = _text_of(self._value.strip())
            self.is_broken |= self.name is None
        elif _text_of(self._key) in _ARGUMENTS and self._value.startswith('"'):
            self.arguments = _text_of(self._value.strip()) or ""  # some models write the object as a JSON string


def _text_of(raw: str) -> str | None:
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
