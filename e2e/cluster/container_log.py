"""A container's log file in the CRI's format, which the kubelet serves and rotates."""

from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

LONGEST_LINE = 16384  # longer ones are split, as other runtimes do


class Log:
    """The log of one container; used by one thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._rest = {"stdout": b"", "stderr": b""}  # the beginning of a line that has not ended

    def write(self, stream: str, data: bytes) -> None:
        """Append output; a line is written to the file when it is complete, or too long."""
        *lines, rest = (self._rest[stream] + data).split(b"\n")
        self._record(stream, [(line, True) for line in lines])
        while len(rest) >= LONGEST_LINE:
            self._record(stream, [(rest[:LONGEST_LINE], False)])
            rest = rest[LONGEST_LINE:]
        self._rest[stream] = rest

    def end(self) -> None:
        """Write the rest of the output, which has no newline."""
        for stream, rest in self._rest.items():
            if rest:
                self._record(stream, [(rest, False)])
        self._rest = dict.fromkeys(self._rest, b"")

    def reopen(self) -> None:
        """Write to a new file from now on: the kubelet has renamed the old one."""
        self._file = None

    def _record(self, stream: str, lines: list[tuple[bytes, bool]]) -> None:
        if not lines:
            return
        moment = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z")
        records = b"".join(record(moment, stream, line, whole) for line, whole in lines)
        file = self._file  # `reopen` may come from another thread at any moment
        if file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = file = self.path.open("ab", buffering=0)
        file.write(records)


def record(moment: str, stream: str, line: bytes, whole: bool) -> bytes:
    """One line of the file: `<time> <stream> <F, or P when the line goes on> <text>`."""
    pieces = [line[start : start + LONGEST_LINE] for start in range(0, len(line), LONGEST_LINE)] or [b""]
    tags = ["P"] * (len(pieces) - 1) + ["F" if whole else "P"]
    return b"".join(
        f"{moment} {stream} {tag} ".encode() + piece + b"\n" for tag, piece in zip(tags, pieces, strict=True)
    )
