"""Generates conversations from word lists, with the lengths, turns, prefixes and adapters of real traffic.

    workload = Workload(mix=MIXED_MIX, turns=3, prefixes=8, adapters=("pirate",))
    conversation = workload.conversation(random.Random(7))
    body = conversation.ask()           # the next turn
    conversation.answered("Once …")     # becomes part of the next one

Reproducible from the source of randomness, without any user's text in it.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bench.prompts import CHAT_MIX, Share, prompt


def chats_and_long_prompts(long_words: int) -> tuple[Share, ...]:
    """Chats of some fifty tokens, and of twenty requests one long prompt: uniform lengths never show its effect."""
    return (Share(0.95, 30, 50), Share(0.05, long_words, long_words * 11 // 10))


LONG_WORDS: Final = 45_000  # at least 50,000 tokens
MIXED_MIX: Final = chats_and_long_prompts(LONG_WORDS)
SMALL_MIXED_MIX: Final = chats_and_long_prompts(600)  # for a context of 2,048 tokens, with some turns
# Half of all prompts are shorter than 30 words, one in a hundred is longer than 400 (log-normal).
HEAVY_TAILED_MIX: Final = (Share(1.0, 4, 2000, median=30, spread=1.1),)
MIXES: Final = {"chat": CHAT_MIX, "mixed": MIXED_MIX, "mixed-small": SMALL_MIXED_MIX, "heavy-tailed": HEAVY_TAILED_MIX}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The traffic of one run."""

    mix: Sequence[Share] = CHAT_MIX
    turns: int = 1  # of one conversation; each brings along all that was said
    prefixes: int = 0  # so many different system prompts are shared by all conversations; 0: none has any
    prefix_words: int = 200
    adapters: Sequence[str] = ()  # the first is asked most, by Zipf's law; half of all traffic asks the base
    leaving: float = 0.0  # share of readers that go away in the middle of an answer
    extras: Sequence[Mapping[str, Any]] = ()  # further fields of a request; each request has those of one of them

    def conversation(self, draw: random.Random) -> "Conversation":
        """The next conversation, with all its turns."""
        system = ""
        if self.prefixes:
            number = draw.randrange(self.prefixes)
            system = prompt(random.Random(f"prefix {number}"), self.prefix_words)
        adapter = ""
        if self.adapters and draw.random() < 0.5:
            popularity = [1 / rank for rank in range(1, len(self.adapters) + 1)]
            adapter = draw.choices(self.adapters, popularity)[0]
        return Conversation(self, draw, adapter, [{"role": "system", "content": system}] if system else [])


@dataclass
class Conversation:
    """One conversation: questions and answers so far."""

    workload: Workload
    draw: random.Random
    adapter: str
    messages: list[dict[str, str]] = field(default_factory=list)
    asked: int = 0

    @property
    def over(self) -> bool:
        """Whether all turns were asked."""
        return self.asked >= self.workload.turns

    def ask(self) -> list[dict[str, str]]:
        """The messages of the next turn, history included."""
        share = self.draw.choices(self.workload.mix, [share.weight for share in self.workload.mix])[0]
        self.messages.append({"role": "user", "content": prompt(self.draw, share.words(self.draw))})
        self.asked += 1
        return list(self.messages)

    def answered(self, text: str) -> None:
        """Add the model's answer to the history."""
        self.messages.append({"role": "assistant", "content": text})

    def extra(self) -> dict[str, Any]:
        """Further fields of the next request."""
        return dict(self.draw.choice(self.workload.extras)) if self.workload.extras else {}

    def leaves_after(self, max_tokens: int) -> int | None:
        """After how many pieces of text the reader disconnects; None where the answer is read to its end."""
        if self.draw.random() >= self.workload.leaving:
            return None
        return self.draw.randint(1, max(1, max_tokens // 2))
