"""Incremental detokenizer: the text of a stream of tokens, and the stop string that ends it. Pure; no torch.

Two rules. Text is sent only when no later token can change it: a character is never cut, so U+FFFD never stands for
half of one. And a stop string is found across tokens and steps, and no character of it is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from tokenizers import Tokenizer

_REPLACEMENT: Final = "\ufffd"  # what the decoder writes for bytes that are no character, or not yet one
MOST_UNDECIDED: Final = 32  # tokens held back for an incomplete character: then the text that cannot change is sent
_LONGEST_CHARACTER: Final = 4  # tokens, when each is a byte
_CONTEXT: Final = 6  # tokens of the prompt that decide how the first new token is written, such as its leading space


class Detokenizer:
    """Tokens of one sequence in, text out as it becomes certain.

    `pushed texts + flush()` equals the one-shot decoding of all tokens, and a token costs the decoding of a bounded
    number of them. Two offsets into the ids do it::

        ids:     … a a a | b b b b | c
                   prefix    read     new
        prefix..read  was sent; it stays in the window because decoders look back (leading spaces, merges)
        read..        not sent yet: its text ends in the middle of a character
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt_token_ids[-_CONTEXT:])
        if self._decode(0).endswith(_REPLACEMENT):
            self._ids.clear()  # a prompt cut inside a character cannot tell where its own text ends
        self._prefix = 0
        self._read = len(self._ids)
        self._sent = self._decode(0)

    def push(self, token_id: int) -> str:
        """Add a token; the text that is now certain, often empty."""
        self._ids.append(token_id)
        text = self._decode(self._prefix)
        # A window that shrank or ends in a replacement character waits: the next bytes may complete it.
        if len(text) > len(self._sent) and not text.endswith(_REPLACEMENT):
            return self._send(text, len(self._ids))
        if len(self._ids) - self._read < MOST_UNDECIDED:
            return ""
        return self._send_decided(text)

    def flush(self) -> str:
        """The rest, at the end of the sequence: bytes that never became a character come out as U+FFFD."""
        return self._send(self._decode(self._prefix), len(self._ids))

    def _send_decided(self, text: str) -> str:
        """Send the text that no later token can change, of a window too long to hold back: bytes of no character."""
        if text == self._sent:  # tokens that are no text, such as special ones
            del self._ids[self._read :]
            return ""
        for last in range(_LONGEST_CHARACTER, 2 * _LONGEST_CHARACTER):
            end = len(self._ids) - last
            head = self._decode(self._prefix, end)
            if len(head) > len(self._sent) and text.startswith(head):
                return self._send(head, end)
        return self._send(text, len(self._ids))

    def _send(self, text: str, end: int) -> str:
        """Send the text up to that id."""
        new = text[len(self._sent) :]
        self._prefix, self._read = self._read, end
        self._sent = self._decode(self._prefix, self._read)
        if self._prefix > 64:  # keep the window short: a long answer must not cost its length at every token
            del self._ids[: self._prefix]
            self._read -= self._prefix
            self._prefix = 0
        return new

    def _decode(self, start: int, end: int | None = None) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=self._skip)


@dataclass(frozen=True)
class Released:
    """Text that may be sent, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class StopStrings:
    """Finds the stop string that completes first, and releases only the text before it.

    Only the longest end of the text that could still become a stop string is held back: ordinary text is never late.
    The result does not depend on how the text was cut into pieces. Of several that complete at once the longest wins.

    The search is that of Knuth, Morris and Pratt: for each stop string, the length of its longest beginning that the
    text ends with. A character costs at most two comparisons with each stop string on average, whatever they are.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would end every answer before it starts"
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # of each stop string, so many characters end the text
        self._held = ""

    def push(self, text: str) -> Released:
        """Add text; what may be sent now."""
        if not self._stops:
            return Released(text)
        matched = self._matched
        for end, char in enumerate(text, start=1):
            completed = None
            for number, stop in enumerate(self._stops):
                length = matched[number]
                while length and stop[length] != char:
                    length = self._borders[number][length - 1]
                length += stop[length] == char
                matched[number] = length
                if length == len(stop) and completed is None:
                    completed = stop  # the first is the longest
            if completed is not None:
                self._matched = [0] * len(self._stops)
                whole, self._held = self._held + text[:end], ""
                return Released(whole[: len(whole) - len(completed)], completed)
        whole = self._held + text
        sent = len(whole) - max(matched)
        self._held = whole[sent:]
        return Released(whole[:sent])

    def flush(self) -> str:
        """What was held back, once nothing more comes."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held


@lru_cache(maxsize=256)  # each answer of a request has the same stop strings
def _borders(stop: str) -> tuple[int, ...]:
    """For each beginning of the stop string: the length of the longest shorter beginning that it also ends with."""
    borders = [0]
    for char in stop[1:]:
        length = borders[-1]
        while length and stop[length] != char:
            length = borders[length - 1]
        borders.append(length + (stop[length] == char))
    return tuple(borders)
