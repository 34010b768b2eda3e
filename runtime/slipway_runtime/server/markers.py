"""Finds fixed markers, such as `</think>`, in a text that arrives in pieces. Linear in the text. Pure."""

import re
from collections.abc import Iterator, Sequence


class MarkerFinder:
    """Splits a text at its markers. Holds back only an end of the text that may become a marker."""

    def __init__(self, markers: Sequence[str]) -> None:
        """Each marker begins with `<` and has no other: at most one place of a text can begin an incomplete one."""
        assert markers
        assert all(marker.startswith("<") and "<" not in marker[1:] for marker in markers)
        self._markers = tuple(markers)
        self._pattern = re.compile("|".join(map(re.escape, markers)))
        self._held = ""  # always shorter than the longest marker, so no character is searched more than twice

    def push(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield each text and the marker after it; the marker of the last text is empty."""
        if not self._held and "<" not in text:
            yield text, ""
            return
        text = self._held + text
        at = 0
        for found in self._pattern.finditer(text):
            yield text[at : found.start()], found.group()
            at = found.end()
        end = self._certain(text, at)
        self._held = text[end:]
        yield text[at:end], ""

    def flush(self) -> str:
        """Return the text that was held back; no more text comes."""
        held, self._held = self._held, ""
        return held

    def _certain(self, text: str, at: int) -> int:
        """The end of the text that no later piece makes a marker of."""
        begins = text.rfind("<", at)
        if begins >= 0 and any(marker.startswith(text[begins:]) for marker in self._markers):
            return begins
        return len(text)
