"""Reads golden prompts, and judges how much worse a new revision answers them than the stable one. Pure.

Two numbers are compared with their limits, both in percent of the prompts, for answers with temperature 0:

- drop: how many points fewer of the stored answers the new revision gives than the stable one, or, where no replica of
  the stable one is there, than all of them;
- disagreement: how many prompts get another text from the new revision than from the stable one.

Sentences and errors hold numbers of lines, never a text of prompts or answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from slipway_api.words import count
from slipway_operator.core.actions import GoldenTest

MOST_PROMPTS: Final = 200


class GoldenError(ValueError):
    """The golden prompts cannot be read; the message says where, without their text."""


class _Line(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    prompt: str
    answer: str = ""
    max_tokens: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenPrompt:
    """One prompt, and a text that a right answer contains."""

    prompt: str = field(repr=False)
    answer: str = field(default="", repr=False)
    max_tokens: int = 16


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the answers are good enough, and the sentence with the numbers."""

    is_passed: bool
    sentence: str


def parse_prompts(text: str) -> tuple[GoldenPrompt, ...]:
    """Read JSON Lines; empty lines do not count."""
    prompts = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            read = msgspec.json.decode(line, type=_Line)
        except msgspec.DecodeError as exc:
            raise GoldenError(f"line {number} is not a JSON object with prompt, answer and maxTokens") from exc
        if not read.prompt or not 1 <= read.max_tokens <= 256:
            raise GoldenError(f"line {number} needs a prompt, and maxTokens of 1 to 256")
        prompts.append(GoldenPrompt(prompt=read.prompt, answer=read.answer, max_tokens=read.max_tokens))
    if not prompts:
        raise GoldenError("there is no prompt")
    if len(prompts) > MOST_PROMPTS:
        prompts_are = count(len(prompts), "prompt is", "prompts are")
        raise GoldenError(f"{prompts_are} too many; at most {MOST_PROMPTS} are allowed")
    return tuple(prompts)


def parse_config_map(body: dict[str, Any], key: str) -> tuple[GoldenPrompt, ...]:
    """Read the prompts of one key of a ConfigMap."""
    text = (body.get("data") or {}).get(key)
    if not isinstance(text, str):
        raise GoldenError(f"it has no key {key}")
    return parse_prompts(text)


def judge_answers(
    test: GoldenTest, prompts: Sequence[GoldenPrompt], new: Sequence[str], stable: Sequence[str] | None
) -> Verdict:
    """Compare the answers of the new revision with those of the stable one; None: there are none of it."""
    eval_name = f"golden prompts of {test.uri}"
    stored = [index for index, one in enumerate(prompts) if one.answer]
    found: list[str] = []
    problems: list[str] = []
    if stored:
        score = _score(prompts, new, stored)
        before = 100.0 if stable is None else _score(prompts, stable, stored)
        # 96.9% of the stored answers, and 100.0% before: 3.1 points lost > 2.0.
        told = f"{score:.1f}% of {len(stored)} stored answers after {before:.1f}%"
        (problems if before - score > test.max_drop + 1e-9 else found).append(
            f"{told}: {max(0.0, before - score):.1f} points lost, {test.max_drop:g} allowed"
        )
    if stable is not None:
        differ = sum(one != other for one, other in zip(new, stable, strict=True))
        share = 100.0 * differ / len(prompts)
        (problems if share > test.max_disagreement + 1e-9 else found).append(
            f"{share:.1f}% of {len(prompts)} answers differ from the stable revision's, "
            f"{test.max_disagreement:g}% allowed"
        )
    if not found and not problems:
        problems.append("no line has a stored answer, and no stable replica is ready to compare with")
    return Verdict(not problems, f"{eval_name}: {'; '.join(problems or found)}")


def _score(prompts: Sequence[GoldenPrompt], answers: Sequence[str], stored: Sequence[int]) -> float:
    return 100.0 * sum(prompts[index].answer in answers[index] for index in stored) / len(stored)
