"""Decides which replicas hang, by comparing each with its past and with its peers. Pure: the caller brings the time.

| the replica                                               | hangs after                                              |
|-----------------------------------------------------------|----------------------------------------------------------|
| streams run, and all are silent (`Pace`)                  | `hang_seconds`, or ten times its longest pause, within   |
|                                                           | `LONGEST_SECONDS` or twice that pause                    |
| streams wait for a first byte, and nothing at all came,   | `hang_seconds`; for a prompt beyond `SHORT_PROMPT`, more |
| while peers began `PEER_ANSWERS` streams sent since then  | in proportion to its length (`find_hung`)                |

A hang that ended says nothing about the next pause: it raises no limit, unless the pause after it is as long. A process
that was late itself judges nobody: what the replicas sent may still wait in its sockets (`LATE_SECONDS`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

HANG_FACTOR: Final = 10.0  # so many times the longest pause between two pieces is a hang
LONGEST_SECONDS: Final = 8.0  # for a hang, unless pauses of more than half of it are usual
PAUSE_DECAY: Final = 0.98  # a piece
PEER_ANSWERS: Final = 2  # one may be chance
SHORT_PROMPT: Final = 1024  # tokens
LATE_SECONDS: Final = 1.0


class Pace:
    """How regularly the streams of one replica bring something."""

    __slots__ = ("__weakref__", "_too_long", "last_at", "longest_pause")

    def __init__(self) -> None:
        self.last_at = 0.0  # when a stream brought something last
        self.longest_pause = 0.0  # between two pieces of the replica; an old one counts ever less
        self._too_long = 0.0  # the last pause, if it was a hang

    def observe(self, since: float, now: float, least: float) -> None:
        """A stream that awaited something since then brought it. `least`: seconds that are no hang in any case."""
        # The replica's own pause: after a hang all its streams go on, and only one of them ends the silence.
        pause = now - max(since, self.last_at)
        is_hang = pause > least and pause > self.hang_seconds(least)
        usual = min(pause, self._too_long) if is_hang else pause
        self._too_long = pause if is_hang else 0.0
        self.last_at = now
        self.longest_pause = max(usual, self.longest_pause * PAUSE_DECAY)

    def hang_seconds(self, least: float) -> float:
        """After how long a silence of all its streams the replica hangs."""
        most = max(LONGEST_SECONDS, 2 * self.longest_pause)
        return max(least, min(HANG_FACTOR * self.longest_pause, most))


@dataclass(frozen=True, slots=True)
class Waiting:
    """A stream that has no first byte yet: when its request was sent, and how many tokens its prompt has."""

    since: float
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FirstByte:
    """A stream that began: the replica, and when its request was sent."""

    endpoint: str
    sent: float


def find_hung(
    now: float,
    waiting: Mapping[str, Iterable[Waiting]],
    last_signs: Mapping[str, float],
    first_bytes: Sequence[FirstByte],
    *,
    seconds: float,
    awake_since: float,
) -> list[str]:
    """The replicas of one revision that hang, by the streams that wait at each.

    `last_signs`: when each replica last sent anything. `seconds`: the silence that is a hang for a short prompt.
    `awake_since`: before that this process may have read nothing.
    """
    hung = []
    for name, streams in waiting.items():
        last = max(last_signs.get(name, awake_since), awake_since)
        for stream in streams:
            quiet_since = max(stream.since, last)
            limit = seconds * max(1.0, stream.prompt_tokens / SHORT_PROMPT)
            if now - quiet_since < limit:
                continue
            if sum(one.endpoint != name and one.sent >= quiet_since for one in first_bytes) >= PEER_ANSWERS:
                hung.append(name)
                break
    return hung
