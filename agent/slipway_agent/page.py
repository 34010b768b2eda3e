"""Reads a metrics page in the text format of Prometheus, chunk by chunk, and keeps only the requested series.

The page comes from a foreign engine, so it is not trusted: lines, series and bytes have limits, and an
unreadable value is an error, never a zero. Pure: no network.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

MOST_PAGE_BYTES: Final = 8 * 2**20  # an engine with many adapters and buckets has some hundred kB
MOST_LINE_BYTES: Final = 16 * 2**10
MOST_SERIES: Final = 4096  # requested ones
MOST_KEPT_BYTES: Final = 2**20  # of their lines

_LINE: Final = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?")
_LABEL: Final = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPE: Final = re.compile(r"\\(.)")


class UnreadablePage(ValueError):  # noqa: N818  reads as a fact where it is raised
    """The page does not match the dialect; the message names the mismatch, without text of the page."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of the page."""

    labels: Mapping[str, str]
    value: float

    def has(self, labels: Mapping[str, str]) -> bool:
        """Whether it has all these labels with these values."""
        return all(self.labels.get(name) == value for name, value in labels.items())


class PageReader:
    """Takes the chunks of one page. Raises UnreadablePage as soon as a limit is passed."""

    def __init__(self, wanted: Collection[str]) -> None:
        self._wanted = frozenset(wanted)
        self._rest = b""
        self._size = 0
        self._count = 0
        self._kept = 0
        self._found: dict[str, list[Series]] = {}

    def feed(self, chunk: bytes) -> None:
        """The next bytes of the page."""
        self._size += len(chunk)
        if self._size > MOST_PAGE_BYTES:
            raise UnreadablePage(f"the metrics page is larger than {MOST_PAGE_BYTES} bytes")
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > MOST_LINE_BYTES:
            raise UnreadablePage(f"a line of the metrics page is longer than {MOST_LINE_BYTES} bytes")
        self._take(lines)

    def finish(self) -> dict[str, list[Series]]:
        """The series by their metric's name; metrics that the page does not have are absent."""
        rest, self._rest = self._rest, b""
        self._take([rest])
        return self._found

    def _take(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            if line[:1] in (b"", b"#", b"\r"):
                continue
            name = re.split(rb"[{\s]", line, maxsplit=1)[0].decode("ascii", "replace")
            if name not in self._wanted:
                continue
            if len(line) > MOST_LINE_BYTES:
                raise UnreadablePage(f"a line of the metrics page is longer than {MOST_LINE_BYTES} bytes")
            self._count += 1
            self._kept += len(line)
            if self._count > MOST_SERIES or self._kept > MOST_KEPT_BYTES:
                raise UnreadablePage(
                    f"the metrics page has more than {MOST_SERIES} series of the dialect, or too long ones"
                )
            self._found.setdefault(name, []).append(_series(name, line))


def _series(name: str, line: bytes) -> Series:
    try:
        match = _LINE.fullmatch(line.decode().strip())
        if match is None:
            raise ValueError
        value = float(match["value"])
        labels = _labels(match["labels"] or "")
    except ValueError:
        raise UnreadablePage(f"a line of the metric {name} cannot be read") from None
    if not math.isfinite(value):
        raise UnreadablePage(f"the metric {name} is not a finite number")
    return Series(labels, value)


def _labels(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    at = 0
    while at < len(text):
        match = _LABEL.match(text, at)
        if match is None:
            raise ValueError(text)
        found[match[1]] = _ESCAPE.sub(lambda m: "\n" if m[1] == "n" else m[1], match[2])
        at = match.end()
    return found
