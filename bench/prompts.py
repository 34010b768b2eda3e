"""Generates prompts from word lists: a mix of lengths, reproducible from a seed, without any user's text."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


def _words(text: str) -> list[str]:
    return text.split()


ANIMALS = _words("bear bird cat child cow dog duck farmer fish fox girl hen horse king lamb lion mouse pig wolf")
THINGS = _words("ball basket bell boat book box bread cake coin drum flower hat key kite lamp map nut ring stone tree")
PLACES = _words("barn beach bridge castle cave field forest garden hill house island lake market meadow river road")
QUALITIES = _words("big blue brave cold gentle green happy hungry kind little lost proud quick quiet red sad shy warm")


@dataclass(frozen=True)
class Share:
    """One kind of prompt in the mix: how often it comes, and how many words it has."""

    weight: float
    least_words: int
    most_words: int
    median: float = 0.0  # with `spread`, log-normal between the bounds; 0: uniform
    spread: float = 0.0  # the standard deviation of the logarithm

    def words(self, draw: random.Random) -> int:
        """The length of the next prompt of this kind."""
        if not self.median:
            return draw.randint(self.least_words, self.most_words)
        length = round(draw.lognormvariate(math.log(self.median), self.spread))
        return max(self.least_words, min(self.most_words, length))


CHAT_MIX = (Share(0.8, 8, 24), Share(0.2, 60, 160))  # short questions, and some that bring a page along


def prompts(seed: int, mix: Sequence[Share] = CHAT_MIX) -> Iterator[str]:
    """An endless stream of prompts; the same seed gives the same prompts."""
    draw = random.Random(seed)
    while True:
        share = draw.choices(mix, [share.weight for share in mix])[0]
        yield prompt(draw, share.words(draw))


def prompt(draw: random.Random, words: int) -> str:
    """A request of at least so many words; the question comes last."""
    question = f"Tell a story about a {draw.choice(QUALITIES)} {draw.choice(ANIMALS)} and a {draw.choice(THINGS)}."
    missing = words - len(question.split())
    text = [
        f"The {draw.choice(QUALITIES)} {draw.choice(ANIMALS)} saw a {draw.choice(THINGS)} by the {draw.choice(PLACES)}."
        for _ in range(-(-missing // 9))  # nine words each
    ]
    return " ".join([*text, question])
