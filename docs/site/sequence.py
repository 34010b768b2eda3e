"""Renders Mermaid's sequence diagrams as inline SVG, so that the site loads no script of 3 MB and nothing from a CDN.

Git forges render the same fenced blocks by themselves. Understood are `participant A as Label`, `A->>B: text`,
`A-->>B: text`, `Note over A,B: text`, and `loop`, `opt`, `alt`, `else`, `end`; any other line fails the build.
"""

import re
from html import escape
from typing import Any

COLUMN, ROW, MARGIN, BOX = 210, 44, 20, 34  # pixels
CHARACTER = 6.6  # width of a letter of 13 px, about
PARTICIPANT = re.compile(r"participant (\w+) as (.+)")
MESSAGE = re.compile(r"(\w+)(-{1,2})>>(\w+): (.+)")
NOTE = re.compile(r"Note over (\w+)(?:,(\w+))?: (.+)")
FRAME = re.compile(r"(loop|opt|alt) (.+)")


class UnreadableError(ValueError):
    """A line that is not understood, or a participant that is not declared."""


def fence(source: str, language: str, css_class: str, options: Any, md: Any, **_: Any) -> str:
    """The formatter of a fenced block, as pymdownx.superfences calls it."""
    return f'<div class="sequence">{svg(source)}</div>'


def svg(source: str) -> str:
    """The diagram of this source; raises UnreadableError with the line that is wrong."""
    lines = [line.strip() for line in source.strip().splitlines() if line.strip()]
    if not lines or lines[0] != "sequenceDiagram":
        raise UnreadableError(f"a diagram begins with sequenceDiagram, not with {lines[:1]}")
    labels = {match[1]: match[2] for line in lines if (match := PARTICIPANT.fullmatch(line))}
    places = {name: MARGIN + COLUMN * number + COLUMN // 2 for number, name in enumerate(labels)}
    width = 2 * MARGIN + COLUMN * len(labels)
    shapes: list[str] = []
    open_frames: list[tuple[int, str]] = []
    y = MARGIN + BOX + ROW

    def at(name: str) -> int:
        if name not in places:
            raise UnreadableError(f"{name} is not a participant")
        return places[name]

    for line in lines[1:]:
        if PARTICIPANT.fullmatch(line):
            continue
        if match := MESSAGE.fullmatch(line):
            shapes += _message(at(match[1]), at(match[3]), y, match[4], is_reply=match[2] == "--")
        elif match := NOTE.fullmatch(line):
            shapes += _note(at(match[1]), at(match[2] or match[1]), y, match[3])
        elif match := FRAME.fullmatch(line):
            inset = 6 + 8 * len(open_frames)
            shapes.append(_text(inset + 10, y - 2, f"{match[1]}: {match[2]}", "start"))
            open_frames.append((y - 20, match[1]))
        elif line.startswith("else ") and open_frames:
            inset = 6 + 8 * (len(open_frames) - 1)
            shapes.append(f'<path class="frame" d="M{inset} {y - 20}H{width - inset}"/>')
            shapes.append(_text(inset + 10, y - 2, line, "start"))
        elif line == "end" and open_frames:
            top, _ = open_frames.pop()
            inset = 6 + 8 * len(open_frames)
            bottom = y - 24
            size = f'width="{width - 2 * inset}" height="{bottom - top}"'
            shapes.append(f'<rect class="frame" x="{inset}" y="{top}" {size} rx="4"/>')
            y -= ROW // 2
        else:
            raise UnreadableError(f"not understood in a sequence diagram: {line}")
        y += ROW
    if open_frames:
        raise UnreadableError(f"{open_frames[-1][1]} has no end")
    heads = [_actor(places[name], label, top=top) for name, label in labels.items() for top in (MARGIN, y)]
    lives = [f'<path class="life" d="M{x} {MARGIN + BOX}V{y}"/>' for x in places.values()]
    height = y + BOX + MARGIN
    title = escape(" → ".join(labels.values()))
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="Sequence: {title}">'
        + "".join([*lives, *shapes, *heads])
        + "</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _actor(x: int, label: str, *, top: int) -> str:
    half = COLUMN // 2 - 14
    rectangle = f'<rect class="actor" x="{x - half}" y="{top}" width="{2 * half}" height="{BOX}" rx="5"/>'
    return rectangle + _text(x, top + 22, label)


def _message(start: int, end: int, y: int, text: str, *, is_reply: bool) -> list[str]:
    line = "call reply" if is_reply else "call"
    if start == end:
        loop = f'<path class="{line}" d="M{start} {y - 8}h34v16h-28"/>'
        return [loop, _head(start + 6, y + 8, -1), _text(start + 42, y + 4, text, "start")]
    direction = 1 if end > start else -1
    return [
        f'<path class="{line}" d="M{start} {y}H{end - 6 * direction}"/>',
        _head(end, y, direction),
        _text((start + end) / 2, y - 7, text),
    ]


def _head(x: int, y: int, direction: int) -> str:
    return f'<path class="head" d="M{x} {y}l{-8 * direction} -4v8z"/>'


def _note(first: int, last: int, y: int, text: str) -> list[str]:
    width = max(abs(last - first) + COLUMN - 20, CHARACTER * len(text) + 20)
    middle = max((first + last) / 2, MARGIN + width / 2)
    box = f'<rect class="note" x="{middle - width / 2}" y="{y - 22}" width="{width}" height="30" rx="4"/>'
    return [box, _text(middle, y - 3, text)]
