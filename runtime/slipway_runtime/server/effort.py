"""What a reasoning effort becomes: a hint for the chat template, in the words that it has. Pure.

| the chat template reads     | as in         | it gets                                                          |
|-----------------------------|---------------|------------------------------------------------------------------|
| `reasoning_effort`          | gpt-oss       | the nearest level that it names; `low` to `high` if it names none |
| `enable_thinking`, `thinking` | Qwen3, DeepSeek | false for `none`, true for every other effort                |
| neither                     | Llama         | nothing: the effort is ignored, and named                        |
"""

from collections.abc import Collection
from typing import Any, Final

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SWITCHES: Final = ("enable_thinking", "thinking")
_USUAL: Final = ("low", "medium", "high")


def effort_arguments(effort: str, variables: Collection[str], words: Collection[str]) -> dict[str, Any]:
    """The template's variables for an effort; none: it has no effect.

    variables: those that the template reads. words: its string constants, in which its levels are.
    """
    arguments: dict[str, Any] = {}
    if "reasoning_effort" in variables and (level := _nearest(effort, words)):
        arguments["reasoning_effort"] = level
    if effort in EFFORTS:
        arguments |= {switch: effort != "none" for switch in SWITCHES if switch in variables}
    return arguments


def _nearest(effort: str, words: Collection[str]) -> str:
    """The level of the template that is nearest to the effort, the higher one of two; empty for an unknown effort."""
    if effort in words or effort not in EFFORTS:
        return effort if effort in words else ""
    named = [level for level in EFFORTS if level in words]
    levels = named if len(named) > 1 else _USUAL  # a single one is the template's default
    wanted = EFFORTS.index(effort)
    return min(levels, key=lambda level: (abs(EFFORTS.index(level) - wanted), -EFFORTS.index(level)))
